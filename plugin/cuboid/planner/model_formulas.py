"""Apply the formulas of communication and activation memory to a model."""

from __future__ import annotations

from cuboid.distributed.topology import Coordinate, MeshShape
from cuboid.models.architectures.attention_heads import HeadCounts, KeyValuePlan, plan_key_value_heads
from cuboid.planner.comm_formula import BlockSizes, ExpertSizes, LatentSizes
from cuboid.planner.description.model import Experts, Layer, ModelDescription
from cuboid.planner.end_memory import EndSizes, end_kept_bytes
from cuboid.planner.layer_memory import KeptSizes, layer_kept_bytes

_ORIGIN = Coordinate(0, 0, 0, 0, 0)


def block_sizes(model: ModelDescription, mesh: MeshShape) -> BlockSizes:
    """Sizes of one layer that represents all: the first one with experts, or else the first."""
    layer = next((candidate for candidate in model.layers if candidate.experts is not None), model.layers[0])
    attention = layer.attention
    # Attention whose heads the mesh doesn't divide is computed whole.
    plan = None if attention.heads % mesh.of("sequence", "hidden") else _key_value_plan(layer, mesh, _ORIGIN)
    by_name = {projection.name: projection for projection in layer.projections}
    qkv, up = by_name.get("qkv"), by_name.get("gate_up") or by_name.get("up")
    return BlockSizes(
        hidden=model.hidden,
        query=attention.query if layer.gathers_attention_input else 0,
        key_value=0 if layer.latents else attention.key,
        intermediate=layer.intermediate,
        gated=layer.gated,
        summed=None if plan is None or plan.scattered else plan.heads * attention.query_dim,
        whole_key_value=plan is not None and not plan.split_by_sequence,
        norm=model.norm,
        qkv_bias=qkv is not None and qkv.bias,
        out_bias="o" in by_name and by_name["o"].bias,
        mlp_bias=up is not None and up.bias,
        experts=None if layer.experts is None else _expert_sizes(layer, layer.experts),
        latents=_latent_sizes(layer) if layer.latents else None,
    )


def _expert_sizes(layer: Layer, experts: Experts) -> ExpertSizes:
    down = experts.projections[-1]
    gates = tuple(projection.outputs for projection in layer.projections if projection.name == "router")
    return ExpertSizes(experts.count, experts.per_token, down.inputs, layer.gated, gates)


def _latent_sizes(layer: Layer) -> LatentSizes:
    return LatentSizes(
        features=tuple(projection.outputs for projection in layer.latents),
        biases=tuple(projection.outputs for projection in layer.latents if projection.bias),
        normed=tuple(projection.inputs for projection in layer.from_latents),
        weights=sum(projection.weights for projection in layer.from_latents),
        output=layer.attention.output,
    )


def kept_sizes(model: ModelDescription, mesh: MeshShape, at: Coordinate) -> KeptSizes:
    """Sizes of the first layer that determine what it saves for backward, on the rank at a coordinate of the mesh.

    With few key/value heads, some ranks have more of them.
    """
    attention = model.layers[0].attention
    return KeptSizes(
        query_heads=attention.heads,
        key_value=len(_key_value_plan(model.layers[0], mesh, at).keep) * attention.query_dim,
        nonlinearity=model.nonlinearity,
        head_norms=attention.head_norms,
    )


def end_sizes(model: ModelDescription) -> EndSizes:
    """Sizes of the modules before the first layer and after the last one."""
    return EndSizes(
        hidden=model.hidden,
        vocabulary=model.vocabulary,
        positions=model.positions,
        rotary=model.layers[0].attention.rotary,
        norm=model.norm,
    )


def model_kept_bytes(
    model: ModelDescription, mesh: MeshShape, at: Coordinate, batch: int, length: int, *, element_bytes: int
) -> dict[str, int]:
    """Bytes that the rank at a coordinate saves for backward in a full model, by what saves them.

    Arguments are as in :func:`~cuboid.planner.layer_memory.layer_kept_bytes`.
    """
    by_keeper = layer_kept_bytes(
        block_sizes(model, mesh), kept_sizes(model, mesh, at), mesh, batch, length, element_bytes=element_bytes
    )
    ends = end_kept_bytes(end_sizes(model), mesh, batch, length, element_bytes=element_bytes)
    return {f"layers' {name}": len(model.layers) * size for name, size in by_keeper.items()} | {
        str(name): size for name, size in ends.items()
    }


def _key_value_plan(layer: Layer, mesh: MeshShape, at: Coordinate) -> KeyValuePlan:
    attention = layer.attention
    return plan_key_value_heads(HeadCounts(attention.heads, attention.key_value_heads, attention.query_dim), mesh, at)
