"""Helpers of the tests of parity and of checkpoints: config sections, stored tensors, and messages for failures."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from cuboid import MeshShape
from cuboid.verify import PassReport


def mesh_section(mesh: str) -> dict[str, Any]:
    """The tensor_parallel section of a mesh such as ``"1x2x2"``."""
    shape = MeshShape.parse(mesh)
    axes = {"batch": shape.batch, "sequence": shape.sequence, "hidden": shape.hidden}
    return {"mode": "3d_tensor", "mesh": axes}


def describe(report: PassReport) -> str:
    """The failed checks, for the test's output."""
    failed = [f"{c.kind} {c.name}: {c.error:.1e}" for c in report.checks if not c.passed]
    return f"{report.first_difference}; {len(failed)} of {len(report.checks)} fail: {', '.join(failed[:12])}"


def stored(folder: str | Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, from one or several files."""
    return {name: x for file in Path(folder).glob("*.safetensors") for name, x in load_file(file).items()}
