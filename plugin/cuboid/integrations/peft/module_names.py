"""A model's modules by name, those of other stages too, as an adapter's config asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peft.utils import ModulesToSaveWrapper
from torch import nn

from cuboid.models.stages.placeholders import PlaceholderBranch, PlaceholderModule
from cuboid.models.stages.stage_model import StageModel


def names_ending(model: Any, ends: Sequence[str]) -> list[str]:
    """Names of the model's modules with one of these ends, as PEFT looks for them, but not those that it has made."""
    if isinstance(model, StageModel):
        names = names_of_all_stages(model)
    else:
        names = [name for name, module in model.named_modules() if not isinstance(module, ModulesToSaveWrapper)]
    return [
        name
        for name in names
        if any(name.endswith(key) for key in ends)
        and ".modules_to_save." not in name
        and ".original_module" not in name
    ]


def names_of_all_stages(model: Any) -> list[str]:
    """Names of the modules of all stages, of which a stage has others' as placeholders, or not at all."""
    # Tied parameters are counted under one of their names.
    parameters = [*model.cuboid.whole_model.parameters, *model.staging.plan.outline.tied]
    owners = {name.rpartition(".")[0] for name in parameters}
    return sorted({".".join(owner.split(".")[:end]) for owner in owners for end in range(1, owner.count(".") + 2)})


def module_here(model: Any, name: str) -> nn.Module | None:
    """A module of this stage; None if only others have it."""
    try:
        module: nn.Module = model.get_submodule(name)
    except AttributeError:
        return None
    return module


def head_of(model: Any) -> nn.Module | None:
    """The model's own head, as it is in its modules."""
    try:
        head: nn.Module | None = model.cuboid.base.get_output_embeddings(model)
    except AttributeError:
        # The module that contains it is a placeholder on this stage.
        return None
    return head


def tied_modules(model: Any) -> dict[str, str]:
    """Names of modules with a tied weight, and of another one that has it."""
    ties = model.staging.plan.outline.tied if isinstance(model, StageModel) else model.all_tied_weights_keys
    modules = {name.rpartition(".")[0]: other.rpartition(".")[0] for name, other in ties.items()}
    return {**{other: name for name, other in modules.items()}, **modules}


def absent_modules(model: Any) -> frozenset[str]:
    """Names of modules that are another stage's to adapt.

    They are placeholders, or what the last stage keeps of the first one for a tied weight.
    """
    names = {
        name for name, module in model.named_modules() if isinstance(module, PlaceholderModule | PlaceholderBranch)
    }
    if not isinstance(model, StageModel):
        return frozenset()
    outline = model.staging.plan.outline
    if not any(cut.is_first for cut in model.staging.plan.cuts):
        sources = {name.rpartition(".")[0] for name in outline.tied.values()}
        names |= {name for name in sources if any(f"{name}.".startswith(f"{unit}.") for unit in outline.before)}
    return frozenset(names)
