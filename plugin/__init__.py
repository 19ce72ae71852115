"""Cuboid: 3-D tensor parallelism for unmodified Hugging Face models, inside the framework that trains them."""

from cuboid.config import CuboidConfig, load_config, parse_config, split_config
from cuboid.errors import CheckpointError, ConfigError, CuboidError, MeshError, UnsupportedModelError
from cuboid.hf.api import from_pretrained, save_pretrained, scope, shard
from cuboid.hf.model import mesh_of
from cuboid.hf.save import full_gradients, full_state_dict
from cuboid.mesh import Mesh
from cuboid.patches import register, unregister
from cuboid.topology import MeshShape, Topology

__all__ = [
    "CheckpointError",
    "ConfigError",
    "CuboidConfig",
    "CuboidError",
    "Mesh",
    "MeshError",
    "MeshShape",
    "Topology",
    "UnsupportedModelError",
    "from_pretrained",
    "full_gradients",
    "full_state_dict",
    "load_config",
    "mesh_of",
    "parse_config",
    "register",
    "save_pretrained",
    "scope",
    "shard",
    "split_config",
    "unregister",
]

register()
