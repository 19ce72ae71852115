"""The errors for models whose kind has rules, and that still can't be cut: with adapters, or compiled as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from cuboid.errors import UnsupportedModelError


def check_checkpoint(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check that a call of ``from_pretrained`` with these arguments doesn't load adapters.

    Raises:
        UnsupportedModelError: it does.
    """
    path = args[0] if args else kwargs.get("pretrained_model_name_or_path")
    adapters: str | Path | None = (kwargs.get("adapter_kwargs") or {}).get("_adapter_model_path")
    if adapters is None and path is not None and (Path(path) / "adapter_config.json").is_file():
        adapters = path
    if adapters is not None:
        raise adapters_refused(f"{adapters} holds adapters of PEFT")


def adapters_refused(what: str) -> UnsupportedModelError:
    """The error for PEFT adapters."""
    return UnsupportedModelError(
        f"{what}: they came before the model was sharded, which can't cut them. Load the model without them, and then "
        "take PEFT's get_peft_model(model, LoraConfig(…)) or PeftModel.from_pretrained(model, folder)"
    )


def compiling_refused(model: nn.Module) -> UnsupportedModelError:
    """The error for ``torch.compile`` of a whole model."""
    return UnsupportedModelError(
        f"torch.compile can't compile {type(model).__name__} as a whole, between whose layers ranks talk; leave "
        'it out, and write "compile": true in the config\'s section tensor_parallel, or call model.compile() once the '
        "model is sharded: either compiles its layers"
    )
