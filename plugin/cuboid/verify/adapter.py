"""The adapter that a plan puts on its model, the same on both sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cuboid.checkpoint.format.tensor_file import TensorFile
from cuboid.errors import CheckpointError, CuboidError
from cuboid.verify.plan import Plan


def check_adapter(plan: Plan) -> None:
    """Check the plan's adapter, if it has one, before PEFT reads it.

    Raises:
        CuboidError: names the file.
    """
    if plan.adapter is not None:
        # PEFT takes seconds to import, and isn't needed without an adapter.
        from cuboid.integrations.peft.adapter_check import check_adapter_folder

        check_adapter_folder(Path(plan.adapter))


def with_adapter(model: Any, plan: Plan) -> Any:
    """PEFT's model around a plan's, whose adapter is trained; the model itself if the plan has none.

    Raises:
        CheckpointError: the adapter doesn't fit the model; names its folder.
    """
    if plan.adapter is None:
        return model
    from peft import PeftModel

    try:
        # In the model's own precision, as its frozen weights are.
        return PeftModel.from_pretrained(model, plan.adapter, is_trainable=True, autocast_adapter_dtype=False)
    except CuboidError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{plan.adapter}: doesn't fit {type(model).__name__} of {plan.checkpoint}: {type(error).__name__}: {error}"
        ) from error


def check_complete(adapted: Any, plan: Plan) -> None:
    """Check that a whole model with the plan's adapter has each tensor of its file, and no other.

    PEFT warns of those that are missing, and ignores those that it doesn't know.

    Raises:
        CheckpointError: names the file and the first tensor that differs.
    """
    if plan.adapter is None:
        return
    from peft import get_peft_model_state_dict
    from peft.utils import SAFETENSORS_WEIGHTS_NAME

    made = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    with TensorFile(Path(plan.adapter, SAFETENSORS_WEIGHTS_NAME)) as file:
        for name in [*made, *file.specs]:
            if name not in file.specs:
                raise CheckpointError(f"{file.path}: has no {name}, which {type(adapted).__name__} makes of its config")
            if name not in made:
                raise CheckpointError(f"{file.path}: has {name}, but the config beside it makes no such tensor")
