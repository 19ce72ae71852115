"""What the planner's commands take of adapters; the options have the names of TRL's scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from cuboid.config.schema import LoraSection

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


def lora_of(
    lora_r: int | None, target_modules: str, *, load_in_4bit: bool, written: LoraSection | None = None
) -> LoraSection | None:
    """The adapter that is trained, by these options or a config's section; None if all of the model is trained.

    Raises:
        BadParameter: an option needs ``--lora-r``, or contradicts the section.
    """
    if lora_r is None:
        alone = {
            "--load-in-4bit": load_in_4bit and written is None,
            "--lora-target-modules": target_modules != ALL_LINEAR,
        }
        for option, is_set in alone.items():
            if is_set:
                raise typer.BadParameter("it is for a frozen model with LoRA; add --lora-r", param_hint=option)
        return written.model_copy(update={"load_in_4bit": True}) if written is not None and load_in_4bit else written
    from cuboid.config.schema import LoraSection

    names = tuple(name for part in target_modules.split(",") if (name := part.strip()))
    if not names:
        raise typer.BadParameter("it names no layer", param_hint="--lora-target-modules")
    named = names[0] if names == (ALL_LINEAR,) else names
    bits = {"load_in_4bit": True} if load_in_4bit else {}
    asked = LoraSection(r=lora_r, target_modules=named, **bits)
    if written not in (None, asked):
        raise typer.BadParameter("the config's lora says otherwise; leave one of the two out", param_hint="--lora-r")
    return asked
