"""How the experts of a mixture lie in memory, read off the module that has them all.

transformers marks such modules with ``use_experts_implementation``, which says of each class whether it has a gate and
biases, and how its weights lie; its kernels go by that, and so do ours. Llama 4's have no mark: every expert is given
all tokens.
"""

from __future__ import annotations

import inspect

from torch import nn

from cuboid.tensor3d.experts.experts import ExpertForm

_FLAGS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated")


def expert_form(module: nn.Module, per_token: int | None = None) -> ExpertForm | None:
    """The form of a module that is all experts of a layer; None if it isn't, or computes something else in between.

    Args:
        module: perhaps such a one.
        per_token: how many experts a token is sent to, if the model's config says so.
    """
    if not all(isinstance(getattr(module, name, None), bool) for name in _FLAGS):
        return _form_of_scaled(module, per_token)
    flags: dict[str, bool] = {name: getattr(module, name) for name in _FLAGS}
    if flags["has_post_expert_norm"]:
        # Of each expert's whole output, which no rank has.
        return None
    gated = flags["has_gate"]
    up, down = "gate_up_proj" if gated else "up_proj", "down_proj"
    form = ExpertForm(
        up=up,
        down=down,
        up_bias=f"{up}_bias" if flags["has_bias"] else None,
        down_bias=f"{down}_bias" if flags["has_bias"] else None,
        in_first=flags["is_transposed"],
        gated=gated,
        parts=2 if gated and flags["is_concatenated"] else 1,
        activation="_apply_gate" if gated else "act_fn",
    )
    return form if _is_of_form(module, form) else None


def _form_of_scaled(module: nn.Module, per_token: int | None) -> ExpertForm | None:
    """Of experts that are given all tokens. Whether their code computes what the form says, the probe finds out."""
    if per_token is None or not hasattr(module, "act_fn") or len(inspect.signature(module.forward).parameters) != 1:
        return None
    form = ExpertForm(
        up="gate_up_proj",
        down="down_proj",
        up_bias=None,
        down_bias=None,
        in_first=True,
        gated=True,
        parts=2,
        activation="gate",
        given_all=per_token,
    )
    return form if _is_of_form(module, form) else None


def _is_of_form(module: nn.Module, form: ExpertForm) -> bool:
    """Whether a module has the parameters of a form, and no others."""
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    if shapes.keys() != {form.up, form.down, *form.biases} or any(len(shapes[n]) != 3 for n in (form.up, form.down)):
        return False
    outputs, inputs = form.out_dim, 3 - form.out_dim
    count, (wide, hidden) = shapes[form.up][0], (shapes[form.up][outputs], shapes[form.up][inputs])
    features = shapes[form.down][inputs]
    expected = {form.up_bias: (count, wide), form.down_bias: (count, hidden)}
    return (
        wide == features * (2 if form.gated else 1)
        and shapes[form.down][0] == count
        and shapes[form.down][outputs] == hidden
        and all(shapes[name] == expected[name] for name in form.biases)
    )
