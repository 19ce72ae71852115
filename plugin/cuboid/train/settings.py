"""Read from the DeepSpeed config what the job needs, and write the command line's settings into it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from cuboid import ConfigError, CuboidError, split_config
from cuboid.config.compatibility import check_framework_config
from cuboid.config.schema import require_config
from cuboid.distributed.mesh import current_world_size
from cuboid.train.run_folder import TRACE


def check_config(config: dict[str, Any], *, is_complete: bool, has_optimizer: bool = False) -> None:
    """Reject a config with which this job or DeepSpeed would fail later.

    It is complete if it will be passed to DeepSpeed so; as the user wrote it, ``"auto"`` may stand for values of the
    command line. ``has_optimizer``: whether that gives the optimizer, where the config has none.

    Raises:
        ConfigError: names the key.
        MeshError: the mesh doesn't divide the world.
    """
    cuboid_config, framework_config = require_config(config)
    check_framework_config(cuboid_config, framework_config, current_world_size(), is_complete=is_complete)
    if cuboid_config.lora is not None:
        raise ConfigError(
            "lora says that only an adapter is trained, and this command trains all parameters; leave it out, or train "
            "in a script with PEFT's get_peft_model"
        )
    if framework_config.get("optimizer") is None and not has_optimizer:
        raise ConfigError(
            'optimizer is missing; add for example "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": '
            "true}} to train with"
        )


def run_length(requested_steps: int | None, config: dict[str, Any]) -> int:
    """The number of optimizer steps. The schedule in ``config`` is stretched to it in place, including its warm-up.

    Raises:
        ConfigError: neither ``requested_steps`` nor the config has it.
        CuboidError: it is less than 1.
    """
    schedule = (config.get("scheduler") or {}).get("params") or {}
    config_steps = schedule.get("total_num_steps")
    steps = config_steps if requested_steps is None else requested_steps
    if not isinstance(steps, int):
        raise ConfigError("--steps is missing, and the config has no scheduler.params.total_num_steps to take it from")
    at_least(steps, "--steps", 1)
    if isinstance(config_steps, int) and config_steps > 0 and config_steps != steps:
        warmup = schedule.get("warmup_num_steps")
        if isinstance(warmup, int):
            schedule["warmup_num_steps"] = max(1, round(warmup * steps / config_steps))
    if "total_num_steps" in schedule:
        schedule["total_num_steps"] = steps
    return steps


def place_trace(config: dict[str, Any], out: Path, steps: int) -> Path | None:
    """Put a pipeline's trace into the run's folder unless the config names one, and trace a step that the run has.

    Returns:
        The folder that the config names; None if it names none.
    """
    cuboid_config, _ = split_config(config)
    if cuboid_config is None or cuboid_config.pipeline is None or not cuboid_config.pipeline.trace:
        return None
    section = config["pipeline"]
    section["trace"] = str(out / TRACE) if cuboid_config.pipeline.trace is True else cuboid_config.pipeline.trace
    section["trace_step"] = min(cuboid_config.pipeline.trace_step, max(steps, 1))
    return None if cuboid_config.pipeline.trace is True else Path(cuboid_config.pipeline.trace)


def keep_checkpoints(config: dict[str, Any], keep_last: int | None) -> None:
    """Write the number of checkpoints to keep into the config, unless it is None."""
    if keep_last is not None:
        at_least(keep_last, "--keep-last", 1)
        config["checkpoint"] = {**(config.get("checkpoint") or {}), "keep_last": keep_last}


def count(config: dict[str, Any], key: str, default: int | None) -> int:
    """A positive integer from the config.

    Raises:
        ConfigError: it is missing, or isn't an integer of at least 1.
    """
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{key} is {value!r}; `cuboid train` needs a number of at least 1 there")
    return value


def at_least(value: int, name: str, least: int) -> None:
    """Check that a number isn't too small.

    Raises:
        CuboidError: it is less than ``least``.
    """
    if value < least:
        raise CuboidError(f"{name} is {value}; it must be at least {least}")


def weights_dtype(config: dict[str, Any]) -> torch.dtype:
    """The weights' dtype: bfloat16 or float16 if the config enables it, else float32."""
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        section = config.get(name)
        if isinstance(section, dict) and section.get("enabled") is True:
            return dtype
    return torch.float32
