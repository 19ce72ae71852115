"""DeepSpeed's part of a config, read by DeepSpeed's own parser before anything is loaded for it.

DeepSpeed itself finds a mistake late, on every rank, or never: it ignores keys that it doesn't know, and looks at many
values only when they are used. What is said here holds for configs with a section of ours; others never come here.
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

#: Top-level keys that are read elsewhere than in DeepSpeed's parser of configs.
_READ_ELSEWHERE = ("data_parallel_size", "sequence_parallel_size", "vocabulary_size")
#: Sections of single values, which DeepSpeed looks up one by one, all of them, and without a look at others.
_FLAT_SECTIONS = ("activation_checkpointing", "data_types", "aio")


class _Scalars(BaseModel):
    """Values that DeepSpeed takes as they are, until something is computed with them."""

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
    """What DeepSpeed makes of its part of a config.

    Attributes:
        zero_stage: of ``zero_optimization``; 0 without.
        bf16: whether it trains in bfloat16.
        fp16: likewise.
        offloads: keys of ``zero_optimization`` that keep something off the device.
        optimizer: name of the optimizer that it will make; None for one that it is given.
    """

    def __init__(self, rest: dict[str, Any], *, is_complete: bool) -> None:
        """Read the config.

        Args:
            rest: DeepSpeed's part of a config.
            is_complete: whether nobody will fill in values that are ``"auto"``.

        Raises:
            ConfigError: DeepSpeed can't read it, or would ignore a key of it.
        """
        _check_scalars(rest, is_complete=is_complete)
        parsed = _parse(rest)
        zero = parsed.zero_config
        self.zero_stage = int(zero.stage)
        self.bf16 = bool(parsed.bfloat16_config.enabled)
        self.fp16 = bool(parsed.float16_config.enabled)
        self.offloads = [name for name in ("offload_optimizer", "offload_param") if _is_offload(getattr(zero, name))]
        self.optimizer = None if is_auto(parsed.optimizer_name) else parsed.optimizer_name
        _check_optimizer(rest.get("optimizer"), self.optimizer, on_cpu="offload_optimizer" in self.offloads)
        _check_scheduler(rest.get("scheduler"))


def _is_offload(section: Any) -> bool:
    return section is not None and str(getattr(section.device, "value", section.device)) != "none"


def _check_scalars(rest: dict[str, Any], *, is_complete: bool) -> None:
    _validate(_Scalars, rest, ())
    for name in ("optimizer", "scheduler"):
        if name in rest:
            _validate(_Named, rest[name], (name,))
    if is_complete:
        named = {name: (rest.get(name) or {}).get("params") or {} for name in ("optimizer", "scheduler")}
        parameters = {f"{name}.params.{key}": value for name, given in named.items() for key, value in given.items()}
        for key, value in {**{key: rest.get(key) for key in _Scalars.model_fields}, **parameters}.items():
            if is_auto(value):
                raise ConfigError(f'{key} is "auto", which only the HF Trainer and accelerate fill in; give a value')


def _validate(model: type[BaseModel], given: Any, keys: tuple[str, ...]) -> None:
    try:
        model.model_validate(given)
    except ValidationError as error:
        raise ConfigError(_explain(error.errors(), keys, sorted(model.model_fields))) from None


def _explain(errors: Iterable[Any], section: tuple[str, ...], known: list[str]) -> str:
    """All that is wrong, a line for each key."""
    found: dict[str, str] = {}
    for item in errors:
        # pydantic names each tried member of a union; users know only their own keys.
        own = [str(part) for part in item["loc"] if str(part).isidentifier() and str(part) not in _UNION_MEMBERS]
        key = ".".join([*section, *own])
        if item["type"] == "extra_forbidden":
            text = f"{key} is not a key that DeepSpeed reads; {_advice(own[-1], known)}"
        else:
            text = f"{key or 'config'}: {what_is_wrong(item)} (given: {item.get('input')!r})"
        found.setdefault(key, text)
    return "\n".join(found.values())


_UNION_MEMBERS = ("int", "float", "bool", "str", "none", "literal", "dict", "constrained")


class _Watched(dict[str, Any]):
    """A section that remembers which of its keys somebody looked for."""

    def __init__(self, section: dict[str, Any], keys: tuple[str, ...] = ()) -> None:
        super().__init__({key: _watch(value, (*keys, key)) for key, value in section.items()})
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
        """Keys are looked for among these too."""
        return self

    def __copy__(self) -> _Watched:
        return self


def _watch(value: Any, keys: tuple[str, ...]) -> Any:
    return _Watched(value, keys) if len(keys) == 1 and keys[0] in _FLAT_SECTIONS and isinstance(value, dict) else value


def _parse(rest: dict[str, Any]) -> Any:
    """Let DeepSpeed read everything but the batch, which follows from the world that the ranks will have."""
    own = {key: value for key, value in rest.items() if key not in _BATCH_KEYS and not is_auto(value)}
    watched = _Watched({**own, "train_micro_batch_size_per_gpu": 1})
    with _silence():
        try:
            parsed = deepspeed_config.DeepSpeedConfig(watched)
        except ValidationError as error:
            raise ConfigError(_explain(error.errors(), _section(watched, rest), _fields_of(error))) from None
        except Exception as error:
            # The parser has no errors of its own for most mistakes: it trips over them.
            key = ".".join(_section(watched, rest))
            raise ConfigError(f"{key}: DeepSpeed can't read it: {type(error).__name__}: {error}") from None
    _refuse_unknown((), watched, [*watched.looked_for, *_READ_ELSEWHERE])
    for name in _FLAT_SECTIONS:
        if isinstance(section := dict.get(watched, name), _Watched):
            _refuse_unknown((name,), section, section.looked_for)
    _refuse_unknown_auto(own)
    return parsed


_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _refuse_unknown_auto(own: dict[str, Any]) -> None:
    """DeepSpeed leaves out what is "auto" in a section before it looks at the names; put a value there, so it does."""
    for name, section in own.items():
        if name in ("optimizer", "scheduler") or not isinstance(section, dict) or "auto" not in section.values():
            continue
        given = {key: None if is_auto(value) else value for key, value in section.items()}
        watched = _Watched({name: given, "train_micro_batch_size_per_gpu": 1})
        with _silence():
            try:
                deepspeed_config.DeepSpeedConfig(watched)
            except ValidationError as error:
                unknown = [item for item in error.errors() if item["type"] == "extra_forbidden"]
                if unknown:
                    raise ConfigError(_explain(unknown, (name,), _fields_of(error))) from None
            except Exception:
                # The section is read in another way, and was.
                continue


@contextmanager
def _silence() -> Iterator[None]:
    """DeepSpeed warns when it reads a config, and will once more when it reads it to use it."""
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _section(watched: _Watched, rest: dict[str, Any]) -> tuple[str, ...]:
    """What DeepSpeed was reading: the last key that it looked for, of those that are there."""
    return tuple(key for key in reversed(watched.looked_for) if key in rest)[:1] or ("config",)


def _fields_of(error: ValidationError) -> list[str]:
    """Keys of the section that the first error is in."""
    models = {model.__name__: model for model in _subclasses(BaseModel)}
    model: Any = models.get(error.title)
    for key in error.errors()[0]["loc"][:-1]:
        field = getattr(model, "model_fields", {}).get(key)
        inner = [part for part in (field.annotation, *get_args(field.annotation)) if _is_model(part)] if field else []
        model = inner[0] if inner else model
    return sorted(getattr(model, "model_fields", ()))


def _is_model(kind: Any) -> bool:
    return inspect.isclass(kind) and issubclass(kind, BaseModel)


def _subclasses(kind: type[T]) -> Iterator[type[T]]:
    for inner in kind.__subclasses__():
        yield inner
        yield from _subclasses(inner)


def _refuse_unknown(keys: tuple[str, ...], section: dict[str, Any], known: Iterable[str]) -> None:
    names = sorted(set(known))
    for name in dict.keys(section):
        # A name that begins so is how JSON files are commented.
        if name not in names and not name.startswith(("_", "#", "//")):
            raise ConfigError(f"{'.'.join([*keys, name])} is not a key that DeepSpeed reads; {_advice(name, names)}")


def _advice(unknown: str, known: Sequence[str]) -> str:
    """A near miss; of many keys that are none, no list."""
    if len(known) > 20 and not difflib.get_close_matches(unknown, known, n=1):
        return "leave it out"
    return suggestion(unknown, known)


def _check_optimizer(section: Any, name: str | None, *, on_cpu: bool) -> None:
    """Refuse an optimizer that DeepSpeed won't be able to make.

    Raises:
        ConfigError: names the key.
    """
    if section is None:
        return
    if name is None:
        if not is_auto(section.get("type")):
            raise ConfigError('optimizer.type is missing; write for example "AdamW"')
        return
    given = _without_auto(section.get("params"))
    _validate(_OptimizerParameters, given, ("optimizer", "params"))
    if "max_grad_norm" in given:
        raise ConfigError("optimizer.params.max_grad_norm: DeepSpeed clips by gradient_clipping, at the top level")
    made_by, own = _optimizer_class(name, given, on_cpu=on_cpu)
    known = [*own, *list(inspect.signature(made_by).parameters)[1:]]
    _refuse_parameters("optimizer", name, given, known)
    if made_by.__module__.startswith("torch."):
        _try_out("optimizer", given, lambda: made_by(_one_weight(), **{k: v for k, v in given.items() if k not in own}))


def _optimizer_class(name: str, given: dict[str, Any], *, on_cpu: bool) -> tuple[Any, tuple[str, ...]]:
    """What DeepSpeed makes of a name, and parameters that it takes for itself."""
    if name in (deepspeed_config.ADAM_OPTIMIZER, deepspeed_config.ADAMW_OPTIMIZER):
        own = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")
        if given.get("torch_adam"):
            return torch.optim.AdamW, own
        return (deepspeed.ops.adam.DeepSpeedCPUAdam if on_cpu else deepspeed.ops.adam.FusedAdam), own
    if name == deepspeed_config.ADAGRAD_OPTIMIZER:
        return (deepspeed.ops.adagrad.DeepSpeedCPUAdagrad if on_cpu else torch.optim.Adagrad), ()
    if name == deepspeed_config.LAMB_OPTIMIZER:
        return deepspeed.ops.lamb.FusedLamb, ()
    if name == deepspeed_config.LION_OPTIMIZER:
        return (deepspeed.ops.lion.DeepSpeedCPULion if on_cpu else deepspeed.ops.lion.FusedLion), ()
    if name in deepspeed_config.DEEPSPEED_OPTIMIZERS:
        return _AnyParameters, tuple(given)
    kinds = {kind.__name__: kind for kind in vars(torch.optim).values() if _is_optimizer(kind)}
    if name not in kinds:
        near = suggestion(name, ["AdamW", *(kind for kind in kinds if kind != "AdamW")])
        raise ConfigError(f"optimizer.type is {name!r}, which neither DeepSpeed nor torch.optim has; {near}")
    return kinds[name], ()


class _AnyParameters:
    """Optimizers that need packages of their own, or split their parameters themselves."""

    def __init__(self, parameters: Any) -> None: ...


def _is_optimizer(kind: Any) -> bool:
    return inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer


class _OptimizerParameters(BaseModel):
    """Parameters that optimizers have in common."""

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
    def _tuples_are_lists(cls, value: Any) -> Any:
        return list(value) if isinstance(value, tuple) else value


def _check_scheduler(section: Any) -> None:
    """Refuse a schedule that DeepSpeed won't be able to make, or to take a step with.

    Raises:
        ConfigError: names the key.
    """
    if section is None or is_auto(section.get("type")):
        return
    name = section.get("type")
    if name is None:
        raise ConfigError('scheduler.type is missing; write for example "WarmupLR"')
    kind = _schedule_class(name)
    if section.get("params") is None:
        raise ConfigError(f"scheduler.params is missing; {name} takes {', '.join(_parameters_of(kind))}")
    given = _without_auto(section["params"])
    _refuse_parameters("scheduler", name, given, _parameters_of(kind))
    _check_types("scheduler", kind, given)
    if given == section["params"]:
        _try_out("scheduler", given, lambda: kind(torch.optim.SGD(_one_weight(), lr=1.0, momentum=0.5), **given).step())


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


def _refuse_parameters(section: str, name: str, given: dict[str, Any], known: Sequence[str]) -> None:
    for key in given:
        if key not in known:
            raise ConfigError(f"{section}.params.{key} is not a parameter of {name}; {suggestion(key, sorted(known))}")


def _check_types(section: str, kind: Any, given: dict[str, Any]) -> None:
    """Compare values with what the parameters are declared to be, where they are."""
    for key, value in given.items():
        declared = inspect.signature(kind).parameters[key].annotation
        wanted = {int: (int,), bool: (bool,), str: (str,), float: (int, float, list, tuple)}.get(declared)
        if wanted and (not isinstance(value, wanted) or (isinstance(value, bool) and declared is not bool)):
            raise ConfigError(f"{section}.params.{key} is {value!r}; {kind.__name__} takes {declared.__name__} there")


def _try_out(section: str, given: dict[str, Any], make: Callable[[], Any]) -> None:
    """Make it for one weight, since whatever is made of a config's values may be wrong about them in its own way."""
    with _silence(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            make()
        except Exception as error:
            raise ConfigError(f"{section}.params {given}: {type(error).__name__}: {error}") from None
