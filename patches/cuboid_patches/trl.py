"""Patches of TRL, if it is installed."""

from __future__ import annotations

import functools
from typing import Any

from cuboid_patches.base import Patch
from cuboid_patches.transformers import counted_in_replicas


def _post_init(original: Any) -> Any:
    @functools.wraps(original)
    def post_init(self: Any) -> None:
        # Prompts of a generation are counted by processes here.
        with counted_in_replicas():
            original(self)

    return post_init


PATCHES = [
    Patch(
        target=f"trl.trainer.{module}:{name}.__post_init__",
        package="trl",
        reason="count the prompts and completions of a step by replicas, since several ranks generate the same ones",
        parameters=("self",),
        replace=_post_init,
    )
    for module, name in (("grpo_config", "GRPOConfig"), ("rloo_config", "RLOOConfig"))
]
