"""Outcomes on disk, where a worker leaves them for the parent: safetensors files and one of JSON."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from cuboid.topology import Coordinate, Topology
from cuboid.verify.probe import Outputs, assemble
from cuboid.verify.training import Outcome, Tensors

_TENSORS = ("activations", "logits", "gradients", "weights")


def write(outcome: Outcome, directory: Path) -> None:
    """Write an outcome. Activations that are whole go with it; parts go through :func:`write_part`."""
    for kind in _TENSORS:
        _save(getattr(outcome, kind), directory / f"{kind}.safetensors")
    order = {kind: list(getattr(outcome, kind)) for kind in _TENSORS}  # the format sorts by name
    scalars = {"losses": outcome.losses, "norms": outcome.norms, "order": order}
    (directory / "outcome.json").write_text(json.dumps(scalars), encoding="utf-8")


def write_part(outputs: Outputs, directory: Path, rank: int) -> None:
    """Write one rank's part of the activations."""
    calls = {f"{call}:{name}": x for name, parts in outputs.items() for call, x in enumerate(parts)}
    _save(calls, directory / f"part-{rank}.safetensors")


def read(directory: Path) -> Outcome:
    """Read what :func:`write` wrote."""
    scalars = json.loads((directory / "outcome.json").read_text(encoding="utf-8"))
    tensors = {kind: load_file(directory / f"{kind}.safetensors") for kind in _TENSORS}
    ordered = {kind: {name: tensors[kind][name] for name in scalars["order"][kind]} for kind in _TENSORS}
    return Outcome(losses=scalars["losses"], norms=scalars["norms"], **ordered)


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
