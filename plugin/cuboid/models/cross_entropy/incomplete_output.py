"""The output of a forward that left something out: an error where a script reads an entry that it would need."""

from __future__ import annotations

import functools
from typing import Any

from transformers.utils import ModelOutput

from cuboid.errors import CuboidError

_REASONS = {
    "logits": "given labels, a sharded model in training returns the loss, computed from a chunk of the logits "
    'at a time; write "gather_logits": true into the config\'s tensor_parallel section to have them too, whole '
    "on every rank, or call the model without labels",
    "past_key_values": "this forward of a sharded model has kept no cache, so that one that is given the next tokens "
    "alone wouldn't see these; in evaluation mode under torch.no_grad() use_cache=True makes one, for the models that "
    "generate with a cache. Others are given all tokens in each forward, with use_cache=False",
}


class MissingOutputError(CuboidError, AttributeError, KeyError):
    """A script reads an entry of a model's output that wasn't computed."""

    # KeyError would show the message's repr.
    __str__ = CuboidError.__str__


class Incomplete:
    """Mixed into the class of such an output; ``getattr(output, "logits", None)`` is None, as in plain transformers."""

    _whole_class: type[ModelOutput]
    _missing: tuple[str, ...]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # What libraries make of its entries is an ordinary output.
        return cls._whole_class(*args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return getattr(self, key) if key in self._missing else super().__getitem__(key)  # type: ignore[misc]

    def __repr__(self: Any) -> str:
        return repr(self._whole_class(**self))

    def __reduce__(self: Any) -> Any:
        return self._whole_class(**self).__reduce__()


def without(output: ModelOutput, missing: tuple[str, ...]) -> ModelOutput:
    """An output with the entries that are not None; to read one of those that are named is an error.

    Of an entry that was set to None, transformers' class keeps the former value, a rank's part, among its items.
    """
    entries = {}
    # Every step comes here, and a comprehension would be a call.
    for name, entry in output.items():
        if getattr(output, name) is not None:
            entries[name] = entry
    output = type(output)(**entries)
    for name in missing:
        vars(output).pop(name, None)
    output.__class__ = _class_of(type(output), missing)  # type: ignore[arg-type]
    return output


@functools.cache
def _class_of(whole_class: type[ModelOutput], missing: tuple[str, ...]) -> type[ModelOutput]:
    members: dict[str, Any] = {"_whole_class": whole_class, "_missing": missing}
    members |= {name: property(functools.partial(_refuse, name)) for name in missing}
    return type(whole_class.__name__, (Incomplete, whole_class), members)


def _refuse(name: str, _: Any) -> Any:
    raise MissingOutputError(f"{name}: {_REASONS[name]}")
