"""Validate DeepSpeed's part of a config, with DeepSpeed's own parser, before anything is loaded.

DeepSpeed itself reports a mistake late, on every rank, or never: it ignores unknown keys, and checks many values only
when they are used. This applies to configs with a section of Cuboid's only; others are left to DeepSpeed.
"""

from __future__ import annotations

import difflib
import inspect
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal, TypeVar, get_args

import deepspeed.ops.adagrad
import deepspeed.ops.adam
import deepspeed.ops.lamb
import deepspeed.ops.lion
import torch
from deepspeed.runtime import config as deepspeed_config
from deepspeed.runtime import lr_schedules
from deepspeed.utils import logger
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from cuboid.config.config_file import is_auto
from cuboid.config.schema import suggestion, what_is_wrong
from cuboid.errors import ConfigError

T = TypeVar("T")
_Auto = Literal["auto"]
_Count = Annotated[int, Field(ge=1, lt=2**31)] | _Auto | None
_Flag = bool | _Auto

#: Top-level keys that DeepSpeed reads outside its config parser.
_READ_ELSEWHERE = ("data_parallel_size", "sequence_parallel_size", "vocabulary_size")
#: Sections that DeepSpeed doesn't validate as models: it looks up all keys that it knows, and ignores others.
_FLAT_SECTIONS = ("activation_checkpointing", "data_types", "aio")


class _Scalars(BaseModel):
    """Values that DeepSpeed's parser accepts with any type."""

    model_config = ConfigDict(strict=True)

    train_batch_size: _Count = None
    train_micro_batch_size_per_gpu: _Count = None
    gradient_accumulation_steps: _Count = None
    steps_per_print: Annotated[int, Field(ge=1)] | _Auto | Annotated[float, Field(ge=math.inf)] | None = None
    gradient_clipping: Annotated[float, Field(ge=0)] | _Auto = 0.0
    gradient_predivide_factor: Annotated[float, Field(gt=0)] | _Auto = 1.0
    prescale_gradients: _Flag = False
    dump_state: _Flag = False
    disable_allgather: _Flag = False
    wall_clock_breakdown: _Flag = False
    memory_breakdown: _Flag = False
    zero_allow_untested_optimizer: _Flag = False
    zero_force_ds_cpu_optimizer: _Flag = True
    dataloader_drop_last: _Flag = False


class _Named(BaseModel):
    """The ``optimizer`` or ``scheduler`` section."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: str | None = None
    params: dict[str, Any] | _Auto | None = None
    legacy_fusion: _Flag = False


class DeepSpeedPart:
    """DeepSpeed's part of a config, as DeepSpeed's parser understands it.

    Attributes:
        zero_stage: the ``stage`` of ``zero_optimization``; 0 without that section.
        bf16: whether it trains in bfloat16.
        fp16: whether it trains in float16, with loss scaling.
        fp16_masters: whether its master weights are in float16 too.
        offloads: keys of ``zero_optimization`` that enable offloading, with the device.
        counts_micro_steps: whether DeepSpeed decides by its count of micro-batches when a step ends.
    """

    def __init__(self, config: dict[str, Any], *, is_complete: bool) -> None:
        """Validate and read DeepSpeed's part of a config.

        Args:
            config: that part.
            is_complete: whether ``"auto"`` values have been filled in, so that remaining ones are errors.

        Raises:
            ConfigError: DeepSpeed can't read it, or would ignore a key of it.
        """
        _validate(_Scalars, config, ())
        for name in ("optimizer", "scheduler"):
            if name in config:
                _validate(_Named, config[name], (name,))
        if is_complete:
            _reject_auto(config)
        parsed = _parse(config)
        zero = parsed.zero_config
        self.zero_stage = int(zero.stage)
        self.bf16 = bool(parsed.bfloat16_config.enabled)
        self.fp16 = bool(parsed.float16_config.enabled)
        self.fp16_masters = self.fp16 and bool(parsed.float16_config.fp16_master_weights_and_grads)
        self.counts_micro_steps = bool(parsed.managed_gradient_accumulation)
        self.offloads: dict[str, str] = {}
        for name in ("offload_optimizer", "offload_param"):
            section = getattr(zero, name)
            # The device is an enum member or a string, depending on where DeepSpeed's config got it from.
            device = "none" if section is None else str(getattr(section.device, "value", section.device))
            if device != "none":
                self.offloads[name] = device
        if config.get("optimizer") is not None:
            made = None if is_auto(parsed.optimizer_name) else parsed.optimizer_name
            _check_optimizer(config["optimizer"], made, on_cpu="offload_optimizer" in self.offloads)
        if config.get("scheduler") is not None:
            _check_scheduler(config["scheduler"])


def _reject_auto(config: dict[str, Any]) -> None:
    named = {name: (config.get(name) or {}).get("params") or {} for name in ("optimizer", "scheduler")}
    parameters = {f"{name}.params.{key}": value for name, params in named.items() for key, value in params.items()}
    for key, value in {**{key: config.get(key) for key in _Scalars.model_fields}, **parameters}.items():
        if is_auto(value):
            raise ConfigError(f'{key} is "auto", which only the HF Trainer and accelerate fill in; give a value')


def _validate(model: type[BaseModel], value: Any, keys: tuple[str, ...]) -> None:
    try:
        model.model_validate(value)
    except ValidationError as error:
        raise ConfigError(_explain(error.errors(), keys, sorted(model.model_fields))) from None


def _explain(errors: Iterable[Any], section: tuple[str, ...], known: list[str]) -> str:
    """All errors, one line for each key."""
    messages: dict[str, str] = {}
    for item in errors:
        # pydantic's location includes the tried member of a union, which isn't a key of the config.
        path = [str(part) for part in item["loc"] if str(part).isidentifier() and str(part) not in _UNION_MEMBERS]
        key = ".".join([*section, *path])
        if item["type"] == "extra_forbidden":
            text = f"{key} is not a key that DeepSpeed reads; {_advice(path[-1], known)}"
        else:
            text = f"{key or 'config'}: {what_is_wrong(item)} (given: {item.get('input')!r})"
        messages.setdefault(key, text)
    return "\n".join(messages.values())


_UNION_MEMBERS = ("int", "float", "bool", "str", "none", "literal", "dict", "constrained")


class _Watched(dict[str, Any]):
    """A section that records which keys DeepSpeed looks up in it; others are unknown to DeepSpeed."""

    def __init__(self, section: dict[str, Any]) -> None:
        super().__init__(section)
        self.looked_for: list[str] = []

    def get(self, key: str, default: Any = None) -> Any:
        self.looked_for.append(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.looked_for.append(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.looked_for.append(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        """Returns itself, so that ``key in section.keys()`` is recorded too."""
        return self

    def __copy__(self) -> _Watched:
        return self


def _parse(config: dict[str, Any]) -> Any:
    """Parse with DeepSpeed's own parser, without the batch sizes, which it would check against the world size."""
    values = {key: value for key, value in config.items() if key not in _BATCH_KEYS and not is_auto(value)}
    flat = {key: _Watched(values[key]) for key in _FLAT_SECTIONS if isinstance(values.get(key), dict)}
    watched = _Watched({**values, **flat, "train_micro_batch_size_per_gpu": 1})
    with _silence():
        try:
            parsed = deepspeed_config.DeepSpeedConfig(watched)
        except ValidationError as error:
            raise ConfigError(_explain(error.errors(), _section(watched, config), _fields_of(error))) from None
        except Exception as error:
            # For most mistakes the parser has no error of its own, and fails somewhere with an arbitrary exception.
            key = ".".join(_section(watched, config))
            raise ConfigError(f"{key}: DeepSpeed can't read it: {type(error).__name__}: {error}") from None
    watched.looked_for += _READ_ELSEWHERE
    for prefix, section in {"": watched, **{f"{name}.": section for name, section in flat.items()}}.items():
        known = sorted(set(section.looked_for))
        for key in dict.keys(section):
            # JSON has no comments, so people write them as keys with such prefixes.
            if key not in known and not key.startswith(("_", "#", "//")):
                raise ConfigError(f"{prefix}{key} is not a key that DeepSpeed reads; {_advice(key, known)}")
    for name, part in values.items():
        if name not in ("optimizer", "scheduler") and isinstance(part, dict) and "auto" in part.values():
            _reject_unknown_auto(name, part)
    return parsed


_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _reject_unknown_auto(name: str, section: dict[str, Any]) -> None:
    """Reject a section's unknown keys whose value is "auto".

    DeepSpeed drops such keys before it validates a section, so the section is validated once more with None instead.
    """
    section_without_auto = {key: None if is_auto(value) else value for key, value in section.items()}
    watched = _Watched({name: section_without_auto, "train_micro_batch_size_per_gpu": 1})
    with _silence():
        try:
            deepspeed_config.DeepSpeedConfig(watched)
        except ValidationError as error:
            unknown = [item for item in error.errors() if item["type"] == "extra_forbidden"]
            if unknown:
                raise ConfigError(_explain(unknown, (name,), _fields_of(error))) from None
        except Exception:
            # None isn't valid for a key; the section itself was parsed before.
            return


@contextmanager
def _silence() -> Iterator[None]:
    """Suppress DeepSpeed's log while it parses: it logs the same again when it reads the config for training."""
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _section(watched: _Watched, config: dict[str, Any]) -> tuple[str, ...]:
    """The section that DeepSpeed was reading when it failed: the last key that it looked up and that exists."""
    return tuple(key for key in reversed(watched.looked_for) if key in config)[:1] or ("config",)


def _fields_of(error: ValidationError) -> list[str]:
    """The known keys of the section that the first error is in."""
    # A pydantic error contains only the name of its model, not the class.
    models = {model.__name__: model for model in _subclasses(BaseModel)}
    model: Any = models.get(error.title)
    for key in error.errors()[0]["loc"][:-1]:
        field = getattr(model, "model_fields", {}).get(key)
        kinds = (field.annotation, *get_args(field.annotation)) if field else ()
        model = next((kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, BaseModel)), model)
    return sorted(getattr(model, "model_fields", ()))


def _subclasses(kind: type[T]) -> Iterator[type[T]]:
    for inner in kind.__subclasses__():
        yield inner
        yield from _subclasses(inner)


def _advice(unknown: str, known: Sequence[str]) -> str:
    """What to write instead of an unknown key: a similar key, or the list of known keys unless it is long."""
    if len(known) > 20 and not difflib.get_close_matches(unknown, known, n=1):
        return "leave it out"
    return suggestion(unknown, known)


def _check_optimizer(section: Any, name: str | None, *, on_cpu: bool) -> None:
    """Reject an optimizer that DeepSpeed couldn't construct, with an error that names the key."""
    if name is None:
        if not is_auto(section.get("type")):
            raise ConfigError('optimizer.type is missing; write for example "AdamW"')
        return
    params = _without_auto(section.get("params"))
    _validate(_OptimizerParameters, params, ("optimizer", "params"))
    if "max_grad_norm" in params:
        raise ConfigError("optimizer.params.max_grad_norm: DeepSpeed clips by gradient_clipping, at the top level")
    made_by, own_params = _optimizer_class(name, params, on_cpu=on_cpu)
    known = [*own_params, *list(inspect.signature(made_by).parameters)[1:]]
    _reject_parameters("optimizer", name, params, known)
    if made_by.__module__.startswith("torch."):
        _try_out(
            "optimizer",
            params,
            lambda: made_by(_one_weight(), **{k: v for k, v in params.items() if k not in own_params}),
        )


def _optimizer_class(name: str, params: dict[str, Any], *, on_cpu: bool) -> tuple[Any, tuple[str, ...]]:
    """The class that DeepSpeed constructs for a name, and the parameters that it doesn't pass on to it."""
    if name in (deepspeed_config.ADAM_OPTIMIZER, deepspeed_config.ADAMW_OPTIMIZER):
        own_params = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")
        if params.get("torch_adam"):
            return torch.optim.AdamW, own_params
        return (deepspeed.ops.adam.DeepSpeedCPUAdam if on_cpu else deepspeed.ops.adam.FusedAdam), own_params
    if name == deepspeed_config.ADAGRAD_OPTIMIZER:
        return (deepspeed.ops.adagrad.DeepSpeedCPUAdagrad if on_cpu else torch.optim.Adagrad), ()
    if name == deepspeed_config.LAMB_OPTIMIZER:
        return deepspeed.ops.lamb.FusedLamb, ()
    if name == deepspeed_config.LION_OPTIMIZER:
        return (deepspeed.ops.lion.DeepSpeedCPULion if on_cpu else deepspeed.ops.lion.FusedLion), ()
    if name in deepspeed_config.DEEPSPEED_OPTIMIZERS:
        return _AnyParameters, tuple(params)
    kinds = {
        kind.__name__: kind
        for kind in vars(torch.optim).values()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    if name not in kinds:
        near = suggestion(name, ["AdamW", *(kind for kind in kinds if kind != "AdamW")])
        raise ConfigError(f"optimizer.type is {name!r}, which neither DeepSpeed nor torch.optim has; {near}")
    return kinds[name], ()


class _AnyParameters:
    """Accepts any parameters, for optimizers that need additional packages or process parameters themselves."""

    def __init__(self, parameters: Any) -> None: ...


class _OptimizerParameters(BaseModel):
    """Parameters that several optimizers have."""

    model_config = ConfigDict(strict=True)

    lr: Annotated[float, Field(ge=0)] = 1e-3
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=1, max_length=3)] | None = None
    eps: Annotated[float, Field(ge=0)] | list[float] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    momentum: Annotated[float, Field(ge=0)] = 0.0
    torch_adam: bool = False
    adam_w_mode: bool = True
    bias_correction: bool = True
    amsgrad: bool = False

    @field_validator("betas", mode="before")
    @classmethod
    def _tuple_to_list(cls, value: Any) -> Any:
        return list(value) if isinstance(value, tuple) else value


def _check_scheduler(section: Any) -> None:
    """Reject a learning-rate schedule that DeepSpeed couldn't construct or step, with an error that names the key."""
    if is_auto(section.get("type")):
        return
    name = section.get("type")
    if name is None:
        raise ConfigError('scheduler.type is missing; write for example "WarmupLR"')
    kind = _schedule_class(name)
    if section.get("params") is None:
        raise ConfigError(f"scheduler.params is missing; {name} takes {', '.join(_parameters_of(kind))}")
    params = _without_auto(section["params"])
    _reject_parameters("scheduler", name, params, _parameters_of(kind))
    _check_types("scheduler", kind, params)
    # Without the "auto" values, it could miss a parameter that it needs.
    if params == section["params"]:
        _try_out(
            "scheduler", params, lambda: kind(torch.optim.SGD(_one_weight(), lr=1.0, momentum=0.5), **params).step()
        )


def _schedule_class(name: str) -> Any:
    kind = getattr(lr_schedules, name, None) if name in lr_schedules.VALID_LR_SCHEDULES else None
    kind = kind or getattr(torch.optim.lr_scheduler, name, None)
    if not inspect.isclass(kind):
        near = suggestion(name, lr_schedules.VALID_LR_SCHEDULES)
        raise ConfigError(f"scheduler.type is {name!r}, which neither DeepSpeed nor torch has; {near}")
    return kind


def _parameters_of(kind: Any) -> list[str]:
    return list(inspect.signature(kind).parameters)[1:]


def _without_auto(params: Any) -> dict[str, Any]:
    return {key: value for key, value in params.items() if not is_auto(value)} if isinstance(params, dict) else {}


def _one_weight() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(1, device="cpu"))]


def _reject_parameters(section: str, name: str, params: dict[str, Any], known: Sequence[str]) -> None:
    for key in params:
        if key not in known:
            raise ConfigError(f"{section}.params.{key} is not a parameter of {name}; {suggestion(key, sorted(known))}")


def _check_types(section: str, kind: Any, params: dict[str, Any]) -> None:
    """Compare values with the parameters' annotations, if there are any."""
    for key, value in params.items():
        declared = inspect.signature(kind).parameters[key].annotation
        types = {int: (int,), bool: (bool,), str: (str,), float: (int, float, list, tuple)}.get(declared)
        if types and (not isinstance(value, types) or (isinstance(value, bool) and declared is not bool)):
            raise ConfigError(f"{section}.params.{key} is {value!r}; {kind.__name__} takes {declared.__name__} there")


def _try_out(section: str, params: dict[str, Any], make: Callable[[], Any]) -> None:
    """Construct the object for a single weight, because constructors make checks of their own on the values."""
    with _silence(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            make()
        except Exception as error:
            raise ConfigError(f"{section}.params {params}: {type(error).__name__}: {error}") from None
