"""What Cuboid changes in transformers."""

from __future__ import annotations

import functools
from typing import Any

from transformers.integrations.deepspeed import deepspeed_config
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from cuboid.config import CuboidConfig, split_config
from cuboid.hf.api import active_config
from cuboid.hf.attention import IMPLEMENTATIONS, attention_twin, mask_twin
from cuboid.hf.load import load_sharded
from cuboid.patches.base import Patch, Registration


def _from_pretrained(original: Any) -> Any:
    @functools.wraps(original.__func__)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        active = active_config() or _config_kept_alive()
        if active is None:
            return original.__func__(cls, *args, **kwargs)
        return load_sharded(cls, original.__func__, active, args, kwargs)

    return classmethod(from_pretrained)


def _config_kept_alive() -> CuboidConfig | None:
    """Cuboid's part of the ``HfDeepSpeedConfig`` that is alive, if any."""
    source = deepspeed_config()
    return None if source is None else split_config(source)[0]


PATCHES: list[Patch | Registration] = [
    Patch(
        target="transformers.modeling_utils:PreTrainedModel.from_pretrained",
        package="transformers",
        versions=">=5.23,<5.24",
        reason="read only this rank's slices when a config of ours is active",
        parameters=("pretrained_model_name_or_path", "config", "kwargs"),
        replace=_from_pretrained,
    ),
    Registration(AttentionInterface, {f"cuboid_{name}": attention_twin(name) for name in IMPLEMENTATIONS}),
    Registration(AttentionMaskInterface, {f"cuboid_{name}": mask_twin(name) for name in IMPLEMENTATIONS}),
]
