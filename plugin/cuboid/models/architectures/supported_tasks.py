"""Which models there are rules for: causal language models of transformers. An error names the task of any other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from cuboid.errors import UnsupportedModelError

_CAUSAL = ("ForCausalLM", "LMHeadModel")
#: Tasks that their classes' names don't spell out.
_TASKS = {
    "MaskedLM": "masked language modelling, where positions see later ones",
    "ConditionalGeneration": "generation from an encoder's output or from other kinds of input",
    "PreTraining": "several objectives of pretraining",
}


def check_class(cls: type) -> None:
    """Make sure that a class is an architecture's causal language model.

    Raises:
        UnsupportedModelError: it has another head or none.
    """
    if any(base.__name__.endswith(_CAUSAL) for base in cls.__mro__):
        return
    task = re.search(r"For([A-Z]\w*)$", cls.__name__)
    if task is not None:
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", task[1]).lower()
        what = f"is for {_TASKS.get(task[1], words)}"
    elif issubclass(cls, PreTrainedModel):
        what = "has no language-modelling head"
    else:
        what = "isn't a model of transformers"
    raise UnsupportedModelError(
        f"{cls.__name__} {what}; a mesh and a pipeline have rules for the heads and losses of causal language models "
        "only, such as LlamaForCausalLM"
    )


def check_model(model: Any) -> None:
    """:func:`check_class` of a model in memory, which may be wrapped.

    Raises:
        UnsupportedModelError: it has another head or none, has adapters, or is compiled.
    """
    if hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False):
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        raise adapters_refused(f"{type(model).__name__} has adapters of PEFT around {type(inner).__name__}")
    if isinstance(getattr(model, "_orig_mod", None), nn.Module):
        raise compiling_refused(model._orig_mod)
    check_class(type(model))
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        raise UnsupportedModelError(f"{type(model).__name__} has no output embeddings; a causal language model has")


def check_checkpoint(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Make sure that a call of ``from_pretrained`` with these arguments doesn't load adapters.

    Raises:
        UnsupportedModelError: it does.
    """
    path = args[0] if args else kwargs.get("pretrained_model_name_or_path")
    given: str | Path | None = (kwargs.get("adapter_kwargs") or {}).get("_adapter_model_path")
    if given is None and path is not None and (Path(path) / "adapter_config.json").is_file():
        given = path
    if given is not None:
        raise adapters_refused(f"{given} holds adapters of PEFT")


def adapters_refused(what: str) -> UnsupportedModelError:
    """The error for adapters."""
    return UnsupportedModelError(
        f"{what}, for which there are no rules on a mesh or in a pipeline: their weights aren't split as the model's. "
        "Merge them first with PEFT's merge_and_unload() in plain transformers, save the model, and train all of it"
    )


def compiling_refused(model: nn.Module) -> UnsupportedModelError:
    """The error for ``torch.compile`` of a whole model."""
    return UnsupportedModelError(
        f"torch.compile can't compile {type(model).__name__} as a whole, between whose layers ranks talk; leave "
        "it out, or compile what is inside of the layers, once the model is sharded: "
        "for layer in model.base_model.layers: layer.compile()"
    )
