"""A mistake that can be put into the processes of a verification, and ways to make one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import nn

from cuboid.verify import SmallModel, sharded
from cuboid.verify.compare import ComparedKind
from cuboid.verify.report import Pass

Mutate = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Layout:
    """Where a model runs: a mesh, or stages, or both; so many replicas of it."""

    mesh: str | None = None
    stages: int = 0
    replicas: int = 1
    weight_gather: str = "layer"
    gradient_sync: str = "unit"
    schedule: str = "seq1f1b"

    @property
    def config(self) -> dict[str, Any]:
        """Sections of a config."""
        config: dict[str, Any] = {"zero_optimization": {"stage": 1}}
        if self.mesh is not None:
            axes = dict(zip(("batch", "sequence", "hidden"), map(int, self.mesh.split("x")), strict=True))
            options = {"weight_gather": self.weight_gather, "gradient_sync": self.gradient_sync}
            config["tensor_parallel"] = {"mode": "3d_tensor", "mesh": axes, **options}
        if self.stages:
            config["pipeline"] = {"engine": "seq1f1b", "stages": self.stages, "segments": 3, "schedule": self.schedule}
        return config


HIDDEN, SEQUENCE, BATCH = Layout("1x1x2"), Layout("1x2x1"), Layout("2x1x1")
STAGES, SEGMENTS = Layout(stages=2), Layout(stages=1)
LLAMA = SmallModel("llama", kv_heads=4)
ROUTERS = SmallModel("mixtral", router_loss=0.5)


@dataclass(frozen=True)
class Mutation:
    """A mistake.

    Args:
        name: what is wrong.
        mutate: puts it into this process for as long as the context lasts.
        layout, small: where it can show at all.
        found_by: the kinds of checks of which one must find it.
        name_of_pass: the pass that is to find it.
        dtype: of the core pass.
        published: which kind of bug that others shipped it is an example of, by its number in
            :data:`mutations.reported.PUBLISHED`.
        stops_with: what the error says that ends the training itself, before anything is compared; "" if nothing does.
    """

    name: str
    mutate: Mutate
    layout: Layout
    small: SmallModel = LLAMA
    found_by: tuple[ComparedKind, ...] = ("gradient",)
    name_of_pass: Pass = "core"
    dtype: str = "float64"
    published: int | None = None
    stops_with: str = ""


def around(owner: Any, name: str, wrap: Callable[..., Any]) -> Mutate:
    """Replace a function by ``wrap``, which is given the original before the arguments."""

    def mutate() -> AbstractContextManager[Any]:
        original = getattr(owner, name)

        def replacement(*args: Any, **kwargs: Any) -> Any:
            return wrap(original, *args, **kwargs)

        return mock.patch.object(owner, name, replacement)

    return mutate


def instead(owner: Any, name: str, value: Any) -> Mutate:
    """Replace something."""
    return lambda: mock.patch.object(owner, name, value)


def after_loading(change: Callable[[Any], None]) -> Mutate:
    """Change the model on shards as soon as it is there."""

    def load(original: Any, *args: Any) -> Any:
        model = original(*args)
        change(model)
        return model

    return around(sharded, "_load", load)


def found(model: nn.Module, ending: str) -> list[nn.Parameter]:
    """Parameters of this rank whose names end so."""
    return [parameter for name, parameter in model.named_parameters() if name.endswith(ending)]


def rank() -> int:
    """Of this process."""
    return dist.get_rank()
