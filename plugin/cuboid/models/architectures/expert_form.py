"""How the weights of a mixture's experts are stored, read from the module that has all experts of a layer.

transformers marks such modules with ``use_experts_implementation``, which records whether a class has a gate and
biases, and how its weights are stored. Its kernels rely on that, and so do ours. Llama 4's experts have no mark: every
expert is given all tokens.
"""

from __future__ import annotations

import inspect

from torch import nn

from cuboid.tensor3d.experts.sharded_experts import ExpertForm

_FLAGS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated")


def expert_form(module: nn.Module, per_token: int | None = None) -> ExpertForm | None:
    """The form of a module with all experts of a layer; None for other modules, and for experts without a rule.

    Args:
        module: any module.
        per_token: number of experts for each token, if the model's config has it.
    """
    flags = {name: getattr(module, name, None) for name in _FLAGS}
    if all(isinstance(flag, bool) for flag in flags.values()):
        if flags["has_post_expert_norm"]:
            # That norm needs each expert's whole output, which no rank has.
            return None
        gated = bool(flags["has_gate"])
        up, down = "gate_up_proj" if gated else "up_proj", "down_proj"
        form = ExpertForm(
            up=up,
            down=down,
            up_bias=f"{up}_bias" if flags["has_bias"] else None,
            down_bias=f"{down}_bias" if flags["has_bias"] else None,
            in_first=bool(flags["is_transposed"]),
            gated=gated,
            parts=2 if gated and flags["is_concatenated"] else 1,
            activation="_apply_gate" if gated else "act_fn",
        )
    elif per_token is not None and hasattr(module, "act_fn") and len(inspect.signature(module.forward).parameters) == 1:
        # Experts that are given all tokens. The probe finds out whether their code computes that.
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
    else:
        return None
    return form if _is_of_form(module, form) else None


def _is_of_form(module: nn.Module, form: ExpertForm) -> bool:
    """Whether a module has exactly the parameters of a form."""
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
