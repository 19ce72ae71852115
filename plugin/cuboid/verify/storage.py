"""Outcomes on disk, where a worker leaves them for the parent: safetensors files and one of JSON."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from cuboid.distributed.topology import Coordinate, Topology
from cuboid.verify.probe import Outputs, assemble
from cuboid.verify.training import Outcome, Tensors

_TENSORS = ("activations", "logits", "moments")
#: Folder of the checkpoint that a side's model writes of itself.
SAVED = "saved"


def write(outcome: Outcome, directory: Path) -> None:
    """Write an outcome, but for the weights, which the model has saved by itself.

    Activations that are whole go with it; parts go through :func:`write_part`.
    """
    tensors: dict[str, Tensors] = {kind: getattr(outcome, kind) for kind in _TENSORS}
    tensors |= {f"gradients-{step}": gradients for step, gradients in enumerate(outcome.gradients)}
    for kind, named in tensors.items():
        _save(named, directory / f"{kind}.safetensors")
    order = {kind: list(named) for kind, named in tensors.items()}  # the format sorts by name
    scalars = {"losses": outcome.losses, "norms": outcome.norms, "dropout": outcome.dropout, "order": order}
    (directory / "outcome.json").write_text(json.dumps(scalars), encoding="utf-8")


def write_part(outputs: Outputs, directory: Path, rank: int) -> None:
    """Write one rank's part of the activations."""
    calls = {f"{call}:{name}": x for name, parts in outputs.items() for call, x in enumerate(parts)}
    _save(calls, directory / f"part-{rank}.safetensors")


def read(directory: Path) -> Outcome:
    """Read what :func:`write` wrote, and the weights as the model saved them."""
    scalars = json.loads((directory / "outcome.json").read_text(encoding="utf-8"))
    ordered: dict[str, Tensors] = {}
    for kind, names in scalars["order"].items():
        tensors = load_file(directory / f"{kind}.safetensors")
        ordered[kind] = {name: tensors[name] for name in names}
    gradients = [named for kind, named in ordered.items() if kind not in _TENSORS]
    files = sorted((directory / SAVED).glob("*.safetensors"))
    weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
    whole = {kind: ordered[kind] for kind in _TENSORS}
    dropout = {name: (alike, chance) for name, (alike, chance) in scalars["dropout"].items()}
    return Outcome(scalars["losses"], scalars["norms"], gradients=gradients, weights=weights, dropout=dropout, **whole)


def read_parts(directory: Path, topology: Topology, length: int) -> Tensors:
    """Put together the activations ``[B, S, H]`` of the first replica, from the parts of its ranks, stage by stage."""
    whole: Tensors = {}
    for stage in range(topology.pipe):
        ranks = [rank for rank in range(topology.world_size) if _is_at(topology.coordinate(rank), stage)]
        parts = [load_file(directory / f"part-{rank}.safetensors") for rank in ranks]
        at = [topology.coordinate(rank) for rank in ranks]
        calls: dict[str, dict[int, torch.Tensor]] = {}
        for key in parts[0]:
            call, _, name = key.partition(":")
            calls.setdefault(name, {})[int(call)] = assemble([part[key] for part in parts], at, topology.shape)
        for name, segments in calls.items():
            whole[name] = torch.cat([segments[call] for call in sorted(segments)], dim=1)[:, :length]
    return whole


def _is_at(coordinate: Coordinate, stage: int) -> bool:
    return coordinate.data == 0 and coordinate.pipe == stage


def _save(tensors: Tensors, path: Path) -> None:
    # Tied tensors share their storage, which the format refuses.
    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, path)
