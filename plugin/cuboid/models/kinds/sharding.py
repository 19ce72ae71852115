"""What a sharded model keeps of its sharding, for its own forward and for all that is done with it later."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from cuboid.config.schema import ActivationCheckpointingConfig, TensorParallelConfig
from cuboid.distributed.mesh import Mesh
from cuboid.models.architectures.certificate import MeshVerdict
from cuboid.models.architectures.roles import takes_pixels
from cuboid.models.batch.batch_check import Limits
from cuboid.models.batch.generator_check import Library
from cuboid.models.batch.length_cases import longest_sequence
from cuboid.models.kinds.model_kind import ModelKind
from cuboid.seq1f1b.runtime.host_store import HostStore
from cuboid.tensor3d.compiled.layers import CompiledLayers
from cuboid.tensor3d.layers.whole_block import ImageSplit, LateSplit


@dataclass(frozen=True)
class WholeModel:
    """Facts about the whole model that a sharded one, or a stage, keeps.

    Args:
        parameters: number of elements of each parameter by name; tied ones are counted once.
        embeddings: the names of embeddings' weights.
        limits: which values a micro-batch may contain.
    """

    parameters: dict[str, int]
    embeddings: frozenset[str]
    limits: Limits

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        kind: ModelKind,
        positions: int | None,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> WholeModel:
        """Collect the facts from a model.

        Args:
            model: before its modules are sharded.
            kind: of the model.
            positions: number of learned positions, or None.
            shapes: whole shapes by parameter name, if parameters are already shards.
        """
        shapes = shapes or {}
        counts = {name: math.prod(shapes.get(name, parameter.shape)) for name, parameter in model.named_parameters()}
        tables = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
        vocabulary = 0 if takes_pixels(model) else model.config.get_text_config().vocab_size
        tokens = getattr(model.get_input_embeddings(), "num_embeddings", vocabulary)
        longest = longest_sequence(model.config)
        # GPT-Neo's layers have them; those outside of layers, as GPT-BigCode's, aren't used.
        buffers = (buffer for name, buffer in model.named_buffers() if any(map(str.isdigit, name.split("."))))
        squares = (longest for buffer in buffers if buffer.shape[-2:] == (longest, longest))
        limits = Limits(
            *(kind, tokens, kind.classes, positions),
            longest=longest,
            masks=next(squares, None),
            spreads_hidden=not kind.is_causal and _adds_to_scores(model, tables),
        )
        return cls(counts, frozenset(f"{name}.weight" for name in tables), limits)


def _adds_to_scores(model: PreTrainedModel, tables: list[str]) -> bool:
    """Whether masks are numbers that are added to the scores: in eager attention, and with T5's relative positions."""
    return model.config._attn_implementation == "eager" or any("relative_attention_bias" in name for name in tables)


class FormerParameters:
    """Weak references to the parameters that a model had before it was sharded.

    They identify the parameters of an optimizer that was created before.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names: dict[int, tuple[weakref.ref[nn.Parameter], list[str]]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), (weakref.ref(parameter), []))[1].append(name)

    def names_of(self, parameter: nn.Parameter) -> Sequence[str]:
        """The names that a parameter had, several if it was tied; empty if it wasn't the model's."""
        reference, names = self._names.get(id(parameter), (None, []))
        # Once an object is freed, another one may have its id.
        return names if reference is not None and reference() is parameter else []


class GradientOwner(Protocol):
    """An optimizer that keeps a model's gradients outside of ``.grad``."""

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """What it steps: the model's parameters, or flat tensors of them."""

    def is_of(self, model: nn.Module) -> bool:
        """Whether the gradients are this model's."""

    def leave_gradients(self) -> None:
        """Let ``.grad`` of its parameters be read and set again, where it raises an error since a backward."""

    def zero_grad(self) -> None:
        """Clear the gradients."""

    def check_gradients(self, call: str) -> None:
        """Raise an error about a script's call unless the gradients are in ``.grad`` now, for which it looks there."""


class Adapters(Protocol):
    """The files of the adapters in a sharded model, which has frozen weights beside them."""

    @property
    def prefix(self) -> str:
        """What the library's model puts before the names of the sharded model's parameters."""

    def state(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The whole tensors of the adapters by their names in the library's files, on the first rank; collective."""

    def write(
        self, model: nn.Module, state: dict[str, torch.Tensor], folder: Path, selected: Sequence[str] | None = None
    ) -> None:
        """Write the result of :meth:`state` into a folder: all adapters, or those of some names."""

    def load(self, model: nn.Module, folder: Path) -> None:
        """Load the adapters from such a folder into the model."""


class Expected(Protocol):
    """What a mesh was chosen for, if it was chosen."""

    def check_adapter(self, config: PretrainedConfig, adapter: Any) -> None:
        """Raise an error if an adapter that the model, whole of this config, is to get doesn't fit."""


class TokensBefore(Protocol):
    """Virtual tokens of an adapter, which stand before the tokens of each row."""

    def before(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """A micro-batch, or a forward's arguments, with them before its rows."""

    def in_generation(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """A forward's arguments in generation, of which the first has them before its rows."""


class Draws(Protocol):
    """What a model's own code draws in training; see :class:`cuboid.models.sharded.random_modules.ModelDraws`."""

    @property
    def has_modules(self) -> bool:
        """Whether modules draw, so that each forward begins with :meth:`begin`."""

    @property
    def libraries(self) -> Collection[Library]:
        """Whose generators the model draws from."""

    def begin(self, rows: int, lengths: Sequence[int]) -> None:
        """Begin a forward of this rank's rows and positions."""


@dataclass
class ModelState:
    """What the loader, scripts and engines set on a sharded model after it was made; a forward sets nothing of it."""

    #: The model after sharding, to detect what a script changes on it later; None until that is done.
    made: Any = None
    #: The parameters that the model had before; None of one that was loaded.
    former: FormerParameters | None = None
    #: Writes the model as a Hugging Face checkpoint. The loader sets it, because the saver imports this module.
    save: Callable[..., None] | None = None
    #: Largest size, in bytes of float32, of a chunk of logits in the chunked loss; None for the device's default.
    chunk_bytes: int | None = None
    #: The config's ``activation_checkpointing``; None if the config leaves it to the script.
    checkpointing: ActivationCheckpointingConfig | None = None
    #: What checkpointed layers keep on the host; None if it stays on the device.
    host_store: HostStore | None = None
    #: The compiled layers; None unless they were to be compiled.
    compiled: CompiledLayers | None = None
    #: The files of the model's adapters; None if it has none.
    adapters: Adapters | None = None
    #: What the mesh was chosen for; None if the config names the mesh.
    expected: Expected | None = None
    #: What puts an adapter's virtual tokens before rows; None if the model has none.
    virtual_tokens: TokensBefore | None = None
    #: The optimizer that keeps this very model's gradients outside of ``.grad``, if one does. Weak, so that a copy of
    #: the model doesn't copy the optimizer.
    optimizer: weakref.ref[GradientOwner] | None = None
    #: The framework's engine around the model, if there is one; weak likewise.
    engine: weakref.ref[Any] | None = None


@dataclass(frozen=True)
class Sharding:
    """What was decided about a sharded model, and is known of it from then on; all the rest is its ``state``."""

    mesh: Mesh
    config: TensorParallelConfig
    base: type[PreTrainedModel]
    kind: ModelKind
    whole_model: WholeModel
    #: Result of the architecture's probe on a mesh.
    verdict: MeshVerdict
    #: Splits activations at the first layer, if the embedding doesn't.
    late: LateSplit | ImageSplit | None = None
    #: What the model's own code draws in training; None if it isn't split.
    draws: Draws | None = None
    #: The language model's head.
    head: nn.Module | None = None
    #: Whether the model gets masks of the whole sequence; see :class:`Lengths`.
    makes_masks: bool = True
    #: Whether routers see only the rank's own tokens, as those outside of blocks that are computed whole do.
    splits_routers: bool = False
    state: ModelState = field(default_factory=ModelState)
