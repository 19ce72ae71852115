"""Outcomes on disk, where a worker leaves them for the parent: safetensors files and one of JSON."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from cuboid.topology import MeshShape, Topology
from cuboid.verify.probe import assemble
from cuboid.verify.training import Outcome, Tensors

_TENSORS = ("activations", "logits", "gradients", "weights")


def write(outcome: Outcome, directory: Path) -> None:
    """Write an outcome. Activations that are whole go with it; parts go through :func:`write_part`."""
    for kind in _TENSORS:
        _save(getattr(outcome, kind), directory / f"{kind}.safetensors")
    order = {kind: list(getattr(outcome, kind)) for kind in _TENSORS}  # the format sorts by name
    scalars = {"losses": outcome.losses, "norms": outcome.norms, "order": order}
    (directory / "outcome.json").write_text(json.dumps(scalars), encoding="utf-8")


def write_part(activations: Tensors, directory: Path, rank: int) -> None:
    """Write one rank's part of the activations."""
    _save(activations, directory / f"part-{rank}.safetensors")


def read(directory: Path) -> Outcome:
    """Read what :func:`write` wrote."""
    scalars = json.loads((directory / "outcome.json").read_text(encoding="utf-8"))
    tensors = {kind: load_file(directory / f"{kind}.safetensors") for kind in _TENSORS}
    ordered = {kind: {name: tensors[kind][name] for name in scalars["order"][kind]} for kind in _TENSORS}
    return Outcome(losses=scalars["losses"], norms=scalars["norms"], **ordered)


def read_parts(directory: Path, topology: Topology, length: int) -> Tensors:
    """Put together the activations ``[B, S, H]`` of the first replica, from the parts of its ranks."""
    ranks = [rank for rank in range(topology.world_size) if topology.coordinate(rank).data == 0]
    parts = [load_file(directory / f"part-{rank}.safetensors") for rank in ranks]
    at = [topology.coordinate(rank) for rank in ranks]
    shape: MeshShape = topology.shape
    return {name: assemble([part[name] for part in parts], at, shape, length) for name in parts[0]}


def _save(tensors: Tensors, path: Path) -> None:
    # Tied tensors share their storage, which the format refuses.
    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, path)
