"""The tasks whose models have rules, and the errors for other models, which name their task."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import transformers
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedImageModeling,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from cuboid.errors import UnsupportedModelError

#: ``"seq2seq"``: an encoder-decoder. ``"hidden"``: no head; users compute their own loss from hidden states.
Task = Literal["causal", "masked", "seq2seq", "sequence", "tokens", "answers", "images", "masked images", "hidden"]
#: By the endings of class names in transformers.
_TASKS: dict[str, Task] = {
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "ForMaskedLM": "masked",
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "tokens",
    "ForQuestionAnswering": "answers",
    "ForImageClassification": "images",
    "ForMaskedImageModeling": "masked images",
    "Model": "hidden",
}
_AUTO_CLASSES: dict[Task, Any] = {
    "causal": AutoModelForCausalLM,
    "masked": AutoModelForMaskedLM,
    "seq2seq": AutoModelForSeq2SeqLM,
    "sequence": AutoModelForSequenceClassification,
    "tokens": AutoModelForTokenClassification,
    "answers": AutoModelForQuestionAnswering,
    "images": AutoModelForImageClassification,
    "masked images": AutoModelForMaskedImageModeling,
    "hidden": AutoModel,
}
#: Descriptions for error messages.
WORDS: dict[Task, str] = {
    "causal": "causal language modelling",
    "masked": "masked language modelling, where positions see later ones",
    "seq2seq": "sequence-to-sequence language modelling by an encoder-decoder",
    "sequence": "sequence classification",
    "tokens": "token classification",
    "answers": "question answering",
    "images": "image classification",
    "masked images": "masked image modelling",
    "hidden": "hidden states, without a head",
}
#: Tasks whose head and loss a pipeline computes with the model's own forward, on whole sequences.
_OF_WHOLE_SEQUENCES: tuple[Task, ...] = ("sequence", "tokens", "answers")
#: Descriptions of tasks without rules that class names don't spell out.
_OTHERS = {
    "ConditionalGeneration": "generation from an encoder's output or from other kinds of input",
    "PreTraining": "several objectives of pretraining",
}


def auto_class_of(architectures: Sequence[str] | None) -> Any:
    """The auto class that builds a checkpoint's model.

    Args:
        architectures: of its config. Without them, or for a task without rules, the result is the class for causal
            language modelling, which then raises the error.
    """
    name = next(iter(architectures or ()), "")
    known = getattr(transformers, name, None)
    if isinstance(known, type) and _is_sequence_to_sequence(known):
        return AutoModelForSeq2SeqLM
    return _AUTO_CLASSES[_task_by_name(name) or "causal"]


def _task_by_name(name: str) -> Task | None:
    if name.endswith("PreTrainedModel"):
        return None
    return next((task for ending, task in _TASKS.items() if name.endswith(ending)), None)


def _is_sequence_to_sequence(cls: Any) -> bool:
    """Whether a class is an encoder-decoder language model; names of such classes have no common ending."""
    if not issubclass(cls, PreTrainedModel) or cls.main_input_name != "input_ids" or not cls.can_generate():
        return False
    return {"input_ids", "decoder_input_ids", "labels"} <= inspect.signature(cls.forward).parameters.keys()


def task_of(cls: type) -> Task:
    """The task of a model's class.

    Raises:
        UnsupportedModelError: there are no rules for it.
    """
    if _is_sequence_to_sequence(cls):
        return "seq2seq"
    names = [base.__name__ for base in cls.__mro__ if issubclass(base, PreTrainedModel)]
    for name in names:
        task = _task_by_name(name)
        if task is not None:
            return _checked(cls, task)
    other = re.search(r"For([A-Z]\w*)$", cls.__name__)
    if other is not None:
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", other[1]).lower()
        what = f"is for {_OTHERS.get(other[1], words)}"
    elif names:
        what = "has a head that its name doesn't tell"
    else:
        what = "isn't a model of transformers"
    raise UnsupportedModelError(
        f"{cls.__name__} {what}; a mesh has rules for language models, causal, masked and of two sequences, for "
        "sequence and token classification, question answering, image classification, masked image modelling, and "
        "models without a head, such as LlamaForCausalLM"
    )


def _checked(cls: Any, task: Task) -> Task:
    """The task, unless the class takes an input without rules, such as audio."""
    name = getattr(cls, "main_input_name", "input_ids")
    known = {"images": ("pixel_values",), "masked images": ("pixel_values",), "hidden": ("input_ids", "pixel_values")}
    if task != "causal" and name not in known.get(task, ("input_ids",)):
        raise UnsupportedModelError(
            f"{cls.__name__} is given {name}; for {WORDS[task]} a mesh has rules for models of "
            + " or ".join(known.get(task, ("input_ids",)))
        )
    return task


def takes_images(cls: Any) -> bool:
    """Whether a class takes ``pixel_values`` instead of ids, for a task that has rules."""
    return cls.main_input_name == "pixel_values" and task_of(cls) in ("images", "masked images", "hidden")


def check_class(cls: type, *, stages: bool = False) -> None:
    """Check that there are rules for a class's task.

    Args:
        cls: the architecture's class.
        stages: whether it is to be cut into pipeline stages.

    Raises:
        UnsupportedModelError: there are none.
    """
    task = task_of(cls)
    if stages and task not in ("causal", "masked") and not runs_own_head(task):
        raise UnsupportedModelError(
            f"{cls.__name__} is for {WORDS[task]}; a pipeline has rules for the heads and losses of language models, "
            "causal or masked, of sequence and token classification and of question answering. Leave the pipeline "
            "section out: a mesh takes it"
        )


def runs_own_head(task: Task) -> bool:
    """Whether a pipeline's last stage computes a task's loss with the model's own forward, on whole sequences."""
    return task in _OF_WHOLE_SEQUENCES


def takes_token_types(model: PreTrainedModel) -> bool:
    """Whether a model has a table of token types, and its forward takes them."""
    parameters = inspect.signature(type(model.base_model).forward).parameters
    return "token_type_ids" in parameters and bool(getattr(model.config, "type_vocab_size", 0))


def check_causal(config: PretrainedConfig, command: str) -> None:
    """Check that a config is of a causal language model, for a command that runs nothing else.

    Raises:
        UnsupportedModelError: it isn't.
    """
    kinds = {type(config), type(config.get_text_config())}
    if kinds.isdisjoint(MODEL_FOR_CAUSAL_LM_MAPPING) and not getattr(config, "auto_map", None):
        raise UnsupportedModelError(
            f"{command} runs causal language models, and {config.model_type!r} has none; train other models in a "
            "script of your own, with cuboid.from_pretrained"
        )


def check_model(model: Any, *, stages: bool = False) -> None:
    """:func:`check_class` of a model in memory, which may be wrapped.

    Raises:
        UnsupportedModelError: there are no rules for it, or it has adapters, or is compiled.
    """
    if hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False):
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        raise adapters_refused(f"{type(model).__name__} has adapters of PEFT around {type(inner).__name__}")
    if isinstance(getattr(model, "_orig_mod", None), nn.Module):
        raise compiling_refused(model._orig_mod)
    check_class(type(model), stages=stages)
    if task_of(type(model)) in ("causal", "masked", "seq2seq") and model.get_output_embeddings() is None:
        raise UnsupportedModelError(f"{type(model).__name__} has no output embeddings; a language model has")


def check_checkpoint(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check that a call of ``from_pretrained`` with these arguments doesn't load adapters.

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
    """The error for PEFT adapters."""
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
