"""Helpers of the tests of conversions."""

from pathlib import Path

import torch

from comparing import mesh_section, stored
from cuboid.config.schema import parse_config
from cuboid.convert.run import ConvertOptions, convert


def run(source, target, **options):
    """Convert; returns the printed lines."""
    lines = []
    convert(ConvertOptions(Path(source), Path(target), quiet=True, **options), lines.append)
    return lines


def layout_section(mesh="1x1x1", stages=None, balance="layers", **pipeline):
    """A config with a mesh and, if stages are given, a pipeline."""
    config = {"tensor_parallel": mesh_section(mesh)}
    if stages is not None:
        config["pipeline"] = {"engine": "seq1f1b", "stages": stages, "segments": 2, "stage_balance": balance}
        config["pipeline"] |= pipeline
    return config


def layout(mesh="1x1x1", stages=None, balance="layers", **pipeline):
    """The same, parsed."""
    return parse_config(layout_section(mesh, stages, balance, **pipeline))


def same(one, other):
    """Whether two folders have the same tensors, bit for bit, under the same names."""
    first, second = stored(one), stored(other)
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) and first[name].dtype == second[name].dtype for name in first
    )


def nothing_left(target):
    """Whether neither a folder nor an incomplete one exists."""
    return not target.exists() and not target.with_name(f"{target.name}.converting").exists()
