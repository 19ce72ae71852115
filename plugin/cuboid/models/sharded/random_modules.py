"""Makes the modules whose own code draws random numbers do so with seeds that fit a mesh."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from cuboid.distributed.mesh import Mesh
from cuboid.distributed.no_compile import uncompiled
from cuboid.errors import UnsupportedModelError
from cuboid.models.architectures.roles import layer_names, planned_parts
from cuboid.models.batch.generator_check import Library
from cuboid.models.sharded.customizations import carry_over
from cuboid.models.sharded.parallel_plan import ParallelPlan
from cuboid.models.sharded.random_code import libraries_drawn_from
from cuboid.tensor3d.compiled.forms import UNDRAWN
from cuboid.tensor3d.layers.dropout import CommonDropout, MaybeWhole, MeshDropout, ShardedDropout, running_generators
from cuboid.tensor3d.layers.random_draws import Holding, Place, RandomDraws

_HOST: tuple[Library, ...] = ("numpy", "random")


class ModelDraws(RandomDraws):
    """What a sharded model's own code draws.

    Attributes:
        libraries: whose generators it draws from.
        has_modules: whether some modules draw in code of their own.
    """

    libraries: frozenset[Library] = frozenset({"torch"})
    has_modules = False


def seed_random_modules(
    model: PreTrainedModel, parallel_plan: ParallelPlan, mesh: Mesh, late: MaybeWhole | None
) -> ModelDraws:
    """Replace dropouts, and change, in place, the classes of modules whose own code draws.

    Args:
        model: a model, or a stage's part, whose other modules are sharded.
        parallel_plan: how they are.
        mesh: this rank's mesh.
        late: what splits activations at the first layer, if the embedding doesn't.
    """
    config = model.config if hasattr(model.config, "hidden_size") else planned_parts(model.config)[0]
    width = getattr(config, "hidden_size", 0) // mesh.size("hidden")
    draws = ModelDraws(mesh, width)
    if mesh.shape.size == 1:
        return draws
    roles, verdict, layers = parallel_plan.roles, parallel_plan.verdict, layer_names(model)
    lists = {name.rpartition(".")[0].rpartition(".")[0] for name in layers}
    blocks = [name for name, role in roles.items() if role.kind == "whole"]
    base = f"{model.base_model_prefix}." if model.base_model is not model else ""
    by_class: dict[type[nn.Module], frozenset[Library]] = {}
    for name, module in list(model.named_modules()):
        cls = type(module)
        if isinstance(module, MeshDropout):
            continue
        is_in_layer = any(name == layer or name.startswith(f"{layer}.") for layer in layers)
        block = next((block for block in blocks if not block or f"{name}.".startswith(f"{block}.")), None)
        holding: Holding = "parts"
        if block is not None:
            holding = "all" if roles[block].everywhere else "rows"
        elif name in roles and roles[name].kind == "router":
            holding = "tokens"
        elif verdict.head == "whole" and not f"{name}.".startswith(base):
            holding = "all"
        elif verdict.inputs == "pixels" and not is_in_layer:
            # All ranks of sequence × hidden have the same images whole.
            holding = "rows"
        place = Place(name, cls.__name__, holding, None if is_in_layer else late, name in lists)
        if cls is nn.Dropout and name and block is None:
            new = _dropout(module, place, mesh)
            carry_over(module, new)
            model.set_submodule(name, new.train(module.training))
            continue
        if cls not in by_class:
            by_class[cls] = libraries_drawn_from(cls)
        libraries = by_class[cls]
        draws.libraries |= libraries
        if libraries:
            draws.has_modules = True
            vars(module).update(cuboid_draws=(draws, place, tuple(x for x in _HOST if x in libraries)))
            module.__class__ = _drawing(cls, from_host=not libraries.isdisjoint(_HOST))  # type: ignore[arg-type]
    return draws


def _dropout(module: Any, place: Place, mesh: Mesh) -> nn.Module:
    if place.holding == "all":
        return CommonDropout(module.p, mesh)
    if place.holding == "rows":
        return ShardedDropout(module.p, mesh, ("batch",))
    return ShardedDropout(module.p, mesh, late=place.late)


@functools.cache
def _drawing(cls: Any, *, from_host: bool) -> type[nn.Module]:
    # `wraps` keeps the signature, from which other code reads which arguments a layer takes.
    @functools.wraps(cls.forward)
    @uncompiled
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return cls.forward(self, *args, **kwargs)
        draws, place, libraries = self.cuboid_draws
        with draws.inside(place), _drawing_from_host(place, libraries):
            return cls.forward(self, *args, **kwargs)

    members = {"forward": forward, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    if not from_host:
        members[UNDRAWN] = cls
    return type(cls.__name__, (cls,), members)


@contextmanager
def _drawing_from_host(place: Place, libraries: tuple[Library, ...]) -> Iterator[None]:
    """In the ``with`` block, numpy and Python draw the same on all ranks. Each of their calls can't be seen.

    Raises:
        UnsupportedModelError: code that doesn't only decide which layers run has drawn from them; on all ranks.
    """
    if not libraries:
        yield
        return
    before = _host_states()
    generators = running_generators()
    number = None if generators is None or not place.runs_layers else generators.number_if_differing()
    if number is not None:
        random.seed(number)
        np.random.seed(number % 2**32)
    try:
        yield
    finally:
        has_drawn = _host_states() != before
        if number is not None:
            _restore_host(before)
            # The next forward must get another number.
            random.random()
            np.random.random()
    if has_drawn and not place.runs_layers:
        raise UnsupportedModelError(
            f"{place.cls} ({place.name or 'the model'}) draws from the generator of {' or '.join(libraries)} in "
            "training, and there is no rule for which ranks of a mesh must draw the same; set the probability in its "
            "config that switches this on to 0"
        )


def _host_states() -> tuple[Any, ...]:
    kind, key, *rest = np.random.get_state(legacy=True)
    return random.getstate(), (kind, np.asarray(key).tobytes(), *rest)


def _restore_host(states: tuple[Any, ...]) -> None:
    python_state, (kind, key, *rest) = states
    random.setstate(python_state)
    np.random.set_state((kind, np.frombuffer(key, np.uint32), *rest))
