"""Liger's kernels, which the Trainer or a script puts into a model: none of them is taken where ranks share one.

They replace modules and methods by some that compute with whole features and a whole vocabulary, of which a rank has a
part: a norm of Liger's would divide by a part's mean, and its loss multiply by the head's shard as if that were all.
"""

from __future__ import annotations

from collections.abc import Iterable

from cuboid.errors import UnsupportedModelError

_PACKAGE = "liger_kernel"

_FUSED = "compiled layers fuse it"
_IN_CHUNKS = "the loss is computed in chunks of tokens, over ranks that have parts of the vocabulary"
#: By the names of Liger's options: what is in the kernel's place.
_INSTEAD = {
    "rope": _FUSED,
    "rms_norm": "norms are fused already, and sum over the features of all ranks",
    "swiglu": _FUSED,
    "cross_entropy": _IN_CHUNKS,
    "fused_linear_cross_entropy": _IN_CHUNKS,
}
#: Those of a Llama that Liger puts in unless it is told otherwise.
_BY_DEFAULT = ("rope", "rms_norm", "swiglu", "fused_linear_cross_entropy")


def why_refused(options: dict[str, bool] | None) -> str:
    """Why ``use_liger_kernel`` has no rule for a sharded model, by the kernels that it asks for.

    Args:
        options: ``TrainingArguments.liger_kernel_config``.
    """
    options = options or {}
    names = [name for name in dict.fromkeys((*_BY_DEFAULT, *options)) if options.get(name, name in _BY_DEFAULT)]
    parts = "".join(f"; {name}: {_INSTEAD.get(name, 'replaces a module by its class')}" for name in names)
    return (
        f"it replaces modules that compute a rank's part here, and none of its kernels is taken{parts}. Leave it out, "
        'and write "compile": true under tensor_parallel'
    )


#: What a script does instead of calling Liger's functions.
INSTEAD = (
    "Liger's kernels aren't taken where ranks share a model: leave apply_liger_kernel_to_… and AutoLigerKernelFor… "
    'out; "compile": true under tensor_parallel fuses what they fuse, and the loss is computed in chunks in any case'
)


def is_ligers(thing: object) -> bool:
    """Whether Liger's package defines a function, a bound method or a class."""
    return str(getattr(thing, "__module__", None)).partition(".")[0] == _PACKAGE


def is_among(changes: Iterable[str]) -> bool:
    """Whether one of the changes of a model's code, in words, is one to code of Liger's."""
    return any(change.partition(" is ")[2].startswith(f"{_PACKAGE}.") for change in changes)


def liger_refused(name: str, thing: object) -> UnsupportedModelError:
    """The error for a module, or a method of it, that is Liger's."""
    what = f"{thing.__module__}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"
    return UnsupportedModelError(
        f"{name} is {what}, which computes with whole features or a whole vocabulary. {INSTEAD}"
    )
