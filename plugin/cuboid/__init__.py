"""Cuboid: 3-D tensor parallelism and sequence-level pipelines for unmodified Hugging Face models, inside the framework
that trains them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cuboid.distributed.topology import MeshShape, Topology
from cuboid.errors import CheckpointError, ConfigError, CuboidError, MeshError, OptimizerError, UnsupportedModelError
from cuboid.failures.exit_messages import expect_interrupts, is_command
from cuboid.version import __version__ as __version__
from cuboid_patches import apply_registered, register, unregister

if TYPE_CHECKING:
    from cuboid.config.config_file import load_config
    from cuboid.config.schema import CuboidConfig, parse_config, split_config
    from cuboid.distributed.mesh import Mesh
    from cuboid.integrations.callbacks.interrupt import InterruptCallback
    from cuboid.integrations.callbacks.loss_guard import LossGuardCallback
    from cuboid.integrations.callbacks.metrics import MetricsCallback
    from cuboid.integrations.callbacks.progress import RunProgressCallback
    from cuboid.integrations.callbacks.run_folder import RunLockCallback
    from cuboid.integrations.colossalai.plugin import CuboidPlugin
    from cuboid.integrations.handoff import prepare_optimizer
    from cuboid.integrations.run_report.callback import ReportCallback
    from cuboid.integrations.script_loss import sum_over_shards
    from cuboid.integrations.trainer import CuboidTrainer
    from cuboid.models.pipeline.training_pipeline import Pipeline
    from cuboid.models.sharded.customizations import local_hook
    from cuboid.models.sharded.sharded_model import mesh_of
    from cuboid.weights.api import from_config, from_pretrained, save_pretrained, scope, shard
    from cuboid.weights.save import full_gradients, full_state_dict

__all__ = [
    "CheckpointError",
    "ConfigError",
    "CuboidConfig",
    "CuboidError",
    "CuboidPlugin",
    "CuboidTrainer",
    "InterruptCallback",
    "LossGuardCallback",
    "Mesh",
    "MeshError",
    "MeshShape",
    "MetricsCallback",
    "OptimizerError",
    "Pipeline",
    "ReportCallback",
    "RunLockCallback",
    "RunProgressCallback",
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
    "prepare_optimizer",
    "register",
    "save_pretrained",
    "scope",
    "shard",
    "split_config",
    "sum_over_shards",
    "unregister",
]

#: Modules that are imported when one of their names is used: they bring torch, transformers and DeepSpeed, in seconds.
_NAMES_OF = {
    "cuboid.config.config_file": ("load_config",),
    "cuboid.config.schema": ("CuboidConfig", "parse_config", "split_config"),
    "cuboid.distributed.mesh": ("Mesh",),
    "cuboid.integrations.callbacks.interrupt": ("InterruptCallback",),
    "cuboid.integrations.callbacks.loss_guard": ("LossGuardCallback",),
    "cuboid.integrations.callbacks.metrics": ("MetricsCallback",),
    "cuboid.integrations.run_report.callback": ("ReportCallback",),
    "cuboid.integrations.callbacks.progress": ("RunProgressCallback",),
    "cuboid.integrations.callbacks.run_folder": ("RunLockCallback",),
    "cuboid.integrations.colossalai.plugin": ("CuboidPlugin",),
    "cuboid.integrations.handoff": ("prepare_optimizer",),
    "cuboid.integrations.script_loss": ("sum_over_shards",),
    "cuboid.integrations.trainer": ("CuboidTrainer",),
    "cuboid.models.pipeline.training_pipeline": ("Pipeline",),
    "cuboid.models.sharded.customizations": ("local_hook",),
    "cuboid.models.sharded.sharded_model": ("mesh_of",),
    "cuboid.weights.api": ("from_config", "from_pretrained", "save_pretrained", "scope", "shard"),
    "cuboid.weights.save": ("full_gradients", "full_state_dict"),
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # What is called may fail on all ranks, whose message is one only with the patches.
    apply_registered()
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


expect_interrupts()
# The command checks versions when it does something: its --help works with all of them, and is there at once.
if not is_command():
    import_module("cuboid.requirements").check_installed()
# ``import cuboid`` alone makes DeepSpeed, accelerate and transformers accept Cuboid's config keys.
register()
