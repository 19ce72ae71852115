"""The output of a forward that was given labels and returns the loss only: an error where a script reads its logits."""

from __future__ import annotations

import functools
from typing import Any

from transformers.utils import ModelOutput

from cuboid.errors import CuboidError


class MissingOutputError(CuboidError, AttributeError, KeyError):
    """A script reads an entry of a model's output that wasn't computed."""

    # KeyError would show the message's repr.
    __str__ = CuboidError.__str__


class WithoutLogits:
    """Mixed into the class of such an output; ``getattr(output, "logits", None)`` is None, as in plain transformers."""

    _whole_class: type[ModelOutput]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # What libraries make of its entries is an ordinary output.
        return cls._whole_class(*args, **kwargs)

    @property
    def logits(self) -> Any:
        raise MissingOutputError(
            "logits: given labels, a sharded model in training returns the loss, computed from a chunk of the logits "
            'at a time; write "gather_logits": true into the config\'s tensor_parallel section to have them too, whole '
            "on every rank, or call the model without labels"
        )

    def __getitem__(self, key: Any) -> Any:
        return self.logits if key == "logits" else super().__getitem__(key)  # type: ignore[misc]

    def __repr__(self: Any) -> str:
        return repr(self._whole_class(**self))

    def __reduce__(self: Any) -> Any:
        return self._whole_class(**self).__reduce__()


def without_logits(output: ModelOutput) -> ModelOutput:
    """An output with the entries that are not None, whose logits are an error when they are read.

    Of an entry that was set to None, transformers' class keeps the former value, a rank's part, among its items.
    """
    entries = {}
    # Every step comes here, and a comprehension would be a call.
    for name, entry in output.items():
        if getattr(output, name) is not None:
            entries[name] = entry
    output = type(output)(**entries)
    vars(output).pop("logits", None)
    output.__class__ = _class_of(type(output))  # type: ignore[arg-type]
    return output


@functools.cache
def _class_of(whole_class: type[ModelOutput]) -> type[ModelOutput]:
    members: dict[str, Any] = {"_whole_class": whole_class}
    return type(whole_class.__name__, (WithoutLogits, whole_class), members)
