"""A config of the same architecture with tiny sizes: every flag, kind of layer and kind of rotary embedding is kept."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from cuboid.models.batch.length_cases import LONGEST, shrunk
from cuboid.models.kinds.probe_rows import special_tokens

_FEATURES, _EXPERTS = 48, 8
_MOST_LAYERS, _AUDIO_BLOCKS, _LABELS = 8, 2, 3


@dataclass(frozen=True)
class Sizes:
    """The sizes of a small model. They decide nothing about which code runs.

    Args:
        vocabulary: number of tokens.
        heads: query heads.
        kv_heads: key and value heads; None for as many as query heads where the real model has as many, else half.
        head_dim: features of a head. The hidden size is ``heads * head_dim``.
        positions: of a table, or where some rotary embeddings rescale.
        window: tokens that attention sees where it has a window; None for a quarter of the positions.
    """

    vocabulary: int = 61
    heads: int = 4
    kv_heads: int | None = None
    head_dim: int = 16
    positions: int = 64
    window: int | None = None

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.heads * self.head_dim

    @property
    def fewer_heads(self) -> int:
        """Where a model has fewer heads of one kind than of another."""
        return self.heads // 2 if self.heads % 2 == 0 else 1


DEFAULT_SIZES = Sizes()
#: The keys of transformers' configs for a size.
_VOCABULARY = (
    *("vocab_size", "decoder_vocab_size"),
    *("encoder_hash_byte_group_vocab", "pronunciation_vocab_size", "shape_vocab_size"),
)
_HIDDEN = (
    *("hidden_size", "d_model", "n_embd", "dim_model", "emb_dim", "embedding_dim", "dim"),
    *("lru_width", "hidden_size_global", "pooler_hidden_size"),
)
_HEADS = (
    *("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads"),
    *("swa_num_attention_heads", "index_n_heads", "indexer_n_heads", "encoder_attention_heads"),
    *("linear_num_value_heads", "linear_num_heads"),
)
_HEAD_DIM = (
    *("head_dim", "swa_head_dim", "kv_channels", "dim_head", "d_head", "index_head_dim", "indexer_head_dim", "d_kv"),
    *("attention_head_size", "attention_head_dim", "query_pre_attn_scalar", "qk_head_dim"),
)
_POSITIONS = (
    *("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length", "max_target_positions"),
    "context_length",
)
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "n_head_kv")
_WINDOWS = ("sliding_window", "sliding_window_size", "window_size", "attention_window_size", "local_attention")
#: By the fields of :class:`Sizes`, the keys of which a config has one or more if its models have such a size.
KEYS: dict[str, tuple[str, ...]] = {
    "vocabulary": _VOCABULARY,
    "heads": _HEADS,
    "kv_heads": (*_KEY_VALUE_HEADS, "kv_n_heads"),
    "head_dim": (*_HEAD_DIM, *_HIDDEN),
    "positions": _POSITIONS,
    "window": _WINDOWS,
}


@functools.cache
def sizes_by_key(sizes: Sizes) -> Mapping[str, int]:
    """The small sizes, by the keys that configs of transformers use."""
    by_keys: tuple[tuple[int, tuple[str, ...]], ...] = (
        (sizes.vocabulary, _VOCABULARY),
        (sizes.hidden, _HIDDEN),
        (sizes.hidden // 2, ("pronunciation_embed_dim", "shape_embed_dim")),
        (sizes.heads, _HEADS),
        (sizes.fewer_heads, ("linear_num_key_heads",)),
        (sizes.kv_heads or sizes.fewer_heads, ("kv_n_heads",)),
        (sizes.head_dim, _HEAD_DIM),
        (sizes.head_dim // 2, ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim")),
        (sizes.head_dim // 2, ("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim")),
        (_FEATURES, ("intermediate_size", "intermediate_size_mlp", "dense_intermediate_size", "ffn_dim", "hidden_dim")),
        (_FEATURES, ("ffn_hidden_size", "decoder_ffn_dim", "dim_ff", "dff", "d_inner", "n_inner")),
        (_FEATURES, ("encoder_ffn_dim", "d_ff")),
        (24, ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size")),
        (24, ("shared_experts_intermediate_size", "moe_shared_expert_intermediate_size", "expert_ffn_hidden_size")),
        (12, ("q_lora_rank", "kv_lora_rank", "o_lora_rank", "adapter_rank", "laurel_rank", "hc_lowrank")),
        (4, ("gated_norm_rank", "time_step_rank", "mamba_dt_rank", "d_rel")),
        (32, ("hidden_size_per_layer_input",)),
        (_EXPERTS, ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")),
        (2, ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k")),
        (2, ("top_k_experts", "n_group", "num_expert_group", "zero_expert_num", "o_groups")),
        (1, ("topk_group",)),
        (2 * sizes.heads, ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")),
        (sizes.head_dim, ("mamba_d_head", "mamba_head_dim", "mamba_headdim")),
        (2 * sizes.hidden, ("mamba_d_ssm",)),
        (sizes.positions // 8, ("indexer_budget",)),
        # The longest rows have more blocks of keys than attention may see.
        (sizes.positions // 16, ("index_block_size",)),
        (3, ("index_topk_blocks",)),
        (8, ("mamba_d_state", "ssm_state_size", "state_size")),
        (2, ("mamba_n_groups", "n_groups", "index_topk")),
        (sizes.positions, _POSITIONS),
        (sizes.positions // 2, ("original_max_position_embeddings",)),
    )
    return {key: size for size, keys in by_keys for key in keys}


#: The same for image models. 16 patches and a class token are an odd number of positions.
_IMAGE_SIZES = {"image_size": 16, "patch_size": 4, "encoder_stride": 4, "pooler_output_size": DEFAULT_SIZES.hidden}
#: Names and indices of the layers whose states a backbone returns. They are dropped: small models have fewer layers.
_OF_BACKBONES = ("out_features", "out_indices", "_out_features", "_out_indices", "stage_names")
_LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"),
    "encoder_layers",
)
#: So many layers at the start are of one kind.
_FIRST_LAYERS = ("first_k_dense", "num_dense_layers", "moe_layer_start_index")
#: Lists of layers.
_INDICES = ("_layers", "_layer_ids", "_layer_indices", "_layer_idxs", "_layers_idx", "_idxs", "_layer_idx")
_INDICES_OF_TOWER = (*_INDICES, "_indexes", "_indices")
#: The number of a tower's layers, where it has no key of the others.
_DEPTH = "depth"
#: Parts of a config beside its text model's.
_TOWERS = (
    *("vision_config", "audio_config", "encoder_config", "vq_config", "qformer_config", "perceiver_config"),
    *("projector_config", "adaptor_config"),
)
#: Names of widths beside a text model, and parts of names that are none.
_WIDTHS = ("dim", "hidden_size", "intermediate_size", "_width", "embedding_size")
_NO_WIDTHS = ("head", "patch", "position", "rotary", "state", "temporal")
#: The text model's width, whatever it is: some configs by default have another, with which no model runs.
_OF_TEXT = ("out_hidden_size", "text_hidden_size", "output_dim")
#: A tower's own width; and names of widths inside its layers, which aren't the text model's even if they are equal.
_OF_TOWER = ("embed_dim", *_HIDDEN, "hidden_dim")
_INSIDE = ("intermediate", "ffn", "mlp", "encoder_ffn")
#: The numbers of query heads of all layers.
_HEADS_BY_LAYER = "num_attention_heads_per_layer"
#: So many layers at the end are of another kind: they use keys and values of earlier ones, or follow a norm.
_LAST_LAYERS = ("num_kv_shared_layers", "num_timestamp_prediction_layers")
#: Periods: one layer in so many differs, without a list in the config that says which.
_PERIODS = (
    *("full_attention_interval", "no_rope_layer_interval", "sliding_window_pattern", "_sliding_window_pattern"),
    *("interleave_moe_layer_step", "decoder_sparse_step", "expert_layer_period", "attn_layer_period"),
    *("global_attn_every_n_layers", "layer_group_size", "moe_layer_interval"),
)
#: Which layer of a period differs.
_OFFSETS = {"attn_layer_offset": "attn_layer_period", "expert_layer_offset": "expert_layer_period"}
_LONGEST_PERIOD = 4
_TOKENS = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "sep_token_id": 3, "cls_token_id": 2}
_FIRST_OF_TARGET = "decoder_start_token_id"
#: Numbers whose value doesn't decide which code runs.
_NUMBERS: dict[str, float] = {
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "layernorm_epsilon"), 1e-6),
}
#: Bases of rotary embeddings. Where layers have different ones, a model that mixes them up must not compute the same.
_BASES, _LEAST_BASE = ("rope_theta", "rotary_emb_base", "rope_local_base_freq"), 10000.0
#: Widths of embeddings. If they aren't the hidden size, projections follow, or precede the head.
_EMBEDDINGS = ("embedding_size", "word_embed_proj_dim")
#: So many of a vocabulary's first tokens have an entry in another table, or logits. Code asks whether those are all.
_FIRST_TOKENS, _OTHER_TOKENS = ("vocab_size_per_layer_input", "unpadded_vocab_size"), 5
_ROUTER_LOSS = 0.5
#: Keys that nothing here reads. They tell a checkpoint from a config that was made.
_UNREAD = frozenset(
    {
        *("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"),
        # The name of the weights file, which differs between ranks if a checkpoint was sharded ahead of time.
        "transformers_weights",
    }
)
#: Keys that don't decide which code runs.
_MEANINGLESS = _UNREAD | frozenset(
    {
        *("id2label", "label2id", "initializer_range", "problem_type"),
        *("return_dict", "output_attentions", "output_hidden_states", "use_cache"),
        *("finetuning_task", "task_specific_params", "auto_map", "quantization_config", "chunk_size_feed_forward"),
        *("router_aux_loss_coef", "attn_implementation", "_attn_implementation", "is_encoder_decoder"),
    }
)


def small_config(
    config: PretrainedConfig, layers: Sequence[int] | None = None, sizes: Sizes = DEFAULT_SIZES
) -> PretrainedConfig:
    """A copy with tiny sizes, in which :data:`LONGEST` tokens cross all lengths at which the model changes.

    Models that differ in nothing but their sizes have the same small config.

    Args:
        config: of the real model.
        layers: indices of the layers to keep; by default those that its lists and periods tell apart.
        sizes: of the copy.

    Raises:
        Exception: of any kind, from the config's own class, if the sizes don't fit together.
    """
    small = type(config)(**_shrunk_fields(config, layers, sizes, _Beside.of(config)))
    small._experts_implementation = "eager"  # the grouped kernels have no float64
    if getattr(small, "router_aux_loss_coef", None) is not None:
        # One value for all configs, large enough for mistakes to show.
        small.router_aux_loss_coef = _ROUTER_LOSS
    if config.is_encoder_decoder:
        # Some configs have this key only if the checkpoint's config.json does.
        setattr(small, _FIRST_OF_TARGET, _TOKENS["bos_token_id"])
    # These decide which loss a classifier has.
    small.num_labels = min(config.num_labels or 2, _LABELS)
    small.problem_type = config.problem_type
    return shrunk(small, LONGEST)


def meaningful_fields(config: PretrainedConfig) -> dict[str, Any]:
    """The fields of a small config that decide which code runs."""
    without = _MEANINGLESS | (_TOKENS.keys() - {"pad_token_id"}) | {_FIRST_OF_TARGET}
    return {name: value for name, value in config.to_dict().items() if name not in without}


def fields_read(config: PretrainedConfig) -> dict[str, Any]:
    """The fields of a real model's config on which its small one, and its kind, may depend."""
    return {name: value for name, value in config.to_dict().items() if name not in _UNREAD}


def layer_count(config: PretrainedConfig) -> int:
    """The largest number of layers in a config and those inside it; 0 if none has one."""
    inner = (getattr(config, name, None) for name in config.sub_configs)
    counts = [layer_count(part) for part in inner if isinstance(part, PretrainedConfig)]
    return max(
        [*counts, *(value for name in _LAYERS if isinstance(value := getattr(config, name, None), int))], default=0
    )


def _shrunk_fields(
    config: PretrainedConfig, layers: Sequence[int] | None, sizes: Sizes, beside: _Beside | None = None
) -> dict[str, Any]:
    fields = {name: value for name, value in config.to_dict().items() if name not in _MEANINGLESS}
    fields.pop("model_type", None)
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if isinstance(inner, PretrainedConfig):
            # Of its own class, which isn't always the one that the whole config has there by default.
            is_text = beside is None or inner is beside.text
            fields[name] = type(inner)(**_shrunk_fields(inner, layers, sizes, None if is_text else beside))
    kept = _KeptLayers.of(fields, layers, is_tower=beside is not None and beside.config is not config)
    original = fields if kept is None else {**fields, **kept.periods}
    fields = {
        name: _smaller(name, value, original, None, sizes) if kept is None else kept.field(name, original, sizes)
        for name, value in original.items()
    }
    if beside is not None:
        fields.update(beside.widths(original, sizes))
    if kept is not None:
        fields.update(kept.counts(original))
    if {"image_size", "patch_size"} <= fields.keys() and not config.sub_configs:
        fields = _of_images(fields)
    fields.update({name: value for name, value in _NUMBERS.items() if isinstance(original.get(name), float | int)})
    fields.update(_special_tokens(config, sizes))
    if beside is not None and beside.config is config:
        fields.update(_of_towers(config, fields))
    bases = _small_bases(original)
    fields.update({name: bases[original[name]] for name in _BASES if isinstance(original.get(name), float | int)})
    if isinstance(fields.get("rope_parameters"), dict):
        fields["rope_parameters"] = _rope(fields["rope_parameters"], fields, sizes, bases)
    return fields


@dataclass(frozen=True)
class _KeptLayers:
    """The layers of a config that its small one keeps.

    Args:
        count: of the config's.
        indices: of those that are kept.
        are_asked: whether the caller chose them.
        is_tower: whether the config is of what is beside a text model.
        lists: of a tower's config, its lists of layers of another kind, by name.
        periods: of the small config, where kinds of layers follow from their numbers.
    """

    count: int
    indices: list[int]
    are_asked: bool
    is_tower: bool
    lists: Mapping[str, Sequence[int]]
    periods: Mapping[str, int]

    @classmethod
    def of(cls, fields: Mapping[str, Any], layers: Sequence[int] | None, *, is_tower: bool) -> _KeptLayers | None:
        """Those of ``layers``, or a few of each kind; None if a config has no number of layers."""
        keys = (*_LAYERS, _DEPTH) if is_tower else _LAYERS
        key = next((name for name in keys if isinstance(fields.get(name), int)), None)
        if key is None:
            return None
        count = fields[key]
        periods = {} if layers is not None or _lists_by_layer(fields, count) else _shorter_periods(fields)
        lists = _lists_of_layers(fields, count) if is_tower else {}
        if layers is None:
            indices = _kept_layers({**fields, **periods}, count, lists.values())
        else:
            indices = [index for index in layers if index < count]
        return cls(count, indices, layers is not None, is_tower, lists, periods)

    def field(self, name: str, original: Mapping[str, Any], sizes: Sizes) -> Any:
        """A field of the small config: of lists and mappings by layer, what they have for the layers that are kept."""
        value = original[name]
        if name in self.lists or (
            isinstance(value, list) and len(value) != self.count and self._are_indices(name, value)
        ):
            return [place for place, index in enumerate(self.indices) if index in value]
        if isinstance(value, list) and len(value) == self.count:
            return [_of_layer(name, value[index], original, sizes) for index in self.indices]
        if isinstance(value, dict) and value and all(str(key).isdigit() for key in value):
            by_layer = {int(key): inner for key, inner in value.items()}
            return {place: by_layer[index] for place, index in enumerate(self.indices) if index in by_layer}
        return _smaller(name, value, original, self.indices, sizes)

    def _are_indices(self, name: str, value: list[Any]) -> bool:
        """Whether a list says which layers are of a kind."""
        if name.endswith("_layer_ids"):
            return True
        return self.are_asked and name.endswith(_INDICES) and all(type(index) is int for index in value)

    def counts(self, original: Mapping[str, Any]) -> dict[str, int]:
        """How many layers of some kind there are at the start, and at the end."""
        numbers = {name: value for name, value in original.items() if isinstance(value, int)}
        counts = {_DEPTH: len(self.indices)} if self.is_tower and numbers.get(_DEPTH) == self.count else {}
        if self.are_asked:
            before = {name: value for name, value in numbers.items() if name.startswith(_FIRST_LAYERS)}
            counts |= {name: sum(index < value for index in self.indices) for name, value in before.items()}
        last = {name: self.count - numbers[name] for name in _LAST_LAYERS if name in numbers}
        return counts | {name: sum(index >= start for index in self.indices) for name, start in last.items()}


def _of_images(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config whose models take images, with few patches."""
    fields = {name: value for name, value in fields.items() if name not in _OF_BACKBONES}
    fields.update({name: size for name, size in _IMAGE_SIZES.items() if isinstance(fields.get(name), int)})
    pairs = [name for name in _IMAGE_SIZES if isinstance(fields.get(name), list | tuple)]
    return {**fields, **{name: [_IMAGE_SIZES[name]] * 2 for name in pairs}}


@dataclass(frozen=True)
class _Beside:
    """A config of several models: what those beside the text model, and projectors between them, have of its sizes.

    Args:
        config: of all of them.
        text: the text model's.
        width: of its residual stream.
        towers: the widths of the others' residual streams.
    """

    config: PretrainedConfig
    text: PretrainedConfig
    width: int
    towers: frozenset[int]

    @classmethod
    def of(cls, config: PretrainedConfig) -> _Beside | None:
        """None for a config of one model, or of encoder and decoder."""
        if config.is_encoder_decoder or not any(name.endswith(_TOWERS) for name in config.sub_configs):
            return None
        text = config.get_text_config()
        width = getattr(text, "hidden_size", None)
        if text is config or not isinstance(width, int):
            return None
        parts = [getattr(config, name, None) for name in config.sub_configs]
        towers = [vars(part) for part in parts if isinstance(part, PretrainedConfig) and part is not text]
        widths = (next((fields[name] for name in _OF_TOWER if name in fields), None) for fields in towers)
        return cls(config, text, width, frozenset(width for width in widths if isinstance(width, int)))

    def widths(self, fields: Mapping[str, Any], sizes: Sizes) -> dict[str, int]:
        """Widths beside the text model: the text model's where they are, else in proportion to the tower's.

        Projectors take features of a tower by several patches at once, or return those of the text model, under
        names of their own. Equal widths stay equal, and multiples multiples.
        """
        numbers = {
            name: value
            for name, value in fields.items()
            if type(value) is int
            and value > 1
            and name.endswith(_WIDTHS)
            and not any(word in name for word in _NO_WIDTHS)
        }
        tower = next((numbers[name] for name in _OF_TOWER if name in numbers), None)
        known, small = sizes_by_key(sizes), dict[str, int]()
        for name, value in numbers.items():
            is_inside = name.startswith(_INSIDE)
            if name in _OF_TEXT or (value == self.width and not is_inside):
                small[name] = sizes.hidden
            elif tower is not None and value % tower == 0:
                small[name] = sizes.hidden * (value // tower)
            elif value in self.towers and name not in known and not is_inside:
                small[name] = sizes.hidden
            elif is_inside and self.width % value == 0:
                small[name] = max(1, sizes.hidden * value // self.width)
            elif tower is not None and name not in known:
                small[name] = max(1, value * sizes.hidden // tower)
        return small


def _of_towers(config: PretrainedConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    """From which of its towers' few layers features come, where a config says so by their numbers."""
    changes: dict[str, Any] = {}
    for name in config.sub_configs:
        real, small = getattr(config, name, None), fields.get(name)
        if not (name.endswith(_TOWERS) and isinstance(real, PretrainedConfig) and isinstance(small, PretrainedConfig)):
            continue
        count, kept = layer_count(real), layer_count(small)
        beginning = f"{name.removesuffix('_config')}_feature_layer"
        for key, value in fields.items() if count else ():
            layers = value if isinstance(value, list | tuple) else [value]
            if key.startswith(beginning) and all(type(layer) is int for layer in layers):
                fewer = [_hidden_states(layer, count, kept) for layer in layers]
                changes[key] = fewer if isinstance(value, list | tuple) else fewer[0]
    return changes


def _hidden_states(layer: int, count: int, kept: int) -> int:
    """Which of the hidden states of few layers stand for those of a layer, counted from 0 or backwards from -1."""
    if -kept <= layer < 0:
        return layer
    place = layer if layer >= 0 else count + 1 + layer
    return place * kept // count


def _lists_of_layers(fields: Mapping[str, Any], count: int) -> dict[str, Sequence[int]]:
    """A tower's lists of those of its layers that are of another kind, by name."""
    lists = {
        name: value
        for name, value in fields.items()
        if name.endswith(_INDICES_OF_TOWER) and isinstance(value, list | tuple) and len(value) != count
    }
    return {name: value for name, value in lists.items() if value and all(index in range(count) for index in value)}


def _special_tokens(config: PretrainedConfig, sizes: Sizes) -> dict[str, Any]:
    """Small ids, all different, for tokens that stand for images and the like, outside of the vocabulary as before."""
    ids = special_tokens(config)
    known = sorted({token for tokens in ids.values() for token in tokens})
    real = getattr(config.get_text_config(), "vocab_size", 0) if known else 0
    small = {
        token: sizes.vocabulary - 1 - number if token < real else sizes.vocabulary + number
        for number, token in enumerate(known)
    }
    values = {name: [small[token] for token in tokens] for name, tokens in ids.items()}
    return {
        name: value if isinstance(getattr(config, name), list | tuple) else value[0] for name, value in values.items()
    }


def _lists_by_layer(fields: Mapping[str, Any], count: int) -> list[list[Any]]:
    return [value for value in fields.values() if isinstance(value, list) and len(value) == count]


def _shorter_periods(fields: Mapping[str, Any]) -> dict[str, int]:
    """Periods of few layers, and their offsets.

    A period divides the one that it stands for, so that each layer's kind is still one that the real model has.
    """
    periods = {name: fields[name] for name in _PERIODS if isinstance(fields.get(name), int) and fields[name] > 1}
    short: dict[str, int] = {}
    for name, value in periods.items():
        # Periods of 5 and 7 layers, for example, stay.
        short[name] = max((n for n in range(2, _LONGEST_PERIOD + 1) if value % n == 0), default=value)
    offsets = {name: of for name, of in _OFFSETS.items() if of in short and isinstance(fields.get(name), int)}
    return {**short, **{name: fields[name] % short[of] for name, of in offsets.items()}}


def _kept_layers(fields: Mapping[str, Any], count: int, indices: Iterable[Sequence[int]] = ()) -> list[int]:
    """Indices of the layers to keep: up to two of each kind, or a period if kinds follow from a layer's number.

    Models whose layers are all alike get three, even if they have fewer: the number of layers decides nothing.
    """
    lists = [*_lists_by_layer(fields, count), *([index in some for index in range(count)] for some in indices)]
    last = [count - (fields.get(name) or 0) for name in _LAST_LAYERS]
    kinds: dict[tuple[str, ...], list[int]] = {}
    for index in range(count):
        kind = (*(str(value[index]) for value in lists), *(str(index >= start) for start in last))
        kinds.setdefault(kind, []).append(index)
    period = max((fields[name] for name in _PERIODS if isinstance(fields.get(name), int)), default=1)
    if not lists and period > 1:
        return list(range(min(count, max(4, period), _MOST_LAYERS)))
    first, second = ([index for places in kinds.values() for index in places[n : n + 1]] for n in (0, 1))
    kept = [*first, *second][:_MOST_LAYERS]
    more = [index for index in range(count) if index not in kept]
    again = [0] * 3 if len(kinds) == 1 else []
    return sorted([*kept, *[*more, *again][: max(0, 3 - len(kept))]])


def _smaller(name: str, value: Any, fields: Mapping[str, Any], kept: list[int] | None, sizes: Sizes) -> Any:
    # xLSTM's config has the number of layers under this key, too. Audio encoders have blocks that aren't layers.
    is_layer_count = name in _LAYERS or (name == "num_blocks" and value == fields.get("num_hidden_layers"))
    if is_layer_count and kept is not None:
        return len(kept)
    if name == "num_blocks" and kept is None:
        return min(value, _AUDIO_BLOCKS)
    if name == _FIRST_OF_TARGET:
        return _TOKENS["bos_token_id"]
    if name in _TOKENS:
        return None if value is None else _TOKENS[name]
    if name.endswith(("dropout", "pdrop", "dropout_prob", "dropout_rate", "jitter", "jitter_noise", "layerdrop")):
        return 0.0 if isinstance(value, float) else value
    if not isinstance(value, int) or isinstance(value, bool) or value <= 1:
        return value
    if name in _KEY_VALUE_HEADS:
        heads = next((fields[key] for key in ("num_attention_heads", "n_head") if key in fields), value)
        return sizes.kv_heads or (sizes.heads if value == heads else sizes.fewer_heads)
    if name == "head_dim" and "qk_rope_head_dim" in fields:
        return sizes.head_dim // 2 if value == fields["qk_rope_head_dim"] else sizes.head_dim
    if name == "num_heads" and "expand" in fields:
        return sizes.heads * fields["expand"]
    widths = {"attention_hidden_size": sizes.hidden, "attention_head_dim": sizes.head_dim}
    if name in widths and "attention_hidden_size" in fields:
        # Zamba's attention is twice as wide as its hidden states.
        return widths[name] * (fields["attention_hidden_size"] // fields["hidden_size"])
    if name in _WINDOWS:
        return sizes.window or sizes.positions // 4
    if name in _EMBEDDINGS:
        hidden = next((fields[key] for key in _HIDDEN if isinstance(fields.get(key), int)), value)
        return sizes.hidden if value == hidden else sizes.hidden // 2
    if name in _FIRST_TOKENS:
        return sizes.vocabulary - (_OTHER_TOKENS if value < fields.get("vocab_size", value) else 0)
    if name.startswith("first_k_dense") or name == "num_dense_layers":
        return 1
    small: int = sizes_by_key(sizes).get(name, value)
    return min(value, small) if name in _ONLY_SMALLER else small


def _of_layer(name: str, value: Any, fields: Mapping[str, Any], sizes: Sizes) -> Any:
    """An entry of a list that has one for each layer. Numbers of heads that differ from the config's still do."""
    if name != _HEADS_BY_LAYER or not isinstance(value, int):
        return value
    return sizes.heads if value == fields.get("num_attention_heads") else 2 * sizes.heads


#: Counts that tiny models may already have fewer of, so they are never raised.
_ONLY_SMALLER = frozenset({"n_group", "topk_group", "mamba_n_groups", "n_groups", "num_expert_group"})


def _small_bases(fields: Mapping[str, Any]) -> dict[float, float]:
    """The bases of rotary embeddings that stand for a model's: all different, and of a single one the usual one."""
    rope = fields.get("rope_parameters")
    ropes = [rope, *(inner for inner in rope.values() if isinstance(inner, dict))] if isinstance(rope, dict) else []
    places = [(place, name) for place in (fields, *ropes) for name in _BASES]
    bases = sorted({place[name] for place, name in places if isinstance(place.get(name), float | int)})
    return {base: _LEAST_BASE * 4**number for number, base in enumerate(bases)}


def _rope(
    rope: Mapping[str, Any], fields: Mapping[str, Any], sizes: Sizes, bases: Mapping[float, float]
) -> dict[str, Any]:
    """Rotary embedding parameters for the small heads."""
    if any(isinstance(inner, dict) for inner in rope.values()):
        return {
            name: _rope(inner, fields, sizes, bases) if isinstance(inner, dict) else inner
            for name, inner in rope.items()
        }
    dim = fields.get("qk_rope_head_dim") or fields.get("head_dim") or sizes.head_dim
    half = int(dim * rope.get("partial_rotary_factor", fields.get("partial_rotary_factor") or 1.0)) // 2
    change: dict[str, Callable[[Any], Any]] = {
        "long_factor": lambda factors: _spread(factors, half),
        "short_factor": lambda factors: _spread(factors, half),
        "mrope_section": lambda sections: _sections(sections, half),
        "original_max_position_embeddings": lambda _: sizes.positions // 2,
    }
    small = {name: change[name](value) if name in change and value else value for name, value in rope.items()}
    base = rope.get("rope_theta")
    return {**small, "rope_theta": bases[base]} if isinstance(base, float | int) else small


def _spread(factors: list[float], count: int) -> list[float]:
    return [factors[index * len(factors) // count] for index in range(count)]


def _sections(sections: list[int], half: int) -> list[int]:
    parts = [math.floor(half * section / sum(sections)) for section in sections]
    return [half - sum(parts[1:]), *parts[1:]]
