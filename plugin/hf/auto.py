"""``"mesh": "auto"``: the mesh that moves the fewest bytes, by a closed count."""

from __future__ import annotations

from cuboid.config import TensorParallelConfig
from cuboid.errors import MeshError
from cuboid.hf.heads import HeadCounts, plan_key_value_heads
from cuboid.hf.layouts import fitting_meshes
from cuboid.hf.roles import find_roles
from cuboid.tensor3d.collectives import padded_length
from cuboid.tensor3d.traffic_formula import BlockSizes, layer_bytes
from cuboid.topology import Coordinate, MeshShape

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

#: Tokens that the count assumes for a micro-batch: rows and sequence length. The data isn't known yet when weights
#: are loaded; the choice depends on their product only weakly.
_ASSUMED_BATCH, _ASSUMED_LENGTH = 8, 2048


def choose_mesh(model: PreTrainedModel, config: TensorParallelConfig) -> MeshShape:
    """The configured mesh, or for ``"auto"`` the best of its size that fits the model.

    Raises:
        MeshError: no mesh of that size fits.
    """
    if config.mesh != "auto":
        return config.mesh.shape
    fitting = fitting_meshes(model, config.mesh_size)
    if not fitting:
        raise MeshError(f"no mesh of tensor_parallel.size = {config.mesh_size} ranks fits {type(model).__name__}")
    length = min(_ASSUMED_LENGTH, model.config.max_position_embeddings)
    return min(fitting, key=lambda mesh: _bytes(model, mesh, length))


def _bytes(model: PreTrainedModel, mesh: MeshShape, length: int) -> int:
    # The count wants whole rows for every rank; more rows in proportion change no ranking.
    batch = padded_length(_ASSUMED_BATCH, mesh.batch)
    return sum(layer_bytes(block_sizes(model, mesh), mesh, batch, length).values()) * _ASSUMED_BATCH // batch


def block_sizes(model: PreTrainedModel, mesh: MeshShape) -> BlockSizes:
    """The sizes that the count needs, read off the model's first layer."""
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
        intermediate=_out_features(ups[0]),
        gated=len(ups) == 2,
        summed=None if plan.scattered else plan.heads * counts.dim,
        whole_key_value=not plan.split_by_sequence,
        norm="layer" if any(role.kind == "layer_norm" for _, role in layer) else "rms",
        qkv_bias=into_attention[0].bias is not None,
        out_bias=downs[0].bias is not None,
        mlp_bias=ups[0].bias is not None,
    )


def _out_features(module: nn.Module) -> int:
    return module.nf if isinstance(module, Conv1D) else module.out_features  # type: ignore[return-value]
