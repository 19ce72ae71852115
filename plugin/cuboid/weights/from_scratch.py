"""Models with new weights, of which each rank makes its own slices: the same ones for a seed on every mesh.

A model is initialized in units: each decoder layer is one, and so is whatever is beside the layers. For each unit that
it has a part of, a rank initializes the whole unit with the architecture's own ``_init_weights``, and keeps its slices.
So it never holds more than its slices and one unit. The seed of a unit is derived from one draw of the common generator
and the unit's name, so it doesn't depend on the mesh, the stages, or the units that other ranks make.

The weights therefore differ from those of plain transformers with the same seed, which draws all of them in sequence.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from cuboid.config.schema import CuboidConfig
from cuboid.distributed.mesh import WeightSeed
from cuboid.failures.rank_agreement import run_on_all_ranks
from cuboid.models.architectures.refusals import check_unquantized
from cuboid.models.kinds.registry import check_class
from cuboid.models.plain_construction import plain_construction
from cuboid.weights.load import loading_class
from cuboid.weights.new_weights import constructing, initialized, put_value, tensors_of, units_of
from cuboid.weights.resolve import resolve


def make_sharded(
    cls: type[PreTrainedModel], from_config: Any, config: CuboidConfig, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> PreTrainedModel:
    """``cls._from_config(*args, **kwargs)``, sharded and split into pipeline stages as ``config`` says.

    All ranks must have the same state of torch's CPU generator, from which each draws one number. The mesh compares
    these when it connects the ranks, before anything is trained or saved.

    Args:
        cls: the architecture's class.
        from_config: transformers' original function (unbound), because the patched one calls this.
        config: Cuboid's config.
        args, kwargs: of the function: the model's config, and options such as ``dtype``.

    Raises:
        MeshError, UnsupportedModelError, ConfigError: before any weight is made.
    """
    check_class(cls, stages=config.pipeline is not None)
    for model_config in (one for one in (*args, *kwargs.values()) if isinstance(one, PretrainedConfig)):
        check_unquantized(model_config, f"the config given to {cls.__name__}.from_config")
    return run_on_all_ranks(
        lambda: _make_sharded(cls, from_config, config, args, kwargs), what=f"{cls.__name__}.from_config"
    )


def _make_sharded(
    cls: type[PreTrainedModel], from_config: Any, config: CuboidConfig, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> PreTrainedModel:
    with plain_construction(), torch.device("meta"):
        whole_model: PreTrainedModel = from_config(cls, *copy.deepcopy(args), **copy.deepcopy(kwargs))
        loading = loading_class(cls, lambda whole_model: resolve(whole_model, config, cls), marks=False)
        # The config is copied here, too: the user may change theirs, and make other models from it.
        model: Any = from_config(loading, *copy.deepcopy(args), **copy.deepcopy(kwargs))
    seed = int(torch.randint(2**62, (), device="cpu"))
    construct = constructing(lambda: from_config(cls, *copy.deepcopy(args), **copy.deepcopy(kwargs)), seed)
    # Compared once there is a process group; there may be none yet.
    model.cuboid_part.plan.mesh.weight_seed = WeightSeed(seed, torch.initial_seed())
    # By the name of the parameter that others are tied to, since a stage may have only one of the others.
    ties = dict(model.all_tied_weights_keys) | dict(whole_model.all_tied_weights_keys)
    places: dict[str, list[str]] = {}
    for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        places.setdefault(ties.get(name, name), []).append(name)
    for name, unit, recurse in units_of(whole_model):
        if places.keys() & {key for key, _ in tensors_of(unit, name, recurse=recurse)}:
            made = initialized(whole_model, name, unit, seed, recurse=recurse, construct=construct)
            for source in places.keys() & made.keys():
                put_value(model, places[source], made[source])
    model.tie_weights()
    model.finish_loading()
    finished: PreTrainedModel = model
    return finished
