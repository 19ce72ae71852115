"""The arguments of the Trainer that a user may give ``cuboid train``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import SchedulerType
from transformers.integrations import get_reporting_integration_callbacks
from transformers.training_args import OptimizerNames

from cuboid import CuboidError, load_config

#: Of a schedule, where the config has none, and of an optimizer likewise.
_SCHEDULE = ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps")
_OPTIMIZER = ("optim", "optim_args", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
#: What else a user may give.
_OTHERS = (
    "report_to",
    "run_name",
    "project",
    "trackio_space_id",
    "full_determinism",
    "tf32",
    "torch_empty_cache_steps",
)
#: What says the same, by argument.
_INSTEAD = {
    "output_dir": "give --out",
    **dict.fromkeys(("max_steps", "num_train_epochs"), "give --steps"),
    **dict.fromkeys(("seed", "data_seed"), "give --seed"),
    **dict.fromkeys(
        ("eval_strategy", "eval_steps", "eval_on_start", "eval_delay", "do_eval"), "give --evaluations and --eval"
    ),
    **dict.fromkeys(
        ("save_strategy", "save_steps", "save_total_limit", "save_only_model"), "give --save-every and --keep-last"
    ),
    **dict.fromkeys(("resume_from_checkpoint", "ignore_data_skip"), "give --resume"),
    **dict.fromkeys(
        ("logging_strategy", "logging_steps", "logging_first_step", "logging_nan_inf_filter"),
        "each step is logged as it is; --log-every is for the output",
    ),
    **dict.fromkeys(("disable_tqdm", "log_level"), "give --log-every"),
    "trust_remote_code": "give --trust-remote-code",
    **{
        name: f"write {key} into the config"
        for name, key in (
            ("deepspeed", "it"),
            ("per_device_train_batch_size", "train_micro_batch_size_per_gpu"),
            ("per_device_eval_batch_size", "train_micro_batch_size_per_gpu, which evaluations have too,"),
            ("gradient_accumulation_steps", "gradient_accumulation_steps"),
            ("max_grad_norm", "gradient_clipping"),
            ("bf16", '"bf16": {"enabled": true}'),
            ("fp16", '"fp16": {"enabled": true}'),
            ("torch_compile", '"compile": true under tensor_parallel'),
        )
    },
}
#: Schedules that follow the losses of evaluations.
_FOLLOWING = ("reduce_lr_on_plateau", "greedy")


def read_trainer_args(path: Path | None, report_to: tuple[str, ...], config: Mapping[str, Any]) -> dict[str, Any]:
    """The Trainer's arguments in a JSON or YAML file, and the loggers of the command line.

    Raises:
        ConfigError: the file can't be read.
        CuboidError: it has an argument that the command or its config decides, or one without a meaning here.
    """
    arguments = {} if path is None else load_config(path)
    for name in arguments:
        _check_taken(name, config)
    for name, known in (("lr_scheduler_type", SchedulerType), ("optim", OptimizerNames)):
        values = [str(one.value) for one in known]
        if name in arguments and (arguments[name] not in values or arguments[name] in _FOLLOWING):
            offered = ", ".join(value for value in values if value not in _FOLLOWING)
            raise CuboidError(f"--trainer-args: {name} is {arguments[name]!r}; it is one of {offered}")
    if report_to:
        if "report_to" in arguments:
            raise CuboidError("--report-to and report_to of --trainer-args both name loggers; give one of the two")
        arguments["report_to"] = list(report_to)
    _check_loggers(arguments.get("report_to", "none"))
    return arguments


def names_optimizer(arguments: Mapping[str, Any]) -> bool:
    """Whether the optimizer is the Trainer's."""
    return any(name in arguments for name in _OPTIMIZER)


def names_schedule(arguments: Mapping[str, Any]) -> bool:
    """Whether the schedule of the learning rate is the Trainer's."""
    return any(name in arguments for name in _SCHEDULE)


def trained_by(arguments: Mapping[str, Any]) -> str:
    """As JSON, the arguments that a resumed run has to have, too."""
    return json.dumps(
        {name: arguments[name] for name in (*_SCHEDULE, *_OPTIMIZER) if name in arguments}, sort_keys=True
    )


def _check_taken(name: str, config: Mapping[str, Any]) -> None:
    for section, names in (("optimizer", _OPTIMIZER), ("scheduler", _SCHEDULE)):
        if name in names and config.get(section) is not None:
            raise CuboidError(
                f"--trainer-args has {name}, but the config has a section {section}, which decides it; leave out one "
                "of the two"
            )
    if name in (*_SCHEDULE, *_OPTIMIZER, *_OTHERS):
        return
    instead = _INSTEAD.get(name)
    if instead is not None:
        raise CuboidError(f"--trainer-args has {name}, which it doesn't decide; {instead}")
    known = ", ".join((*_SCHEDULE, *_OPTIMIZER, *_OTHERS))
    raise CuboidError(
        f"--trainer-args has {name}, which has no meaning in `cuboid train`. It takes {known}; for others, use "
        "cuboid.CuboidTrainer in a script"
    )


def _check_loggers(report_to: str | list[str]) -> None:
    """Check that the packages of loggers are installed."""
    names = [report_to] if isinstance(report_to, str) else report_to
    try:
        for callback in get_reporting_integration_callbacks([name for name in names if name not in ("none", "all")]):
            callback()
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        raise CuboidError(f"--report-to {' '.join(map(str, names))}: {error}") from error
