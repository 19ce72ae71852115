"""The list of all kinds of models, and which of them a class is; errors for other classes name what they are for."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from cuboid.errors import UnsupportedModelError
from cuboid.models.architectures.media import AUDIO, IMAGES
from cuboid.models.architectures.refusals import adapters_refused, compiling_refused
from cuboid.models.kinds.causal import Causal
from cuboid.models.kinds.hidden_states import HiddenStates
from cuboid.models.kinds.images import ImageClassifier, ImageStates, MaskedImages
from cuboid.models.kinds.label_heads import QuestionAnswering, SequenceClassifier, TokenClassifier
from cuboid.models.kinds.masked import Masked
from cuboid.models.kinds.media.with_text import AudioWithText, ImagesWithText, WithText
from cuboid.models.kinds.model_kind import ModelKind
from cuboid.models.kinds.sequence_to_sequence import SequenceToSequence
from cuboid.models.kinds.speech_to_text import SpeechToText

#: All kinds. Where an ending of class names is that of several, their inputs tell them apart.
KINDS: tuple[type[ModelKind], ...] = (
    Causal,
    Masked,
    SequenceToSequence,
    SpeechToText,
    SequenceClassifier,
    TokenClassifier,
    QuestionAnswering,
    ImagesWithText,
    AudioWithText,
    ImageClassifier,
    MaskedImages,
    HiddenStates,
    ImageStates,
)
_IDS = "input_ids"
#: Kinds that only the arguments of a class's forward tell.
_BY_INPUTS: tuple[type[SequenceToSequence | WithText], ...] = (
    SequenceToSequence,
    SpeechToText,
    ImagesWithText,
    AudioWithText,
)
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
    for kind in _BY_INPUTS if isinstance(known, type) else ():
        if kind.includes(known):
            return kind.auto_class_of(known)
    return next(iter(_kinds_by_name(name)), Causal).auto_class


def _kinds_by_name(name: str) -> list[type[ModelKind]]:
    if name.endswith("PreTrainedModel"):
        return []
    return [kind for kind in KINDS if kind.endings and name.endswith(kind.endings)]


def kind_of(cls: type, config: PretrainedConfig) -> ModelKind:
    """The kind of a model's class, with what its config says of it.

    Raises:
        UnsupportedModelError: there are no rules for it.
    """
    return kind_of_class(cls).of(config)


def kind_of_class(cls: Any) -> type[ModelKind]:
    """The kind of a model's class.

    Raises:
        UnsupportedModelError: there are no rules for it.
    """
    for by_inputs in _BY_INPUTS:
        if by_inputs.includes(cls):
            return by_inputs
    names = [base.__name__ for base in cls.__mro__ if issubclass(base, PreTrainedModel)]
    for name in names:
        kinds = _kinds_by_name(name)
        for kind in kinds:
            if kind.takes_input_of(cls):
                return kind
        if kinds:
            raise UnsupportedModelError(
                f"{cls.__name__} is given {cls.main_input_name}; for {kinds[0].words} a mesh has rules for models of "
                + " or ".join(kind.main_input for kind in kinds)
            )
    other = re.search(r"For([A-Z]\w*)$", cls.__name__)
    if other is not None:
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", other[1]).lower()
        what = f"is for {_OTHERS.get(other[1], words)}"
        main_input = getattr(cls, "main_input_name", _IDS)
        if main_input != _IDS:
            # Audio, mostly.
            what = (
                f"is for generation from {main_input}" if other[1] in _OTHERS else f"{what}, and is given {main_input}"
            )
        arguments = inspect.signature(cls.forward).parameters.keys()
        medium = next((medium for medium in (IMAGES, AUDIO) if {_IDS, medium.main} <= arguments), None)
        if medium is not None:
            what += f" beside ids, without a {medium.compute} that computes features of {medium.nouns} by itself"
    elif names:
        what = "has a head that its name doesn't tell"
    else:
        what = "isn't a model of transformers"
    raise UnsupportedModelError(
        f"{cls.__name__} {what}; a mesh has rules for language models, causal, masked and of two sequences, for "
        "sequence and token classification, question answering, text with images or audio, image classification, "
        "masked image modelling, and models without a head, such as LlamaForCausalLM"
    )


def check_class(cls: type, *, stages: bool = False) -> None:
    """Check that there are rules for a class's kind.

    Args:
        cls: the architecture's class.
        stages: whether it is to be cut into pipeline stages.

    Raises:
        UnsupportedModelError: there are none.
    """
    kind = kind_of_class(cls)
    if stages and not kind.in_pipeline:
        raise UnsupportedModelError(
            f"{cls.__name__} is for {kind.words}; a pipeline has rules for the heads and losses of language models, "
            "causal or masked, of sequence and token classification and of question answering. Leave the pipeline "
            "section out: a mesh takes it"
        )


def check_model(model: Any, *, stages: bool = False) -> None:
    """:func:`check_class` of a model in memory, which may be wrapped.

    Raises:
        UnsupportedModelError: there are no rules for it, or it has adapters, or is compiled.
    """
    check_unadapted(model)
    if isinstance(getattr(model, "_orig_mod", None), nn.Module):
        raise compiling_refused(model._orig_mod)
    if getattr(model, "_compiled_call_impl", None) is not None:
        raise compiling_refused(model)
    check_class(type(model), stages=stages)
    if kind_of_class(type(model)).is_language_model and model.get_output_embeddings() is None:
        raise UnsupportedModelError(f"{type(model).__name__} has no output embeddings; a language model has")


def check_unadapted(model: Any) -> None:
    """Check that a model that isn't sharded yet has no adapters.

    Raises:
        UnsupportedModelError: it has.
    """
    if hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False):
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        raise adapters_refused(f"{type(model).__name__} has adapters of PEFT around {type(inner).__name__}")
