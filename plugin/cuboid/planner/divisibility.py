"""Whether a mesh divides a model, decided from the model's description alone, by the rules of sharding itself."""

from __future__ import annotations

from collections.abc import Iterator

from cuboid.distributed.topology import MeshShape, divisors
from cuboid.errors import MeshError
from cuboid.planner.description.model import ModelDescription


def mesh_misfit(model: ModelDescription, mesh: MeshShape) -> str | None:
    """Why a mesh can't cut a model, in words; None if it can."""
    if mesh.size == 1:
        return None
    ranks = mesh.of("sequence", "hidden")
    for layer in model.kinds:
        if layer.attention.heads % ranks:
            return f"{layer.attention.heads} attention heads don't divide by sequence × hidden = {ranks}"
        # What a projection up gives is cut over both axes; what is cut further over `batch` is padded.
        for size in (layer.attention.output, layer.intermediate):
            if size % ranks:
                return f"{size} features don't divide by {ranks}"
        queries = [layer.attention.query] if layer.gathers_attention_input else []
        for size in (model.hidden, *queries):
            if size % mesh.hidden:
                return f"{size} features don't divide by {mesh.hidden}"
        if layer.experts is not None and layer.experts.width % ranks:
            return f"{layer.experts.width} features of each expert don't divide by sequence × hidden = {ranks}"
    return None


def check_mesh(model: ModelDescription, mesh: MeshShape) -> None:
    """Raise if a mesh can't cut a model.

    Raises:
        MeshError: it can't; the message gives the reason, and meshes of the same size that can.
    """
    reason = mesh_misfit(model, mesh)
    if reason is not None:
        near = [str(other) for other in fitting(model, mesh.size)] or ["none"]
        raise MeshError(
            f"tensor_parallel.mesh {mesh} can't cut {model.name}: {reason}; meshes of {mesh.size} ranks that can: "
            f"{', '.join(near[:6])}"
        )


def fitting(model: ModelDescription, size: int) -> Iterator[MeshShape]:
    """Meshes of ``size`` ranks that can cut a model."""
    return (mesh for mesh in MeshShape.of_size(size) if mesh_misfit(model, mesh) is None)


def stage_counts(model: ModelDescription, ranks: int) -> list[int]:
    """Numbers of stages that divide the number of ranks and leave each stage at least one layer."""
    return [count for count in divisors(ranks) if count <= len(model.layers)]
