"""What each module of a Hugging Face model is for: its role on the mesh.

Roles come from the model's own ``base_model_tp_plan`` where it has one, else from the table below, and for
embeddings, head and norms from what they are. A module with parameters that no rule covers is an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from cuboid.distributed.topology import Axis
from cuboid.errors import UnsupportedModelError

Kind = Literal["embedding", "up", "down", "head", "rms_norm", "layer_norm", "gathered"]
Heads = Literal["query", "key_value", "query_key_value"]


@dataclass(frozen=True)
class Role:
    """What a module is for. ``heads`` says what its out features are, where they are attention heads."""

    kind: Kind
    heads: Heads | None = None


@dataclass(frozen=True)
class Architecture:
    """Roles of an architecture that has no tensor-parallel plan of its own.

    Args:
        roles: patterns of names inside the base model (``*`` matches one part of a name) and their roles.
        split_attributes: sizes that a module's forward reads, by pattern and attribute, with the axes that cut them.
    """

    roles: dict[str, Role]
    split_attributes: dict[tuple[str, str], tuple[Axis, ...]] = field(default_factory=dict)


#: Architectures without a plan, by ``config.model_type``.
ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": Architecture(
        roles={
            "wpe": Role("embedding"),
            "h.*.attn.c_attn": Role("up", "query_key_value"),
            "h.*.attn.c_proj": Role("down"),
            "h.*.mlp.c_fc": Role("up"),
            "h.*.mlp.c_proj": Role("down"),
        },
        split_attributes={("h.*.attn", "split_size"): ("sequence", "hidden")},
    ),
}

#: Architectures whose plan is known to be all there is to say. Others may compute between the projections what
#: isn't local to a head or a feature; they are rejected until somebody has looked.
PLANNED = frozenset({"llama", "mistral", "qwen2", "qwen3"})

_STYLES: dict[str, Kind] = {"colwise": "up", "rowwise": "down", "replicated_with_grad_allreduce": "gathered"}
_HEADS: dict[str, Heads] = {"q_proj": "query", "k_proj": "key_value", "v_proj": "key_value"}


def architecture_of(model: PreTrainedModel) -> Architecture:
    """Rules of the model's architecture.

    Raises:
        UnsupportedModelError: no rules for it, or a style of its plan that isn't known.
    """
    model_type = model.config.model_type
    if model_type in ARCHITECTURES:
        return ARCHITECTURES[model_type]
    if model_type not in PLANNED:
        known = ", ".join(sorted({*ARCHITECTURES, *PLANNED}))
        raise UnsupportedModelError(f"no rules for the architecture {model_type!r} yet; supported: {known}")
    return Architecture(roles={name: _from_style(name, style) for name, style in _plan(model).items()})


def _plan(model: PreTrainedModel) -> dict[str, str]:
    return model.config.base_model_tp_plan or {}


def _from_style(name: str, style: str) -> Role:
    if style not in _STYLES:
        raise UnsupportedModelError(f"the model's plan gives {name!r} the style {style!r}, for which there is no rule")
    return Role(_STYLES[style], _HEADS.get(name.rpartition(".")[2]))


def find_roles(model: PreTrainedModel) -> dict[str, Role]:
    """Roles of all modules that own parameters, by their name in ``model``.

    Raises:
        UnsupportedModelError: a module that no rule covers, by name.
    """
    architecture = architecture_of(model)
    prefix = f"{model.base_model_prefix}." if hasattr(model, model.base_model_prefix) else ""
    patterns = [(_regex(prefix + pattern), role) for pattern, role in architecture.roles.items()]
    input_embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    roles = {}
    for name, module in model.named_modules():
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        if module is head:
            roles[name] = Role("head")
        elif module is input_embeddings:
            roles[name] = Role("embedding")
        else:
            roles[name] = _planned(name, patterns) or _by_class(name, module, model.config.hidden_size)
        _check_class(name, module, roles[name])
    return roles


def matching_modules(model: PreTrainedModel, pattern: str) -> dict[str, nn.Module]:
    """Modules of the base model whose names match a pattern."""
    prefix = f"{model.base_model_prefix}." if hasattr(model, model.base_model_prefix) else ""
    regex = _regex(prefix + pattern)
    return {name: module for name, module in model.named_modules() if regex.fullmatch(name)}


def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))


def _planned(name: str, patterns: list[tuple[re.Pattern[str], Role]]) -> Role | None:
    return next((role for regex, role in patterns if regex.fullmatch(name)), None)


def _by_class(name: str, module: nn.Module, hidden_size: int) -> Role:
    weight = getattr(module, "weight", None)
    if weight is not None and tuple(weight.shape) == (hidden_size,):
        if isinstance(module, nn.LayerNorm):
            return Role("layer_norm")
        if type(module).__name__.endswith("RMSNorm"):
            return Role("rms_norm")
    own = ", ".join(parameter for parameter, _ in module.named_parameters(recurse=False))
    raise UnsupportedModelError(
        f"no rule covers {name!r} ({type(module).__name__}, parameters: {own}), and nothing is left unsplit "
        "in silence; a rule can be added in cuboid.models.architectures.roles"
    )


_CLASSES: dict[Kind, tuple[type[nn.Module], ...]] = {
    "embedding": (nn.Embedding,),
    "up": (nn.Linear, Conv1D),
    "down": (nn.Linear, Conv1D),
    "head": (nn.Linear,),
}


def _check_class(name: str, module: nn.Module, role: Role) -> None:
    expected = _CLASSES.get(role.kind)
    if expected is not None and type(module) not in expected:
        names = " or ".join(cls.__name__ for cls in expected)
        raise UnsupportedModelError(
            f"{name!r} is a {type(module).__name__}, but the role {role.kind!r} has a rule for {names} only"
        )
    if isinstance(module, nn.Embedding) and (module.max_norm or module.scale_grad_by_freq or module.sparse):
        raise UnsupportedModelError(f"{name!r}: no rule for max_norm, scale_grad_by_freq or sparse embeddings")
