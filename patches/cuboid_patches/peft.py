"""Patches of PEFT, if it is installed."""

from __future__ import annotations

import functools
from typing import Any

from transformers.utils import is_peft_available

from cuboid.models.architectures.refusals import adapters_refused
from cuboid.models.sharded.sharded_model import ShardedModel
from cuboid_patches.base import Patch


def _init(original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(model, ShardedModel):
            raise adapters_refused(f"{type(self).__name__} puts adapters of PEFT around {type(model).__name__}")
        original(self, model, *args, **kwargs)

    return init


_PATCHES = [
    Patch(
        target="peft.peft_model:PeftModel.__init__",
        package="peft",
        reason="say that adapters have no rules before they are put around layers that are split",
        parameters=("model",),
        replace=_init,
    ),
]
PATCHES = _PATCHES if is_peft_available() else []
