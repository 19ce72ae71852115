"""What a script has changed on a model since its class made it: carried over to the sharded model, or refused by name.

Certification runs small models of the same class and config. Whatever else a script hangs on a model (hooks, a
``forward`` of one module, parametrizations, other modules) it can't see: the model is compared with one that its class
makes anew, on the meta device, before it is sharded; and with what sharding made, in every forward after that.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules import module as global_hooks
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel

from cuboid.errors import UnsupportedModelError
from cuboid.models.architectures.liger import is_ligers, liger_refused
from cuboid.models.plain_construction import plain_construction

#: Hooks that run with a module's forward or backward, by the attribute that keeps them.
_FORWARD = ("_forward_pre_hooks", "_forward_hooks")
_BACKWARD = ("_backward_pre_hooks", "_backward_hooks")
#: Hooks of saving and loading, which go ways of their own for shards.
_OF_STATE = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
#: Says of forward and backward hooks whether they take keywords, and whether they are called after an error.
_FLAGS = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
}
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
#: Where a module that replaces another one keeps the names of those options of the other's that it doesn't read.
_REPLACED_OPTIONS = "cuboid_replaced_options"
#: Hooks of all modules, by kind.
_GLOBAL = tuple(getattr(global_hooks, f"_global{kind}") for kind in (*_FORWARD, *_BACKWARD))
#: Packages whose hooks on a sharded model are known: their own, for what they are asked to do.
_KNOWN_PACKAGES = ("cuboid", "cuboid_patches", "deepspeed", "transformers", "accelerate", "colossalai")
#: Every module's own attributes.
_OF_ANY_MODULE = frozenset(vars(nn.Module()))
#: What methods of torch and transformers set on an instance.
_SET_BY_METHODS = frozenset(
    {"_gradient_checkpointing_func", "gradient_checkpointing", "name_or_path", "_compiled_call_impl"}
)


@dataclass(frozen=True)
class LocalHook:
    """A hook that may be given a rank's part of an activation; see :func:`local_hook`."""

    hook: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the hook itself."""
        return self.hook(*args, **kwargs)


def local_hook(hook: Callable[..., Any]) -> LocalHook:
    """Mark a forward hook of a module, or a gradient hook of a parameter, as one that may be given a rank's part.

    Inside a sharded model, modules take and return this rank's part: ``[B/b, S/s, H/h]`` of the residual stream on a
    mesh, one segment of a micro-batch in a pipeline; and parameters' gradients are shards. Other hooks are refused
    there, since what they compute of a part could differ from what they compute of the whole.

    Args:
        hook: takes what the ``register_…_hook`` that it is given to passes on.
    """
    return LocalHook(hook)


def made_anew(cls: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    """A model of a class and a config as the class makes it, on the meta device."""
    with plain_construction(), torch.device("meta"):
        return cls(copy.deepcopy(config))


def check_as_made(model: PreTrainedModel, reference: PreTrainedModel, *, stages: bool) -> None:
    """Check that a whole model is what its class makes of its config, but for values.

    Args:
        model: whole, before it is sharded.
        reference: the result of :func:`made_anew`.
        stages: whether it is going to be cut into stages, which are planned from its class and config alone.

    Raises:
        UnsupportedModelError: a module, a method or an option is another; names it.
    """
    cls = type(reference)
    expected = dict(reference.named_modules(remove_duplicate=False))
    present = dict(model.named_modules(remove_duplicate=False))
    for name, module in present.items():
        _check_not_ligers(name or cls.__name__, module)
        wanted = expected.get(name)
        if wanted is not None:
            # Its class was replaced after this model was made.
            _check_not_ligers(name or cls.__name__, wanted)
        if wanted is None and _is_function(name, module):
            continue
        if wanted is None or (type(module) is not type(wanted) and module is not model):
            raise _other_module(name, module, wanted, cls)
    for name, wanted in expected.items():
        # Encoders can be made without their pooler, whose attribute is None then.
        parent, _, child = name.rpartition(".")
        if name not in present and parent in present and child not in present[parent]._modules:
            raise UnsupportedModelError(
                f"{name!r} ({type(wanted).__name__}) was taken out of the model; set the config's sizes to what the "
                "model has, so that what is certified is what runs"
            )
    for name, module in present.items():
        if name not in expected:
            continue
        if _has_other_bias(module, expected[name]) and not stages:
            continue  # split as any other: phi's head, for one, has a bias, and Llama's hasn't
        _check_parameters(name, module, expected[name])
        _check_attributes(name or cls.__name__, module, expected[name])
        _check_state_hooks(name or cls.__name__, module, expected[name])
    _check_ties(model, reference)


def _check_not_ligers(name: str, module: nn.Module) -> None:
    """Refuse Liger's modules and methods, of which those of the model itself would be called as any script's."""
    if is_ligers(type(module)):
        raise liger_refused(name, type(module))
    for method in _own_methods(module):
        if is_ligers(vars(module)[method]):
            raise liger_refused(f"{name}.{method}", vars(module)[method])


def _is_function(name: str, module: nn.Module) -> bool:
    """Whether a module is one that a script hangs on the model itself, such as a loss, which computes nothing in it."""
    return bool(name) and "." not in name and not any(True for _ in module.parameters())


def _has_other_bias(module: nn.Module, wanted: nn.Module) -> bool:
    return type(module) is nn.Linear and (module.bias is None) is not (wanted.bias is None)


def _other_module(
    name: str, module: nn.Module, wanted: nn.Module | None, cls: type[PreTrainedModel]
) -> UnsupportedModelError:
    parameters = ", ".join(parameter for parameter, _ in module.named_parameters(recurse=False))
    what = f"where {cls.__name__} has a {type(wanted).__name__}" if wanted else f"which {cls.__name__} hasn't"
    has = f" (parameters: {parameters})" if parameters else ""
    remedy = "only what was seen to be right is sharded; make it a part of a class of your own, which is certified"
    if "parametri" in type(module).__name__.lower():
        remedy = "torch.nn.utils.parametrize.remove_parametrizations leaves a plain weight"
    return UnsupportedModelError(f"{name!r} is a {type(module).__name__}{has}, {what} with this config; {remedy}")


def _check_parameters(name: str, module: nn.Module, wanted: nn.Module) -> None:
    """Check a module's own parameters. Pruning and ``weight_norm`` have put others in their place."""
    parameters, expected = dict(module._parameters), dict(wanted._parameters)
    for key in sorted(parameters.keys() ^ expected.keys()):
        if parameters.get(key) is None and expected.get(key) is None:
            continue
        side = "has a parameter" if key in parameters else "has no parameter"
        raise UnsupportedModelError(
            f"{name!r} ({type(module).__name__}) {side} {key!r}, unlike what its class makes: its weight is computed "
            "from others in a hook, as pruning, weight_norm and spectral_norm do, for which shards have no rule. Make "
            "it permanent (torch.nn.utils.prune.remove, remove_weight_norm, …) before the model is sharded"
        )
    for key, parameter in parameters.items():
        made = expected[key]
        if (parameter is None) is not (made is None) or (
            parameter is not None and made is not None and parameter.shape != made.shape
        ):
            shapes = " and ".join("none" if x is None else str(tuple(x.shape)) for x in (parameter, made))
            raise UnsupportedModelError(
                f"{name}.{key} and what the config implies differ in shape: {shapes}; set the config's sizes to the "
                "model's, so that what is certified is what runs"
            )


def _check_attributes(name: str, module: nn.Module, wanted: nn.Module) -> None:
    """Check an instance's own methods and options."""
    expected = vars(wanted)
    for key, value in vars(module).items():
        if key in _OF_ANY_MODULE or key in _SET_BY_METHODS:
            continue
        if callable(value):
            shadows = hasattr(type(module), key) and not isinstance(inspect.getattr_static(type(module), key), property)
            if (shadows or key in expected) and not _is_same_code(value, expected.get(key)):
                raise UnsupportedModelError(
                    f"{name}.{key} was replaced on this instance, so what was certified isn't what would run; make it "
                    "a method of a class of your own (which is certified), or assign it to the sharded model"
                )
        elif key in expected and _is_option(key, value, module) and value != expected[key]:
            raise UnsupportedModelError(
                f"{name}.{key} is {value!r} on this instance, where its config makes it {expected[key]!r}; set it in "
                "the config, so that what is certified is what runs"
            )


def _is_option(key: str, value: object, module: nn.Module) -> bool:
    """Whether an attribute decides what is certified. Rates of dropout don't, nor the padding token, nor the loss."""
    if key.startswith(("_", "loss_")) or "drop" in key or "pad" in key or isinstance(module, _DropoutNd):
        return False
    return isinstance(value, str | int | float | tuple)


def _is_same_code(value: Any, other: Any) -> bool:
    if other is None:
        return False
    if isinstance(value, functools.partial) and isinstance(other, functools.partial):
        return _is_same_code(value.func, other.func)
    function, other_function = (getattr(x, "__func__", x) for x in (value, other))
    if function is other_function:
        return True
    codes = [getattr(x, "__code__", None) for x in (function, other_function)]
    # Objects with a ``__call__``, such as modules of functions.
    return codes[0] is codes[1] if codes[0] is not None else type(function) is type(other_function) and codes[1] is None


def _check_state_hooks(name: str, module: nn.Module, wanted: nn.Module) -> None:
    for kind in _OF_STATE:
        hooks, expected = getattr(module, kind), getattr(wanted, kind)
        if len(hooks) > len(expected) and any(_package_of(hook) not in _KNOWN_PACKAGES for hook in hooks.values()):
            raise UnsupportedModelError(
                f"{name} has a hook of its state dict ({kind}), which isn't called where shards are saved and loaded; "
                "remove it, and change the checkpoint itself"
            )


def _check_ties(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    """Check that the same parameters are one, since saving and stages go by the config."""
    ties, expected = _tied_names(model), _tied_names(reference)
    for names in sorted(ties ^ expected, key=sorted):
        what = "are one parameter" if names in ties else "aren't one parameter, as its config says"
        raise UnsupportedModelError(
            f"{' and '.join(sorted(names))} {what} in this {type(reference).__name__}, unlike in what its class makes; "
            "set tie_word_embeddings in the config to what the model has"
        )


def _tied_names(model: nn.Module) -> set[frozenset[str]]:
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return {frozenset(group) for group in names.values() if len(group) > 1}


# --- hooks ----------------------------------------------------------------------------------------------------------


def check_hooks(model: PreTrainedModel, reference: PreTrainedModel, *, runs_whole: bool) -> None:
    """Check a whole model's hooks, before it is cut over ranks or into segments.

    Args:
        model: whole, before it is sharded.
        reference: the result of :func:`made_anew`; hooks that the class registers are certified with it.
        runs_whole: whether the model itself, unlike its modules, will be given whole micro-batches.

    Raises:
        UnsupportedModelError: a hook would be given a part of what it is given now, or not be called; names the module.
    """
    _check_global_hooks()
    expected = dict(reference.named_modules())
    for name, module in model.named_modules():
        if name not in expected:
            continue  # a loss function, which is given what it was before
        for kind in (*_FORWARD, *_BACKWARD):
            strange = [hook for hook in getattr(module, kind).values() if not _is_known(hook, kind)]
            if len(strange) > len(getattr(expected[name], kind)) and (name or not runs_whole):
                raise _hook_refused(name or type(model).__name__, kind, strange[-1])
    check_parameter_hooks(model)


def _check_global_hooks() -> None:
    for kind in (*_FORWARD, *_BACKWARD):
        for hook in getattr(global_hooks, f"_global{kind}").values():
            if not _is_known(hook, kind):
                raise _hook_refused("every module (torch.nn.modules.module)", kind, hook)


def check_parameter_hooks(model: nn.Module) -> None:
    """Check that a model's parameters have no hooks of a script.

    Raises:
        UnsupportedModelError: one has; names the parameter.
    """
    for name, parameter in model.named_parameters():
        _check_gradient_hooks(name, parameter)


def _check_gradient_hooks(name: str, parameter: nn.Parameter) -> None:
    for kind in _OF_PARAMETERS:
        for hook in (getattr(parameter, kind, None) or {}).values():
            if not isinstance(hook, LocalHook) and _package_of(hook) not in _KNOWN_PACKAGES:
                raise UnsupportedModelError(
                    f"{name} has a gradient hook ({_words_of(hook)}), which would be given this rank's shard of the "
                    "gradient, not the whole; mark a hook that works on shards with cuboid.local_hook, or remove it"
                )


def carry_over(old: nn.Module, new: nn.Module) -> None:
    """Give a module that replaces another one the hooks of the other's forward and backward; note its options."""
    for kind in (*_FORWARD, *_BACKWARD):
        getattr(new, kind).update(getattr(old, kind))
        for flags in _FLAGS.get(kind, ()):
            getattr(new, flags).update(getattr(old, flags))
    new._is_full_backward_hook = old._is_full_backward_hook
    # What a script would set in vain, such as a norm's `variance_epsilon`.
    vars(new)[_REPLACED_OPTIONS] = frozenset(vars(old).keys() - vars(new).keys())


class GuardedHooks(OrderedDict[int, Any]):
    """A module's hooks of one kind. Registering one that would be given a part raises.

    Args:
        present: the hooks that are there already.
        module: the module's name in the model; empty to accept every hook, as a recorder's copy of a module does.
        kind: the attribute that keeps the hooks.
    """

    def __init__(self, present: Any = (), module: str = "", kind: str = "") -> None:
        self._module = ""
        super().__init__(present)
        self._module, self._kind = module, kind

    def __setitem__(self, key: int, hook: Any) -> None:
        # A forward registers hooks of ours, so the usual case is cheap.
        is_ours = str(getattr(hook, "__module__", "")).startswith("cuboid.")
        # Pruning ends in a KeyError if it can't register its hook. Its parameters are refused by the next forward.
        replaces = type(hook).__module__.startswith("torch.nn.utils.")
        if self._module and not is_ours and not replaces and not _is_known(hook, self._kind):
            raise _hook_refused(self._module, self._kind, hook)
        super().__setitem__(key, hook)

    def __reduce__(self) -> Any:
        # By default, a copy would be filled after it is guarded.
        return GuardedHooks, (list(self.items()), self._module, self._kind)


def guard_hooks(model: nn.Module, *, runs_whole: bool) -> None:
    """Make a sharded model's modules refuse hooks that would be given a part, or not be called."""
    for name, module in model.named_modules():
        for kind in (*_FORWARD, *_BACKWARD) if name or not runs_whole else ():
            setattr(module, kind, GuardedHooks(getattr(module, kind), name or type(model).__name__, kind))


def _is_known(hook: Any, kind: str) -> bool:
    # The products' backwards aren't nodes of their modules, so not even a marked backward hook would be called there.
    return (isinstance(hook, LocalHook) and kind in _FORWARD) or is_of_framework(hook)


def is_of_framework(hook: Any) -> bool:
    """Whether a hook is one of Cuboid's or of a framework's, and not a script's."""
    return _package_of(hook) in _KNOWN_PACKAGES


def _package_of(hook: Any) -> str:
    """The package that defines a hook; that of its class if it is an object."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    hook = getattr(hook, "hook", hook) if type(hook).__module__.startswith("torch.") else hook
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return str(module).partition(".")[0]


def _hook_refused(module: str, kind: str, hook: Any) -> UnsupportedModelError:
    what = "a backward hook" if kind in _BACKWARD else "a forward hook"
    remedy = "mark a hook that works on parts with cuboid.local_hook, or remove it"
    if kind in _BACKWARD:
        remedy = "remove it, and use tensors' own register_hook in a forward hook that cuboid.local_hook marks"
    return UnsupportedModelError(
        f"{module!r} has {what} ({_words_of(hook)}), which would be given this rank's part of a micro-batch, not the "
        f"whole; {remedy}"
    )


def _words_of(hook: Any) -> str:
    name = getattr(hook, "__qualname__", None) or type(hook).__qualname__
    return f"{getattr(hook, '__module__', None) or type(hook).__module__}.{name}"


# --- after sharding -------------------------------------------------------------------------------------------------


class SeenCode(Protocol):
    """What code was at a look; see ``Seen`` in the certification."""

    def is_current(self) -> bool:
        """Whether nothing was replaced since, in 0.1 ms."""


class WatchedCode(Protocol):
    """The code that was certified; see ``CodeCheck`` in the certification."""

    @property
    def seen(self) -> SeenCode | None:
        """What it was at the last look; None if nothing says that."""

    def check(self) -> None:
        """Raise an error if code that has a name was replaced since; else look at all of it anew."""


@dataclass
class _CheckedPart:
    """What a module was made of."""

    name: str
    cls: type[nn.Module]
    children: list[nn.Module | None]
    names: dict[str, nn.Module | None]
    methods: frozenset[str]
    options: frozenset[str]
    stays_causal: bool
    shapes: dict[str, torch.Size | None]
    parameters: dict[str, nn.Parameter | None]


class AsSharded:
    """A model as sharding made it, to see what a script changes on it later.

    Args:
        model: after sharding.
        is_cut: whether modules are given parts, of which methods and gradient hooks of a script don't know.
        has_segments: whether they are given segments, in which attention can't see later positions.
    """

    def __init__(self, model: nn.Module, *, is_cut: bool, has_segments: bool = False) -> None:
        self.is_cut, self._has_segments, self._is_first = is_cut, has_segments, True
        self._parts: dict[nn.Module, _CheckedPart] = {}
        for name, module in model.named_modules():
            parameters = dict(module._parameters)
            self._parts[module] = _CheckedPart(
                name,
                type(module),
                children=list(module._modules.values()),
                names=dict(module._modules),
                methods=frozenset(_own_methods(module)),
                options=vars(module).get(_REPLACED_OPTIONS, frozenset()),
                stays_causal=has_segments and vars(module).get("is_causal") is True,
                shapes={key: None if parameter is None else parameter.shape for key, parameter in parameters.items()},
                parameters=parameters,
            )
        self._tied = _tied_names(model)
        #: What was given the model's parameters for its optimizer; see :meth:`take`.
        self.taken_by: str | None = None
        #: The code that was certified; set by what has certified it.
        self.code: WatchedCode | None = None

    def anew(self, model: nn.Module) -> AsSharded:
        """The model as it is after a library has put modules into it that are known here, such as adapters."""
        noted = AsSharded(model, is_cut=self.is_cut, has_segments=self._has_segments)
        noted.taken_by, noted.code = self.taken_by, self.code
        return noted

    def note_classes(self) -> None:
        """Note the modules' classes and methods again, after layers stay uncompiled. Their children stay as noted: in a
        pipeline's unit, others are in the places of some."""
        for module, part in self._parts.items():
            part.cls, part.methods = type(module), frozenset(_own_methods(module))

    def take(self, model: nn.Module, by: str) -> None:
        """Note what was given the model's parameters for an optimizer, which steps on no others from now on."""
        for module, part in self._parts.items():
            # PEFT, for one, puts others in their places when it casts those of a new adapter.
            if any(part.parameters.get(key) is not x for key, x in module._parameters.items()):
                self._check_part(model, module, part)
        self.taken_by = by

    def check(self, model: nn.Module) -> None:
        """Check that nothing was changed; in every forward, which takes 1 µs a module and 0.1 ms for the code.

        Raises:
            UnsupportedModelError: something was added, replaced or given a method or hook of its own; names it.
        """
        # A loop without calls of Python functions: this runs in every forward.
        for module, part in self._parts.items():
            attributes = module.__dict__
            same = True
            for key, parameter in attributes["_parameters"].items():
                same &= part.parameters.get(key) is parameter
                if parameter is None:
                    continue
                same &= part.shapes.get(key) == parameter.shape
                if self.is_cut and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
                    # DeepSpeed hangs a hook of its own on each parameter.
                    _check_gradient_hooks(f"{part.name}.{key}".lstrip("."), parameter)
            if (
                not same
                or type(module) is not part.cls
                or ("forward" in attributes and "forward" not in part.methods and part.name and self.is_cut)
                or list(attributes["_modules"].values()) != part.children
                or not part.options.isdisjoint(attributes)
                or (part.stays_causal and attributes.get("is_causal") is not True)
            ):
                self._check_part(model, module, part)
        # Also where the forward is a script's and calls the base model: Liger's takes the head's shard for all of it.
        whole_model = next(iter(self._parts))
        if "forward" in vars(whole_model):
            _check_not_ligers(type(whole_model).__name__, whole_model)
        if self.code is not None and self.code.seen is not None and not self.code.seen.is_current():
            self.code.check()
        if not self.is_cut:
            return
        for kind in _GLOBAL:
            if kind:
                _check_global_hooks()
        if self._is_first:
            for module, part in self._parts.items():
                added = set(_own_methods(module)) - part.methods
                if added and part.name:
                    raise _method_replaced(part.name, added.pop())
            self._is_first = False

    def _check_ties(self, model: nn.Module) -> None:
        tied = _tied_names(model)
        if tied != self._tied:
            names = sorted(set().union(*(tied ^ self._tied)))
            raise UnsupportedModelError(
                f"{' and '.join(names[:2])}: parameters were tied or untied after the model was sharded, unlike its "
                "config says; set tie_word_embeddings in the config before"
            )

    def _check_part(self, model: nn.Module, module: nn.Module, part: _CheckedPart) -> None:
        _check_not_ligers(part.name or type(model).__name__, module)
        if type(module) is not part.cls:
            raise UnsupportedModelError(
                f"{part.name!r} became a {type(module).__module__}.{type(module).__name__} after it was sharded (as "
                "parametrizations do), which has no rule"
            )
        if "forward" in vars(module) and "forward" not in part.methods and part.name and self.is_cut:
            raise _method_replaced(part.name, "forward")
        for option in part.options & vars(module).keys():
            raise UnsupportedModelError(
                f"{part.name}.{option} was set after the model was sharded, but the module that computes there now was "
                "made with the value before; set it in the config, before the model is sharded"
            )
        if part.stays_causal and vars(module).get("is_causal") is not True:
            raise UnsupportedModelError(
                f"{part.name}.is_causal was set to {vars(module).get('is_causal')!r} after the model was cut into "
                "stages, whose segments don't see later positions; set it in the config, before the model is sharded"
            )
        kept = {id(child) for child in part.children}
        for key, child in module._modules.items():
            is_harmless = child is None or _is_function(f"{part.name}.{key}".lstrip("."), child)
            if id(child) not in kept and not is_harmless:
                raise UnsupportedModelError(
                    f"{f'{part.name}.{key}'.lstrip('.')!r} is a {type(child).__module__}.{type(child).__name__}, which "
                    "came into the model after it was sharded, and isn't split as its neighbours are (adapters of "
                    "PEFT, for one, have no rules)"
                )
        present = {id(child) for child in module._modules.values()}
        for key, child in part.names.items():
            if child is not None and id(child) not in present:
                raise UnsupportedModelError(
                    f"{f'{part.name}.{key}'.lstrip('.')!r} ({type(child).__name__}) was taken out of the model, or "
                    "replaced, after it was sharded; do that before, so that what is certified is what runs"
                )
        shapes = {key: None if parameter is None else parameter.shape for key, parameter in module._parameters.items()}
        if any(part.shapes.get(key) != shape for key, shape in shapes.items()):
            raise UnsupportedModelError(
                f"{part.name or type(module).__name__!r} was given other parameters, or of other shapes, after it was "
                "sharded, as pruning, weight_norm and whole tensors do; change values in place, with "
                "torch.no_grad(): parameter.copy_(shard)"
            )
        for key, parameter in module._parameters.items():
            is_parameter = parameter is None or isinstance(parameter, nn.Parameter)
            if self.is_cut and not is_parameter and torch.is_grad_enabled():
                raise UnsupportedModelError(
                    f"{part.name}.{key} is a tensor in the place of the parameter, as torch.func.functional_call puts "
                    "them there for a forward: its backward would unshard the parameter itself again. Call it under "
                    "torch.no_grad(), or change the parameter's values in place"
                )
            if self.taken_by is not None and parameter is not part.parameters.get(key):
                raise UnsupportedModelError(
                    f"{part.name}.{key} is another parameter than {self.taken_by} was given, and wouldn't be trained; "
                    "change its values in place, with torch.no_grad(): parameter.copy_(shard)"
                )
        if self.is_cut:
            # Other parameters of the same shapes, as ``tie_weights`` and scripts put in their places.
            self._check_ties(model)
        if all(isinstance(parameter, nn.Parameter | None) for parameter in module._parameters.values()):
            part.parameters = dict(module._parameters)


def _own_methods(module: nn.Module) -> Iterator[str]:
    """Names of an instance's attributes that hide a method of its class."""
    cls = type(module)
    for key, value in vars(module).items():
        if key not in _OF_ANY_MODULE and key not in _SET_BY_METHODS and callable(value) and hasattr(cls, key):
            yield key


def _method_replaced(name: str, method: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name}.{method} was replaced after the model was sharded: it would be given this rank's part of a "
        "micro-batch. Make it a method of a class of your own, which is certified when it is loaded"
    )
