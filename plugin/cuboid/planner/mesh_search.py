"""``"mesh": "auto"``: choose the mesh whose layers send the fewest bytes, by the closed formula."""

from __future__ import annotations

from transformers import PreTrainedModel

from cuboid.config.schema import CuboidConfig
from cuboid.distributed.topology import Coordinate, MeshShape
from cuboid.errors import MeshError
from cuboid.models.architectures.attention_heads import HeadCounts, plan_key_value_heads
from cuboid.models.architectures.roles import blocks_computed_whole, find_roles
from cuboid.models.certification.mesh_certificates import mesh_verdict
from cuboid.models.sharded.parallel_plan import fitting_meshes, out_features
from cuboid.planner.comm_formula import BlockSizes, layer_bytes

#: Assumed rows of a micro-batch, if the config doesn't have them, and sequence length, which isn't known yet when
#: weights are loaded. The choice depends on their product only weakly.
_ASSUMED_BATCH, _ASSUMED_LENGTH = 8, 2048
#: Assumed number of segments of a pipeline that chooses it itself.
_ASSUMED_SEGMENTS = 4


def choose_mesh(model: PreTrainedModel, config: CuboidConfig, cls: type[PreTrainedModel] | None = None) -> MeshShape:
    """The configured mesh, or for ``"auto"`` the best of its size that fits the model and the micro-batch.

    Where blocks are computed whole, that is the one with the longest `batch` axis, for all others compute them several
    times.

    Args:
        model: on any device, meta included.
        config: Cuboid's.
        cls: the architecture's class, where the model's is one that was derived from it.

    Raises:
        MeshError: no mesh of that size fits.
    """
    settings = config.tensor_parallel
    if settings.mesh != "auto":
        return settings.mesh.shape
    if settings.mesh_size == 1:
        return MeshShape()
    rows = config.micro_batch
    verdict = mesh_verdict(cls or type(model), model.config)
    fitting = [m for m in fitting_meshes(model, settings.mesh_size, verdict) if rows is None or rows % m.batch == 0]
    if not fitting:
        raise MeshError(
            f"no mesh of tensor_parallel.size = {settings.mesh_size} ranks fits {type(model).__name__} and "
            f"train_micro_batch_size_per_gpu = {rows}; a multiple of {settings.mesh_size} rows always does"
        )
    if blocks_computed_whole(model, verdict.whole):
        return max(fitting, key=lambda mesh: (mesh.batch, mesh.sequence))
    # Weights are gathered, and their gradients reduced, once for each segment.
    length: int = min(_ASSUMED_LENGTH, model.config.max_position_embeddings)
    if config.pipeline is not None:
        segments = config.pipeline.segments
        length = max(1, length // (_ASSUMED_SEGMENTS if segments == "auto" else segments))

    def sent(mesh: MeshShape) -> int:
        sizes = block_sizes(model, mesh)
        by_axes = layer_bytes(sizes, mesh, rows or _ASSUMED_BATCH, length, weight_gather=settings.weight_gather)
        return sum(by_axes.values())

    return min(fitting, key=sent)


def block_sizes(model: PreTrainedModel, mesh: MeshShape) -> BlockSizes:
    """The sizes of the model's first layer, which stand for all."""
    # ".0.": the modules of the first decoder layer.
    layer = [(model.get_submodule(name), role) for name, role in find_roles(model).items() if ".0." in name]
    counts = HeadCounts.of(model.config)
    plan = plan_key_value_heads(counts, mesh, Coordinate(0, 0, 0, 0, 0))
    ups = [module for module, role in layer if role.kind == "up" and role.heads is None]
    into_attention = [module for module, role in layer if role.heads is not None]
    downs = [module for module, role in layer if role.kind == "down"]
    return BlockSizes(
        hidden=model.config.hidden_size,
        query=counts.query * counts.dim,
        key_value=counts.key_value * counts.dim,
        intermediate=out_features(ups[0]),
        gated=len(ups) == 2,
        summed=None if plan.scattered else plan.heads * counts.dim,
        whole_key_value=not plan.split_by_sequence,
        norm="layer" if any(role.norm is not None and role.norm.kind == "layer" for _, role in layer) else "rms",
        qkv_bias=into_attention[0].bias is not None,
        out_bias=downs[0].bias is not None,
        mlp_bias=ups[0].bias is not None,
    )
