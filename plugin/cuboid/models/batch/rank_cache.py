"""The key/value cache of a generation: what a rank has of it, and which models have one.

Attention on a mesh has whole sequences of some heads and of the rows of `batch`, in generation as in training: a rank
caches the keys and values that it computes anyway, and no weight moves. A step's one token is padded to what the mesh
cuts a sequence into, as any length is. Neither the cache nor attention sees that padding: ranks call the model's own
attention function as plain transformers does, with their heads and rows.

Where a forward has few tokens, their sequence isn't cut at all (``whole_positions``): each rank has all of them, with
its part of the features, and there is no padding.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, PretrainedConfig

from cuboid.distributed.axis_collectives import all_gather, own_slice, padded_length
from cuboid.distributed.mesh import Mesh
from cuboid.errors import UnsupportedModelError

_COMPARED_NAMES = """
    afmoe apertus arcee aria_text axk1 beam bitnet cohere cohere2 cohere2_moe cohere_compass_text cwm dbrx
    deepseek_v2 deepseek_v3 diffllama dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma gemma2
    gemma3_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neox gpt_oss granite
    granite_swa granitemoe granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax
    internlm3 iquestcoder jais2 jetmoe kolibri1 laguna llama llama4_text longcat_flash mellum mimo_v2_flash minicpm3
    minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral modernbert-decoder nanochat nemotron olmo
    olmo2 olmo3 olmoe persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm
    starcoder2 vaultgemma youtu
"""
#: Types of models whose generation with a cache is compared with plain transformers' (``tests/models``). Others may
#: compute something from the sequence's length that a step of one token hasn't, or cache other things than keys.
COMPARED = frozenset(_COMPARED_NAMES.split())
#: Maximum number of new tokens in a row for which the sequence isn't cut.
_WHOLE_TOKENS = 64
#: They take the heads, rows and lengths of the call as they are.
_IMPLEMENTATIONS = ("eager", "sdpa")


class RankCache(DynamicCache):
    """The keys and values of a rank's heads and rows.

    Args:
        config: the model's.
        mesh: the model's mesh.
    """

    def __init__(self, config: PretrainedConfig, mesh: Mesh) -> None:
        super().__init__(config=config.get_text_config(decoder=True))
        self._mesh = mesh
        self._rows = self._new = 0
        #: Whether all tokens so far, if any, are of a single row.
        self._has_one_row = True
        #: Whether the running call of ``generate`` has checked that the model is as it was when it was sharded.
        self.is_checked = False
        #: Number of tokens before the forward that has begun.
        self.seen = 0
        #: Numbers of keys that this forward's layers have been given.
        self.lengths: set[int] = set()

    @classmethod
    def in_place_of(cls, cache: DynamicCache, config: PretrainedConfig, mesh: Mesh) -> None:
        """Make a script's own empty cache one of a rank, in place: the script then finds in it what was generated."""
        cache.__class__ = cls
        # Its layers stay: without a config it has none yet, and makes them without windows, as in plain transformers.
        cache.__dict__.update({name: x for name, x in vars(cls(config, mesh)).items() if name not in vars(cache)})

    def takes_whole(self, arguments: dict[str, Any], sharding: Any) -> bool:
        """Whether a forward with these arguments runs with :func:`whole_positions`; the same on all ranks."""
        ids = arguments.get("input_ids")
        has_few = isinstance(ids, torch.Tensor) and ids.dim() == 2 and ids.shape[1] <= _WHOLE_TOKENS
        has_labels = any(arguments.get(name) is not None for name in ("labels", "shift_labels"))
        # A model's own code that draws would need to know which ranks have the same tokens.
        return has_few and not has_labels and not torch.is_grad_enabled() and not sharding.draws.has_modules

    def has_one_row(self, arguments: dict[str, Any]) -> bool:
        """Whether a forward with these arguments, and the tokens before it, have one row; ranks of `batch` copy it."""
        ids = arguments.get("input_ids")
        is_one = isinstance(ids, torch.Tensor) and ids.dim() == 2 and ids.shape[0] == 1
        return is_one and (self._has_one_row or not self.get_seq_length())

    @staticmethod
    def keeps_few(keep: Any, arguments: dict[str, Any], mesh: Mesh) -> bool:
        """Whether a forward that is cut returns so few positions' logits that the head computes only these."""
        is_few = isinstance(keep, int) and 0 < keep <= min(_WHOLE_TOKENS, arguments["input_ids"].shape[1])
        return is_few and mesh.shape.size > 1 and not torch.is_grad_enabled()

    def begin(self, rows: int, new: int) -> None:
        """Begin a forward of ``new`` tokens in each of ``rows`` rows, which are the whole model's."""
        self._rows, self._new, self.seen = rows, new, int(self.get_seq_length())
        self._has_one_row = rows == 1 and (self._has_one_row or not self.seen)
        self.lengths = set()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``Cache.update``, without the padding behind the new tokens."""
        new_key, new_value = (x[:, :, : self._new] for x in (key_states, value_states))
        key, value = super().update(new_key, new_value, layer_idx, *args, **kwargs)
        self.lengths.add(key.shape[2])
        return key, value

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:  # noqa: ARG002
        """As ``Cache.get_mask_sizes``, for this forward's new tokens: the caller has a part of the padded ones."""
        sizes: tuple[int, int] = super().get_mask_sizes(self._new, layer_idx)
        return sizes

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """As ``Cache.reorder_cache``, with rows that other ranks of `batch` have. Collective over `batch`."""
        along = self._mesh.along("batch")
        if along.size == 1:
            super().reorder_cache(beam_idx)
            return
        filling = beam_idx[-1:].expand(padded_length(self._rows, along.size) - self._rows)
        chosen = own_slice(torch.cat([beam_idx, filling]), 0, along)
        for layer in self.layers:
            if layer.is_initialized:
                for name in ("keys", "values"):
                    all_rows = all_gather(getattr(layer, name), along).flatten(0, 1)
                    setattr(layer, name, all_rows.index_select(0, chosen.to(all_rows.device)))


def rank_cache(model: Any, given_cache: Any) -> RankCache:
    """A cache of the rank for a sharded model: a new one, or what a script gives, which becomes one if it is empty.

    Raises:
        UnsupportedModelError: the script's can't.
    """
    if given_cache is None:
        return RankCache(model.config, model.cuboid.mesh)
    if type(given_cache) is DynamicCache and not given_cache.get_seq_length() and not given_cache.offloading:
        RankCache.in_place_of(given_cache, model.config, model.cuboid.mesh)
    if isinstance(given_cache, RankCache):
        return given_cache
    is_filled = type(given_cache) is DynamicCache
    what = "DynamicCache with other tokens in it" if is_filled else type(given_cache).__name__
    raise UnsupportedModelError(
        f"past_key_values: a {what} has no rule on a mesh, whose ranks cache their own heads and rows; give an "
        "empty DynamicCache, or one that this model's generate has filled"
    )


def cache_obstacle(model: Any) -> str | None:
    """Why a sharded model generates without a cache; None if it has one."""
    sharding, config = model.cuboid, model.config
    if config.is_encoder_decoder:
        return "encoder-decoders have none"
    if model.training:
        return "there is none in training mode"
    if sharding.state.compiled is not None:
        return "graphs of compiled layers have none"
    if config.model_type not in COMPARED or sharding.verdict.inputs != "embeddings" or sharding.late is not None:
        return f"{config.model_type} was not compared with a cache"
    if config._attn_implementation not in _IMPLEMENTATIONS:
        known = " or ".join(map(repr, _IMPLEMENTATIONS))
        return f"attn_implementation {config._attn_implementation!r} has no rule for one, {known} has"
    return None
