"""Liger's kernels, which the Trainer puts into a model: none of them is taken where ranks share one."""

from __future__ import annotations

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
