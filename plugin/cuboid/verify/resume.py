"""Does a checkpoint of training continue the run that wrote it? On the same layout, in the engine that wrote it.

A checkpoint is written after the plan's steps, one more step is made, and the checkpoint is loaded again. Then all that
the engine holds has to be what it was when it was written, each rank's own random states included, and the step made
again has to end where it ended before. The files are compared too, since writing and reading could mix up names alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from cuboid.checkpoint.rng_state import capture
from cuboid.checkpoint.save_plan import OPTIMIZER
from cuboid.distributed.mesh import Mesh
from cuboid.integrations.deepspeed.optimizer_state import adapt_optimizer
from cuboid.verify.own_checks import worst_of_ranks
from cuboid.verify.training import MOMENT, Tensors
from cuboid.weights.state_dict_map import stored_names

#: The checkpoint's name.
_TAG = "verified"
#: How far apart the step made twice may end, if a device may add in another order.
_AGAIN = 1e-5


def check_resume(
    engine: Any, step: Callable[[], float], folder: Path, mesh: Mesh, weights: Path, moments: Tensors
) -> dict[str, tuple[float, float]]:
    """Write a checkpoint, make a step, load the checkpoint and make the step again. Collective.

    Args:
        engine: whose state is that of the plan's end.
        step: makes one more step and returns its loss, the same each time.
        folder: of checkpoints.
        mesh: the engine's.
        weights: the model, saved at the plan's end.
        moments: Adam's first moments at the plan's end, whole, on rank 0.

    Returns:
        What was compared, with the error and the largest that passes.
    """
    device = next(engine.module.parameters()).device
    # Other states on every rank, so that another rank's would be noticed.
    _seed(1 + mesh.rank)
    engine.save_checkpoint(str(folder), tag=_TAG)
    written, drawn = _state(engine), capture(device)
    _seed(0)  # the ranks of a mesh agree on random numbers in a step
    first = step()
    largest = 0.0 if torch.are_deterministic_algorithms_enabled() else _AGAIN
    uninterrupted = _state(engine)
    engine.load_checkpoint(str(folder), tag=_TAG)
    errors = {name: (error, 0.0) for name, error in _differences(written, _state(engine)).items()}
    errors["random states"] = (0.0 if _is_same(drawn, capture(device)) else 1.0, 0.0)
    _seed(0)
    again = step()
    errors["loss of the next step"] = (abs(again - first) / max(abs(first), 1e-30), largest)
    apart = _differences(uninterrupted, _state(engine))
    errors |= {f"{name} after the next step": (error, largest) for name, error in apart.items()}
    if mesh.rank == 0:
        errors |= _compare_files(folder / _TAG, weights, moments)
    return worst_of_ranks(errors)


def _seed(number: int) -> None:
    """All generators that a rank may draw from, past their first numbers."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    random.random(), np.random.random(), torch.rand(1)


def _state(engine: Any) -> dict[str, Tensors]:
    """Copies of this rank's weights and optimizer state, by kind and parameter."""
    weights = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    state = adapt_optimizer(engine.optimizer, stored_names(engine.module)).state()
    tensors = {"weights": weights}
    for kind, runs in state.quantities.items():
        tensors[kind] = {name: run.values.detach().clone() for name, run in runs.items()}
    for name, numbers in state.numbers.items():
        for kind, value in numbers.items():
            tensors.setdefault(kind, {})[name] = torch.as_tensor(value).detach().clone()
    rates = {str(number): torch.tensor(group["lr"]) for number, group in enumerate(engine.optimizer.param_groups)}
    return {**tensors, "learning rates": rates, "steps": {"": torch.tensor(engine.global_steps)}}


def _differences(before: dict[str, Tensors], after: dict[str, Tensors]) -> dict[str, float]:
    """The largest relative difference of each kind; 1 or more if something is missing."""
    differences = {}
    for kind in {**before, **after}:
        names = {**before.get(kind, {}), **after.get(kind, {})}
        pairs = [(before.get(kind, {}).get(name), after.get(kind, {}).get(name)) for name in names]
        differences[kind] = max((_apart(one, other) for one, other in pairs), default=0.0)
    return differences


def _apart(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    if one is None or other is None or one.shape != other.shape:
        return 1.0
    one, other = one.double(), other.double()
    if torch.equal(one, other):
        return 0.0
    return float((one - other).abs().max() / one.abs().max().clamp(min=1e-30))


def _is_same(one: Any, other: Any) -> bool:
    """Whether two random states are equal, part by part."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[name], other[name]) for name in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return bool(np.array_equal(one, other))


def _compare_files(folder: Path, weights: Path, moments: Tensors) -> dict[str, tuple[float, float]]:
    """The checkpoint's tensors beside those that the model and its optimizer gave before."""
    saved = {"weights": _read(folder), MOMENT: _read(folder / OPTIMIZER / MOMENT)}
    expected = {"weights": _read(weights), MOMENT: {name: x.cpu() for name, x in moments.items()}}
    for kind, tensors in expected.items():
        # Of tensors that are tied, a file may have one.
        for name in tensors.keys() - saved[kind].keys():
            alike = (
                x for x in saved[kind].values() if x.shape == tensors[name].shape and torch.equal(x, tensors[name])
            )
            saved[kind][name] = next(alike, torch.zeros(0))
    return {f"{kind} in the file": (error, 0.0) for kind, error in _differences(expected, saved).items()}


def _read(folder: Path) -> Tensors:
    return {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(file).items()}
