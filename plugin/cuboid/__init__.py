"""Cuboid: 3-D tensor parallelism and sequence-level pipelines for unmodified Hugging Face models, inside the framework
that trains them."""

from typing import TYPE_CHECKING, Any

from cuboid.failures.exit_messages import expect_interrupts
from cuboid.requirements import check_installed
from cuboid.version import __version__ as __version__

# First, because the imports below take seconds, and Ctrl-C during them shouldn't print a traceback.
expect_interrupts()
# Before the imports below, which use names that other versions of these packages don't have.
check_installed()

from cuboid.config.schema import CuboidConfig, parse_config, split_config
from cuboid.config.config_file import load_config
from cuboid.errors import CheckpointError, ConfigError, CuboidError, MeshError, OptimizerError, UnsupportedModelError
from cuboid.weights.api import from_config, from_pretrained, save_pretrained, scope, shard
from cuboid.models.sharded.customizations import local_hook
from cuboid.models.sharded.sharded_model import mesh_of
from cuboid.models.pipeline.training_pipeline import Pipeline
from cuboid.weights.save import full_gradients, full_state_dict
from cuboid.distributed.mesh import Mesh
from cuboid_patches import register, unregister
from cuboid.distributed.topology import MeshShape, Topology

__all__ = [
    "CheckpointError",
    "ConfigError",
    "CuboidConfig",
    "CuboidError",
    "CuboidPlugin",
    "CuboidTrainer",
    "Mesh",
    "MeshError",
    "MeshShape",
    "OptimizerError",
    "Pipeline",
    "Topology",
    "UnsupportedModelError",
    "from_config",
    "from_pretrained",
    "full_gradients",
    "full_state_dict",
    "load_config",
    "local_hook",
    "mesh_of",
    "parse_config",
    "register",
    "save_pretrained",
    "scope",
    "shard",
    "split_config",
    "unregister",
]

if TYPE_CHECKING:
    from cuboid.integrations.trainer import CuboidTrainer
    from cuboid.integrations.colossalai.plugin import CuboidPlugin


def __getattr__(name: str) -> Any:
    # Imported on first use, because transformers' Trainer takes long to import and not every script needs it.
    if name == "CuboidTrainer":
        from cuboid.integrations.trainer import CuboidTrainer

        return CuboidTrainer
    if name == "CuboidPlugin":
        # Likewise, because ColossalAI may not be installed.
        from cuboid.integrations.colossalai.plugin import CuboidPlugin

        return CuboidPlugin
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# ``import cuboid`` alone makes DeepSpeed, accelerate and transformers accept Cuboid's config keys.
register()
