"""A sharded model: the user's own class, whose forward takes whole micro-batches and returns whole results."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from cuboid.config import TensorParallelConfig
from cuboid.errors import CuboidError, UnsupportedModelError
from cuboid.hf.attention import Lengths, check_attention_ran, use_sharded_attention, whole_sequence
from cuboid.hf.batch import LocalBatch, check_same_batch, take_local_batch
from cuboid.hf.bounded import forward_with_bounded_loss
from cuboid.hf.chunks import CHUNK_BYTES
from cuboid.hf.layouts import Blueprint
from cuboid.hf.swap import ShardOf, attention_modules, swap_modules
from cuboid.hf.versions import keep_logits
from cuboid.mesh import Mesh
from cuboid.rank_agreement import StepGuard
from cuboid.tensor3d.loss import gather_logits, predicted, sharded_cross_entropy
from cuboid.tensor3d.parameter import keep_weights


class FormerParameters:
    """Those that a model had before it was sharded, for what was made of them then; it keeps none alive."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self._names: dict[int, tuple[weakref.ref[nn.Parameter], list[str]]] = {}
        for name, parameter in () if model is None else model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), (weakref.ref(parameter), []))[1].append(name)

    def names_of(self, parameter: nn.Parameter) -> Sequence[str]:
        """The names that a parameter had, several if it was tied; none if it wasn't the model's."""
        reference, names = self._names.get(id(parameter), (None, []))
        # An id is given to others once its object is gone.
        return names if reference is not None and reference() is parameter else []


@dataclass
class Sharding:
    """What a sharded model remembers about itself."""

    mesh: Mesh
    config: TensorParallelConfig
    base: type[PreTrainedModel]
    attention: dict[str, nn.Module]
    #: Largest size in float32 of the logits of which a loss alone is made, on one rank.
    chunk_bytes: int = CHUNK_BYTES
    checked: bool = False
    former: FormerParameters = field(default_factory=FormerParameters)


class ShardedModel:
    """Mixed into the model's own class by :func:`shard_modules`."""

    cuboid: Sharding

    def save_pretrained(self, directory: Any, **kwargs: Any) -> None:
        """As ``PreTrainedModel.save_pretrained``, whole. All ranks must call it, and each writes its share."""
        from cuboid.hf.save import save_sharded

        save_sharded(self, directory, **kwargs)  # type: ignore[arg-type]

    def counted_parameters(self: Any) -> list[nn.Parameter]:
        """This rank's parameters for sums over all ranks of a copy of the model: each element has one owner."""
        return list(self.parameters())

    def resize_token_embeddings(self, *_: Any, **__: Any) -> None:
        """Not on a sharded model.

        Raises:
            CuboidError: always.
        """
        raise CuboidError("resize the embeddings before the model is sharded, or in the checkpoint")


def shard_modules(
    model: PreTrainedModel, blueprint: Blueprint, mesh: Mesh, config: TensorParallelConfig, shard_of: ShardOf
) -> PreTrainedModel:
    """Turn a model into its sharded self, in place."""
    swap_modules(model, blueprint, mesh, shard_of)
    if config.weight_gather == "step":
        keep_weights(model)
    attention = {name: model.get_submodule(name) for name in attention_modules(blueprint)}
    use_sharded_attention(model.config, list(attention.values()), mesh)
    model.loss_function = functools.partial(sharded_loss, mesh=mesh)
    base = type(model)
    model.cuboid = Sharding(mesh, config, base, attention)
    model.__class__ = _sharded_class(base)  # type: ignore[arg-type]
    return model


def mesh_of(model: nn.Module) -> Mesh:
    """The mesh of a sharded model, or of an engine that wraps one.

    Raises:
        CuboidError: the model isn't sharded.
    """
    return sharding_of(model).mesh


def sharding_of(model: nn.Module) -> Sharding:
    """What a sharded model, or an engine that wraps one, remembers."""
    inner = unwrap(model)
    if not isinstance(inner, ShardedModel):
        raise CuboidError(
            f"{type(inner).__name__} isn't sharded; use cuboid.from_pretrained, cuboid.shard or deepspeed.initialize"
        )
    return inner.cuboid


def unwrap(model: nn.Module) -> nn.Module:
    """The sharded model inside engines and wrappers that keep it as ``module``."""
    while not isinstance(model, ShardedModel) and isinstance(getattr(model, "module", None), nn.Module):
        model = model.module  # type: ignore[assignment]
    return model


@functools.cache
def _sharded_class(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A subclass that goes by its base's name, so that configs and checkpoints say what they would have said."""
    signature = inspect.signature(base.forward)

    # Trainers read this signature to learn which columns and loss arguments the model takes.
    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = dict(signature.bind(self, *args, **kwargs).arguments)
        del arguments["self"]
        extra = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
        arguments.update(arguments.pop(extra, {}) if extra else {})
        with StepGuard(self.cuboid.mesh, "forward"):
            return _forward(self, functools.partial(base.forward, self), arguments)

    members = {"forward": forward, "__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (ShardedModel, base), members)


def _forward(model: Any, base_forward: Any, arguments: dict[str, Any]) -> Any:
    sharding: Sharding = model.cuboid
    sharding.mesh.connect()
    as_tuple = arguments.pop("return_dict", None) is False
    keep = arguments.pop("logits_to_keep", 0)
    if keep is not None and arguments.get("labels") is not None and not (isinstance(keep, int) and keep == 0):
        raise UnsupportedModelError("logits_to_keep has no rule beside labels: the loss needs all logits")
    batch = take_local_batch(arguments, model.config, sharding.mesh)
    if not sharding.checked:
        check_same_batch(arguments["input_ids"], sharding.mesh)
    bounded = _wants_loss_only(model, batch)
    with whole_sequence(Lengths(batch.length, batch.padded)):
        run = functools.partial(base_forward, **_local_arguments(model, batch), return_dict=True)
        if bounded:
            output = forward_with_bounded_loss(
                model, run, unbound=sharding.base.forward, mesh=sharding.mesh, chunk_bytes=sharding.chunk_bytes
            )
        else:
            output = run()
    if not sharding.checked:
        check_attention_ran(sharding.attention)
        sharding.checked = True
    if not bounded:
        output.logits = _whole_logits(model, output.logits, batch, has_loss=output.loss is not None)
    if keep is not None and output.logits is not None:
        output.logits = keep_logits(output.logits, keep)
    return output.to_tuple() if as_tuple else output


def _local_arguments(model: Any, batch: LocalBatch) -> dict[str, Any]:
    # The embedding runs here: it needs the ids of the whole sequence and returns a part of it, while the model's own
    # code takes the shape of everything that follows from what it is given.
    tensors = dict(batch.tensors)
    embeddings = model.get_input_embeddings()(tensors.pop("input_ids"))
    return {**batch.options, **tensors, "inputs_embeds": embeddings, "use_cache": False}


def _wants_loss_only(model: Any, batch: LocalBatch) -> bool:
    """Whether no logits need ever be whole: they aren't wanted, and the loss that is made of them is ours."""
    ours = getattr(model.loss_function, "func", None) is sharded_loss
    return ours and "labels" in batch.tensors and model.base_model is not model and not _wants_logits(model)


def _wants_logits(model: Any) -> bool:
    wanted = model.cuboid.config.gather_logits
    return not model.training if wanted == "auto" else wanted


def _whole_logits(model: Any, logits: torch.Tensor, batch: LocalBatch, *, has_loss: bool) -> torch.Tensor | None:
    if has_loss and not _wants_logits(model):
        return None
    return gather_logits(logits, model.cuboid.mesh, length=batch.length, vocabulary=model.config.vocab_size)


def sharded_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | float | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    *,
    mesh: Mesh,
    **_: Any,
) -> torch.Tensor:
    """In place of Hugging Face's ``ForCausalLMLoss``, on logits ``[B/b, S/h, V/s]``."""
    return sharded_cross_entropy(
        logits,
        predicted(labels, shift_labels, ignore_index),
        vocabulary=vocab_size,
        mesh=mesh,
        items=num_items_in_batch,
        ignore_index=ignore_index,
    )
