"""Store outcomes on disk, as safetensors files and JSON, to pass them from the workers to the parent process."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from cuboid.distributed.topology import Topology
from cuboid.verify.probe import Outputs, assemble
from cuboid.verify.training import RunOutcome, Tensors

_TENSORS = ("activations", "logits", "moments")
#: Subfolder in which a side's model is saved as a checkpoint, which has the weights after training.
SAVED = "saved"


def write(outcome: RunOutcome, directory: Path) -> None:
    """Write an outcome except for the weights, which the model saves as a checkpoint.

    Full activations are part of it; a rank's part of them is written by :func:`write_part`.
    """
    tensors: dict[str, Tensors] = {kind: getattr(outcome, kind) for kind in _TENSORS}
    tensors |= {f"gradients-{step}": gradients for step, gradients in enumerate(outcome.gradients)}
    for kind, named in tensors.items():
        _save(named, directory / f"{kind}.safetensors")
    order = {kind: list(named) for kind, named in tensors.items()}  # the format sorts by name
    scalars = {"losses": outcome.losses, "norms": outcome.norms, "own": outcome.own_checks, "order": order}
    (directory / "outcome.json").write_text(json.dumps(scalars), encoding="utf-8")


def write_part(outputs: Outputs, directory: Path, rank: int) -> None:
    """Write one rank's part of the activations."""
    calls = {f"{call}:{name}": x for name, parts in outputs.items() for call, x in enumerate(parts)}
    _save(calls, directory / f"part-{rank}.safetensors")


def read(directory: Path) -> RunOutcome:
    """Read what :func:`write` wrote, and the weights that the model saved."""
    scalars = json.loads((directory / "outcome.json").read_text(encoding="utf-8"))
    ordered: dict[str, Tensors] = {}
    for kind, names in scalars["order"].items():
        tensors = load_file(directory / f"{kind}.safetensors")
        ordered[kind] = {name: tensors[name] for name in names}
    gradients = [named for kind, named in ordered.items() if kind not in _TENSORS]
    files = sorted((directory / SAVED).glob("*.safetensors"))
    weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
    tensors_by_kind = {kind: ordered[kind] for kind in _TENSORS}
    own_checks = {kind: {name: tuple(pair) for name, pair in errors.items()} for kind, errors in scalars["own"].items()}
    return RunOutcome(
        scalars["losses"],
        scalars["norms"],
        gradients=gradients,
        weights=weights,
        own_checks=own_checks,
        **tensors_by_kind,
    )


def read_parts(directory: Path, topology: Topology, length: int) -> Tensors:
    """Assemble the activations ``[B, S, H]`` of the first replica from the parts of its ranks, stage by stage."""
    activations: Tensors = {}
    coordinates = {rank: topology.coordinate(rank) for rank in range(topology.world_size)}
    for stage in range(topology.pipe):
        ranks = [rank for rank, at in coordinates.items() if at.data == 0 and at.pipe == stage]
        parts = [load_file(directory / f"part-{rank}.safetensors") for rank in ranks]
        at = [coordinates[rank] for rank in ranks]
        calls: dict[str, dict[int, torch.Tensor]] = {}
        for key in parts[0]:
            call, _, name = key.partition(":")
            calls.setdefault(name, {})[int(call)] = assemble([part[key] for part in parts], at, topology.shape)
        for name, segments in calls.items():
            activations[name] = torch.cat([segments[call] for call in sorted(segments)], dim=1)[:, :length]
    return activations


def _save(tensors: Tensors, path: Path) -> None:
    # Cloned, because tied tensors share their storage, which the library rejects.
    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, path)
