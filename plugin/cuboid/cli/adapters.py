"""What the planner's commands take of adapters; the options have the names of TRL's scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from cuboid.planner.description.trunk import Trunk

LoraR = Annotated[
    int | None,
    typer.Option(
        "--lora-r", help="Train LoRA of this rank, and freeze the model: r of PEFT's LoraConfig.", min=1, max=1 << 16
    ),
]
LoraTargetModules = Annotated[
    str,
    typer.Option(
        "--lora-target-modules", help="With --lora-r: PEFT's target_modules, names of linear layers joined by commas."
    ),
]
LoadIn4bit = Annotated[
    bool, typer.Option("--load-in-4bit", help="With --lora-r: keep the frozen layers in bitsandbytes' 4 bits (QLoRA).")
]
ALL_LINEAR = "all-linear"


def trunk_of(lora_r: int | None, target_modules: str, *, load_in_4bit: bool) -> Trunk | None:
    """How a model is trained, by these options; None if all of it is.

    Raises:
        BadParameter: an option needs ``--lora-r``.
        ImportError: PEFT is missing, or its version isn't supported.
    """
    if lora_r is None:
        alone = {"--load-in-4bit": load_in_4bit, "--lora-target-modules": target_modules != ALL_LINEAR}
        for option, is_set in alone.items():
            if is_set:
                raise typer.BadParameter("it is for a frozen model with LoRA; add --lora-r", param_hint=option)
        return None
    names = tuple(name for part in target_modules.split(",") if (name := part.strip()))
    if not names:
        raise typer.BadParameter("it names no layer", param_hint="--lora-target-modules")
    from cuboid.integrations.peft.planned_lora import PlannedLora
    from cuboid.planner.description.trunk import Trunk

    return Trunk(PlannedLora(lora_r, names[0] if names == (ALL_LINEAR,) else names), load_in_4bit)
