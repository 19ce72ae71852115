"""Apply the formulas for activation memory to a model."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from cuboid.distributed.topology import Coordinate, MeshShape
from cuboid.errors import UnsupportedModelError
from cuboid.models.architectures.attention_heads import HeadCounts, plan_key_value_heads
from cuboid.models.architectures.roles import find_roles
from cuboid.planner.end_memory import EndSizes, end_kept_bytes
from cuboid.planner.layer_memory import KeptSizes, layer_kept_bytes
from cuboid.planner.mesh_search import block_sizes

#: Keys of models' configs for dropout probabilities, and for the name of the nonlinearity.
_DROPOUTS = ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop")
_NONLINEARITIES = ("hidden_act", "activation_function")


def kept_sizes(model: PreTrainedModel, mesh: MeshShape, at: Coordinate) -> KeptSizes:
    """Sizes of a model's layers.

    Args:
        model: a full model of an architecture with a parallel plan; may be on the meta device.
        mesh, at: the mesh, and the rank's coordinate: with few key/value heads, some ranks keep more of them.

    Raises:
        UnsupportedModelError: it keeps attention scores or dropout masks, for which there is no formula.
    """
    _check_countable(model)
    counts = HeadCounts.of(model.config)
    roles = [role for name, role in find_roles(model).items() if ".0." in name]
    return KeptSizes(
        query_heads=counts.query,
        key_value=len(plan_key_value_heads(counts, mesh, at).keep) * counts.dim,
        nonlinearity=_kept_by_nonlinearity(model, gated=block_sizes(model, mesh).gated),
        head_norms=any(role.kind == "gathered" for role in roles),
    )


def end_sizes(model: PreTrainedModel) -> EndSizes:
    """Sizes of a full model's modules before the first layer and behind the last one."""
    config = model.config
    roles = find_roles(model).values()
    learned = sum(role.kind == "embedding" for role in roles) > 1
    return EndSizes(
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        positions=config.max_position_embeddings if learned else 0,
        rotary=0 if learned else HeadCounts.of(config).dim,
        norm="layer" if any(role.norm is not None and role.norm.kind == "layer" for role in roles) else "rms",
    )


def model_kept_bytes(
    model: PreTrainedModel, mesh: MeshShape, at: Coordinate, batch: int, length: int, *, element_bytes: int
) -> dict[str, int]:
    """Bytes that a rank keeps from forward to backward of a full model, by what keeps them.

    Args:
        model, mesh, at: as of :func:`kept_sizes`.
        batch, length, element_bytes: as of :func:`~cuboid.planner.layer_memory.layer_kept_bytes`.
    """
    kept = layer_kept_bytes(
        block_sizes(model, mesh), kept_sizes(model, mesh, at), mesh, batch, length, element_bytes=element_bytes
    )
    ends = end_kept_bytes(end_sizes(model), mesh, batch, length, element_bytes=element_bytes)
    layers: int = model.config.num_hidden_layers
    return {f"layers' {name}": layers * size for name, size in kept.items()} | {
        str(name): size for name, size in ends.items()
    }


def _check_countable(model: PreTrainedModel) -> None:
    if any(role.experts is not None for role in find_roles(model).values()):
        raise UnsupportedModelError(
            f"{type(model).__name__} has experts, which the count of kept activations has no rule for"
        )
    implementation = model.config._attn_implementation
    if implementation == "eager":
        raise UnsupportedModelError(
            'attn_implementation "eager" keeps scores of every pair of positions, which the count of kept activations '
            'has no rule for; use "sdpa"'
        )
    dropouts = [name for name in _DROPOUTS if getattr(model.config, name, 0)]
    if dropouts and model.training:
        raise UnsupportedModelError(
            f"{dropouts[0]} is {getattr(model.config, dropouts[0])}: the count of kept activations has no rule for "
            "dropout, whose masks are kept too; set it to 0"
        )


def _kept_by_nonlinearity(model: PreTrainedModel, *, gated: bool) -> int:
    """Number of tensors that the MLP keeps between its projections, found by running the nonlinearity."""
    name = next(getattr(model.config, name) for name in _NONLINEARITIES if hasattr(model.config, name))
    features, up = (torch.ones(8, device="cpu", requires_grad=True).clone() for _ in range(2))
    kept: set[int] = set()
    alive = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.numel() == features.numel():
            # Kept alive, so that no other tensor is allocated at its address.
            alive.append(x.detach())
            kept.add(_address(x))
        return x

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result: Any = ACT2FN[name](features)
        result = result * up if gated else result
    # Without the result, which counts as the input of "down".
    return len(kept - {_address(result)})


def _address(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()
