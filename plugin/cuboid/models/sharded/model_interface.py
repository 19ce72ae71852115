"""Methods of transformers models on a sharded model: each returns what the whole model's would, or raises an error that
names what to call instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from cuboid.distributed.mesh import Mesh
from cuboid.errors import CuboidError, UnsupportedModelError
from cuboid.models.batch.rank_cache import cache_obstacle, rank_cache
from cuboid.models.cross_entropy.lm_head import running_module
from cuboid.models.sharded.activation_checkpointing import keeping
from cuboid.models.sharded.compilation import compile_later
from cuboid.tensor3d.layers.linear import ShardedLinear
from cuboid.tensor3d.sharding.full_params import whole_parameter
from cuboid.tensor3d.sharding.kept_blocks import keeping_blocks
from cuboid.tensor3d.sharding.refused_draws import RefusesDraws, words_of_apply
from cuboid.tensor3d.sharding.sharded_param import check_knows_of_shards

_logger = logging.getLogger(__name__)
#: Arguments of ``generate`` that are a script's own code.
_SCRIPT_CODE = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "custom_generate")


class WholeInterface:
    """Mixed into a sharded model's class, in front of the architecture's."""

    cuboid: Any
    config: Any

    def resize_token_embeddings(
        self: Any,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,  # noqa: ARG002
    ) -> nn.Embedding:
        """Return the embedding unchanged, if it has enough rows.

        Scripts compare the tokenizer's length with ``weight.shape[0]``. That is a shard's size here, so they may call
        this without need. A request for fewer rows is therefore only logged.

        Raises:
            CuboidError: more rows are requested.
        """
        present = self.cuboid.whole_model.limits.tokens
        wanted = present if new_num_tokens is None else new_num_tokens
        if pad_to_multiple_of is not None:
            wanted = -(-wanted // pad_to_multiple_of) * pad_to_multiple_of
        if wanted > present:
            raise CuboidError(
                f"resize_token_embeddings({wanted}): the embedding has {present} rows and is sharded, so that none can "
                "be added. Resize it in plain transformers, save the checkpoint, and load that"
            )
        if wanted < present and self.cuboid.mesh.rank == 0:
            _logger.warning(
                "resize_token_embeddings(%d): a sharded model keeps its %d rows. (If a script compared with "
                "weight.shape[0]: that is a shard's; model.config.vocab_size is the whole model's)",
                wanted,
                present,
            )
        embedding: nn.Embedding = self.get_input_embeddings()
        return embedding

    def set_input_embeddings(self, *_: Any, **__: Any) -> None:
        """Not supported on a sharded model.

        Raises:
            CuboidError: always.
        """
        raise CuboidError("set_input_embeddings: replace modules before the model is sharded")

    def set_output_embeddings(self, *_: Any, **__: Any) -> None:
        """Not supported on a sharded model.

        Raises:
            CuboidError: always.
        """
        raise CuboidError("set_output_embeddings: replace modules before the model is sharded")

    def get_output_embeddings(self) -> nn.Module | None:
        """The head, with the whole model's weight. Its computation isn't sharded: each rank does all of it."""
        head: nn.Module | None = super().get_output_embeddings()  # type: ignore[misc]
        if head is None:
            return None
        head = running_module(head)
        if isinstance(head, ShardedLinear):
            return WholeHead(head)
        # An adapter around it adds to what it computes.
        linear = next((module for module in head.modules() if isinstance(module, ShardedLinear)), None)
        adapted = next((module for module in head.modules() if hasattr(type(module), "whole_update")), None)
        return head if linear is None or adapted is None else WholeHead(linear, adapted)

    def _set_gradient_checkpointing(self: Any, *args: Any, enable: bool = True, **options: Any) -> None:
        """As in transformers, which calls it for ``gradient_checkpointing_enable`` and for ``…_disable``.

        What the config keeps, and where, the checkpointing that a script enables keeps too.
        """
        if enable and self.cuboid.state.checkpointing is not None:
            function = options.get("gradient_checkpointing_func")
            options["gradient_checkpointing_func"] = keeping(
                function, self.cuboid.state.checkpointing, self.cuboid.state.host_store
            )
        super()._set_gradient_checkpointing(*args, enable=enable, **options)  # type: ignore[misc]

    def num_parameters(self: Any, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Number of the whole model's parameters, tied ones counted once; as ``PreTrainedModel.num_parameters``.

        Raises:
            CuboidError: ``only_trainable`` in a pipeline, since a stage can't see which parameters others train.
        """
        whole_model = self.cuboid.whole_model
        left_out = whole_model.embeddings if exclude_embeddings else ()
        counts = {name: count for name, count in whole_model.parameters.items() if name not in left_out}
        if only_trainable:
            if self.cuboid.mesh.topology.pipe > 1:
                raise CuboidError("num_parameters(only_trainable=True): a stage knows only which parameters it trains")
            frozen = {name for name, parameter in self.named_parameters() if not parameter.requires_grad}
            counts = {name: count for name, count in counts.items() if name not in frozen}
        return sum(counts.values())

    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        """The state dict of a model on one rank. On several, it would have shards under the names of whole tensors.

        Raises:
            UnsupportedModelError: the model is on several ranks; the message names what returns whole tensors.
        """
        if len(self.cuboid.mesh.copy_ranks) > 1:
            check_knows_of_shards(self)
        return super().state_dict(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a state dict into a model on one rank.

        Raises:
            CuboidError: the model is on several ranks.
        """
        if len(self.cuboid.mesh.copy_ranks) > 1:
            raise CuboidError(
                f"{type(self).__name__}.load_state_dict() can't cut whole tensors into parts; load a checkpoint's "
                "folder with cuboid.from_pretrained or an engine's load_checkpoint"
            )
        return super().load_state_dict(state_dict, *args, **kwargs)  # type: ignore[misc]

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As ``GenerationMixin.generate``. Collective over the mesh.

        Each rank caches keys and values of its heads and rows, in models for which :func:`cache_obstacle` has none; in
        others, and in encoder-decoders, each step runs the whole sequence. All ranks sample with the random number
        generator state of the mesh's first rank, and keep it afterwards.

        Raises:
            UnsupportedModelError: an argument has no rule, such as a cache with something in it.
        """
        _check_alike(self, args, kwargs)
        if kwargs.get("cache_implementation") not in (None, "dynamic"):
            raise UnsupportedModelError(
                f"cache_implementation={kwargs['cache_implementation']!r} has no rule on a mesh; leave it out"
            )
        self.cuboid.kind.check_generation(kwargs)
        obstacle = cache_obstacle(self)
        if obstacle is not None:
            if kwargs.get("past_key_values") is not None:
                raise UnsupportedModelError(
                    f"past_key_values has no rule for this {type(self).__name__} on a mesh: {obstacle}; leave it out"
                )
            if kwargs.get("use_cache") and self.cuboid.mesh.rank == 0:
                _logger.warning("generate(use_cache=True): %s; every step runs all tokens", obstacle)
            kwargs = {**kwargs, "use_cache": False}
        if self.config.is_encoder_decoder:
            kwargs = _with_encoder_ids(args, kwargs)
        self.cuboid.mesh.connect()
        _share_generator(self.cuboid.mesh, self.device)
        # Code of a script that runs in the call may change weights by ``.data``, which nothing counts.
        with nullcontext() if any(kwargs.get(name) for name in _SCRIPT_CODE) else keeping_blocks():
            return super().generate(*args, **kwargs)  # type: ignore[misc]

    def _prepare_cache_for_generation(
        self: Any, generation_config: Any, model_kwargs: dict[str, Any], *_: Any, **__: Any
    ) -> None:
        """Called by ``GenerationMixin.generate``, whose cache would hold padding and know none of the mesh's rows."""
        given_cache = model_kwargs.get("past_key_values")
        if given_cache is not None or generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = cache = rank_cache(self, given_cache)
            if given_cache is not None:
                cache.is_checked = False
                # As transformers marks it.
                cache._is_user_defined = True

    def prepare_inputs_for_generation(
        self: Any, *args: Any, encoder_outputs: BaseModelOutput | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Called by ``GenerationMixin.generate`` in each step; see :func:`_with_encoder_ids`."""
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(*args, **kwargs)  # type: ignore[misc]
        if encoder_outputs is not None:
            inputs["input_ids"] = encoder_outputs.last_hidden_state
        return inputs

    def apply(self: Any, fn: Callable[[nn.Module], None]) -> Any:
        """As ``nn.Module.apply``, for functions that don't draw random numbers.

        Raises:
            UnsupportedModelError: the function draws new values, which would be the same ones for all ranks' shards.
        """
        with self._refusing_draws(words_of_apply("model", fn)):
            return super().apply(fn)  # type: ignore[misc]

    def initialize_weights(self: Any) -> None:
        """As ``PreTrainedModel.initialize_weights``, where nothing has to be drawn: what was loaded stays.

        Raises:
            UnsupportedModelError: something would be drawn, as in :meth:`apply`.
        """
        with self._refusing_draws("initialize_weights (init_weights)"):
            super().initialize_weights()  # type: ignore[misc]

    def _refusing_draws(self: Any, call: str) -> AbstractContextManager[Any]:
        return RefusesDraws(call) if self.cuboid.state.made.is_cut else nullcontext()

    def push_to_hub(self, *_: Any, **__: Any) -> None:
        """Not supported on a sharded model.

        Raises:
            CuboidError: always.
        """
        raise CuboidError(
            "push_to_hub would upload each rank's part from a folder of its own; call "
            "save_pretrained(folder, push_to_hub=True, repo_id=…) on all ranks, of which the first one uploads"
        )

    def compile(self: Any, **options: Any) -> None:
        """Compile the layers, as the config's ``tensor_parallel.compile`` does. What is between them isn't compiled.

        Raises:
            UnsupportedModelError: another compiler than Inductor, or a mode of it.
        """
        compile_later(self, options)

    def load_adapter(self, *_: Any, **__: Any) -> None:
        """Not supported on a sharded model.

        Raises:
            UnsupportedModelError: always.
        """
        raise UnsupportedModelError(
            f"load_adapter isn't supported on a sharded {type(self).__name__}; PEFT's PeftModel.from_pretrained(model, "
            "folder, is_trainable=True) loads an adapter into it"
        )


class WholeHead(nn.Module):
    """A sharded head with the interface of a plain linear layer.

    Attributes:
        weight: ``[V, H]``, all-gathered at each access, which is collective over the mesh: scripts keep the head, and
            nothing counts what they or an optimizer change in a shard by ``.data``. Gradients go to the shards; all
            ranks must compute the same with it.
        bias: ``[V]`` or None; as ``weight``.

    Args:
        head: the layer itself.
        adapted: an adapter around it, whose ``whole_update(hidden)`` is added.
    """

    def __init__(self, head: ShardedLinear, adapted: Any = None) -> None:
        super().__init__()
        # In a tuple, so that its parameters aren't registered as this module's.
        self._head, self._adapted = (head,), (adapted,)
        self.in_features, self.out_features = head.in_features, head.out_features

    @property
    def weight(self) -> torch.Tensor | None:
        return whole_parameter(self._head[0], "weight")

    @property
    def bias(self) -> torch.Tensor | None:
        return whole_parameter(self._head[0], "bias")

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:  # noqa: ARG002
        """Not supported; what a script sets as an attribute comes here, too.

        Raises:
            CuboidError: always.
        """
        raise CuboidError(
            f"get_output_embeddings().{name} is the head's whole tensor, gathered at each access, so that another one "
            "in its place would have no effect; replace it before the model is sharded"
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[B, S, H]`` to ``[B, S, V]``, both whole and the same on all ranks."""
        weight = self.weight
        assert weight is not None
        logits = nn.functional.linear(hidden, weight, self.bias)
        (adapted,) = self._adapted
        return logits if adapted is None else logits + adapted.whole_update(hidden)


def _check_alike(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check arguments of ``generate`` by which ranks would differ in what they run.

    Raises:
        UnsupportedModelError: names one.
    """
    configs = (*args[1:2], kwargs.get("generation_config"), model.generation_config)
    limits = (kwargs.get("max_time"), *(getattr(config, "max_time", None) for config in configs))
    if model.cuboid.mesh.shape.size > 1 and any(limit is not None for limit in limits):
        raise UnsupportedModelError(
            "max_time: each rank has its own clock, and one that stops alone leaves the others waiting; limit "
            "max_new_tokens"
        )
    if kwargs.get("inputs_embeds") is not None:
        raise UnsupportedModelError(
            "generate(inputs_embeds=…) has no rule on a sharded model, whose ranks look up the ids themselves; give "
            "input_ids"
        )
    if kwargs.get("encoder_outputs") is not None:
        raise UnsupportedModelError(
            "encoder_outputs has no rule on a mesh, where the encoder runs in each step; give input_ids"
        )


def _with_encoder_ids(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``generate`` with the encoder's ids in the place of its output, of which a rank has a part.

    So each step runs the encoder too, as a forward does.
    """
    ids = next((x for x in (*args[:1], kwargs.get("inputs"), kwargs.get("input_ids")) if x is not None), None)
    if ids is None:
        raise CuboidError("generate: an encoder-decoder on a mesh needs input_ids [batch, sequence]")
    return {**kwargs, "encoder_outputs": BaseModelOutput(last_hidden_state=ids)}


def _share_generator(mesh: Mesh, device: torch.device) -> None:
    """Broadcast the first rank's random number generator state over the mesh, so that all ranks sample alike."""
    if mesh.shape.size == 1 or mesh.in_threads:  # threads have one generator
        return
    module: Any = torch if device.type == "cpu" else torch.get_device_module(device)
    state = module.get_rng_state().to(device)
    dist.broadcast(state, mesh.mesh_ranks[0], group=mesh.mesh_group)
    module.set_rng_state(state.cpu())
