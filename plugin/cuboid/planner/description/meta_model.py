"""A model by its config alone: its class builds it on the meta device, as training builds it, and nothing is allocated.

So whatever training takes can be planned, without a table of architectures.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import TRANSFORMERS_DYNAMIC_MODULE_NAME

from cuboid.errors import CuboidError, UnsupportedModelError
from cuboid.models.architectures.certificate import MeshVerdict
from cuboid.models.architectures.refusals import check_unquantized
from cuboid.models.certification.mesh_certificates import mesh_verdict
from cuboid.models.kinds.registry import auto_class_of, check_class
from cuboid.models.plain_construction import plain_construction
from cuboid.planner.description.limits import Stages
from cuboid.planner.description.model import ModelDescription
from cuboid.planner.description.modules import describe_modules
from cuboid.planner.description.trunk import Trunk


def model_of(config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    """A config's model, on the default device.

    Models with their own code are built if the config's class is from it: then the code was trusted.
    """
    trusted = type(config).__module__.startswith(TRANSFORMERS_DYNAMIC_MODULE_NAME)
    auto_class = auto_class_of(config.architectures)
    with plain_construction():
        model: PreTrainedModel = auto_class.from_config(copy.deepcopy(config), trust_remote_code=trusted, **options)
    return model


def meta_model(config: PretrainedConfig) -> PreTrainedModel:
    """A config's model on the meta device.

    Raises:
        UnsupportedModelError: transformers can't build it.
    """
    try:
        with torch.device("meta"):
            return model_of(config)
    except CuboidError:
        raise
    # Of any kind, from the model's own code.
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UnsupportedModelError(
            f"no model can be built from the config of {config.model_type!r}: {reason}"
        ) from error


def describe(config: PretrainedConfig, *, verified: bool = False, trunk: Trunk | None = None) -> ModelDescription:
    """Describe the model of a config, with the layouts that training accepts of it.

    If no table and no cache has the architecture's certificate, its self-test runs, which takes seconds.

    Args:
        config: of transformers.
        verified: whether `cuboid verify` passed on the real weights, as ``"certification": "verified"`` says.
        trunk: how the model is trained if it is frozen itself.

    Raises:
        UnsupportedModelError: no layout can be estimated; says why.
        ConfigError: its adapters can't be counted.
    """
    check_unquantized(config, f"the config of {config.model_type!r}")
    model = meta_model(config)
    cls = type(model)
    check_class(cls)
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{cls.__name__} is an encoder-decoder, whose two stacks have sequences of their own; the planner counts "
            "the work of one stack. A mesh trains it: name the mesh's axes, and measure it with your own script"
        )
    try:
        verdict = mesh_verdict(cls, model.config)
    except UnsupportedModelError as error:
        verdict = MeshVerdict(refused={"whole rows": str(error)})
    return describe_modules(model, verdict, Stages(model, verified), trunk)
