"""An adapter's ``modules_to_save``: modules that it trains whole, of which it has a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from cuboid.errors import UnsupportedModelError
from cuboid.integrations.peft.module_names import absent_modules, head_of, module_here, names_ending, tied_modules
from cuboid.integrations.peft.seeding import is_loading
from cuboid.models.architectures.norm_formula import may_normalize
from cuboid.models.plain_construction import plain_construction
from cuboid.models.sharded.sharded_model import plain_class
from cuboid.models.stages.stage_model import StageModel
from cuboid.tensor3d.layers.whole_block import KeptWhole


def check_trained_whole(model: Any, names: Sequence[str] | None) -> None:
    """Check the modules that an adapter trains whole: ``modules_to_save``, ends of names.

    Raises:
        UnsupportedModelError: names one that has no rule.
    """
    if not names:
        return
    all_modules: Any = model
    if isinstance(model, StageModel):
        # Each stage checks all modules, so that all raise the same error; others' are placeholders here.
        with plain_construction(), torch.device("meta"):
            all_modules = plain_class(type(model))(model.config)
    is_compiled = model.cuboid.state.compiled is not None
    for name in names_ending(model, names):
        module = all_modules.get_submodule(name)
        if _is_trained_whole(model, all_modules, name, module) and not (is_compiled and may_normalize(module)):
            continue
        raise UnsupportedModelError(
            f"modules_to_save={names}: {name} ({type(module).__name__}) has no rule on a mesh or in a pipeline; of a "
            "model's modules, embeddings, the head, and norms outside of compiled layers and of blocks computed whole "
            "are trained whole; name linear layers in target_modules"
        )


def _is_trained_whole(model: Any, all_modules: Any, name: str, module: Any) -> bool:
    """Whether an adapter may train its own copy of a module.

    Args:
        model: sharded.
        all_modules: the same model, or for a stage the plain one, which has the other stages' modules too.
        name, module: of it.
    """
    outline = model.staging.plan.outline if isinstance(model, StageModel) else None
    is_outside = outline.runs_own_head and name in outline.head if outline else module is not model.base_model
    if is_outside and not name.startswith(f"{model.base_model_prefix}."):
        return True
    if module is (all_modules.get_output_embeddings() if outline else head_of(model)):
        return True
    # A block that is computed whole gathers the parameters that it had when it was made.
    is_in_block = isinstance(module_here(model, name), KeptWhole)
    return not is_in_block and (isinstance(module, nn.Embedding) or may_normalize(module))


def saved_here(model: Any, names: Sequence[str] | None) -> Any:
    """``modules_to_save`` for this stage: by their whole names, those that aren't another stage's to train."""
    if not isinstance(model, StageModel) or not names:
        return names
    absent = absent_modules(model)
    return [
        name for name in names_ending(model, names) if name not in absent and module_here(model, name) is not None
    ] or None


def check_unloaded(tuner: Any, model: Any) -> None:
    """Check that modules that an adapter has trained whole may replace the model's own.

    Raises:
        UnsupportedModelError: they have a weight that is tied.
    """
    for config in tuner.peft_config.values():
        for name, other in tied_modules(model).items():
            if any(name.endswith(key) for key in getattr(config, "modules_to_save", None) or ()):
                raise UnsupportedModelError(
                    f"modules_to_save={config.modules_to_save}: {name} shares its weight with {other} "
                    "(config.tie_word_embeddings), and its copy can't replace it; keep the adapter beside the model, "
                    "or train it on a checkpoint that was saved with tie_word_embeddings=False"
                )


def leave_copies(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A hook before PEFT's files are loaded, of a module whose copy another stage trains.

    Files have the copy under the module's own name, and the last stage has the table that its head is tied to.
    """
    for name in module._parameters if is_loading.get() else ():
        state.pop(f"{prefix}{name}", None)
