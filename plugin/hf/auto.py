"""``"mesh": "auto"``: the mesh that moves the fewest bytes, by a closed count."""

from __future__ import annotations

from cuboid.config import TensorParallelConfig
from cuboid.errors import MeshError
from cuboid.hf.heads import HeadCounts
from cuboid.hf.layouts import fitting_meshes
from cuboid.tensor3d.traffic_formula import BlockSizes, layer_bytes
from cuboid.topology import MeshShape

from transformers import PretrainedConfig, PreTrainedModel

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
    sizes = block_sizes(model.config)
    length = min(_ASSUMED_LENGTH, model.config.max_position_embeddings)
    return min(fitting, key=lambda mesh: sum(layer_bytes(sizes, mesh, _ASSUMED_BATCH, length).values()))


def block_sizes(config: PretrainedConfig) -> BlockSizes:
    """The sizes that the count needs, from a Hugging Face config."""
    counts = HeadCounts.of(config)
    gated = config.model_type != "gpt2"
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size
    return BlockSizes(
        hidden=config.hidden_size,
        query=counts.query * counts.dim,
        key_value=counts.key_value * counts.dim,
        intermediate=inner,
        gated=gated,
    )
