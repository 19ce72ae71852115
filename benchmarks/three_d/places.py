"""Which part of a whole tensor a rank holds, whoever cut it, and how far all ranks' parts are from the truth.

Only torch and safetensors are needed here, so that an environment without Cuboid can write its parts too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

#: For each dim of the whole tensor the indices, int64, of what a rank holds: its part is their outer product.
Place = tuple[torch.Tensor, ...]
#: A rank's part of a tensor, and where it belongs.
Piece = tuple[torch.Tensor, Place]

_DIM = "@"


def everything(size: int) -> torch.Tensor:
    """Indices of a dim that isn't cut."""
    return torch.arange(size)


def chunk(size: int | torch.Tensor, index: int, pieces: int) -> torch.Tensor:
    """Indices in one of so many equal pieces of a dim, or of what is left of it."""
    whole = everything(size) if isinstance(size, int) else size
    return whole.chunk(pieces)[index]


def take(whole: torch.Tensor, place: Place) -> torch.Tensor:
    """A copy of the part at ``place``."""
    return whole[torch.meshgrid(*place, indexing="ij")].contiguous()


def write_pieces(pieces: Mapping[str, Piece], path: Path) -> None:
    """Parts and their places as one safetensors file."""
    tensors = {name: part.detach().clone() for name, (part, _) in pieces.items()}
    for name, (_, place) in pieces.items():
        # Copies, for several places may share their indices, which the format excludes.
        tensors |= {f"{name}{_DIM}{dim}": indices.clone() for dim, indices in enumerate(place)}
    save_file(tensors, path)


def read_pieces(path: Path) -> dict[str, Piece]:
    """The inverse of :func:`write_pieces`."""
    tensors = load_file(path)
    names = [name for name in tensors if _DIM not in name]
    return {
        name: (part, tuple(tensors[f"{name}{_DIM}{dim}"] for dim in range(part.dim())))
        for name, part in tensors.items()
        if name in names
    }


def relative_error(whole: torch.Tensor, pieces: Iterable[Piece]) -> float:
    """How far the pieces are from ``whole``: ‖pieces − their places in whole‖ / ‖the same places of whole‖.

    The norms are Frobenius norms in float64 over all pieces together; what several ranks hold counts several times in
    both. Infinite where a number isn't finite, or where an element of ``whole`` is in no piece.
    """
    found = torch.zeros_like(whole, dtype=torch.bool)
    difference = magnitude = 0.0
    for part, place in pieces:
        index = torch.meshgrid(*place, indexing="ij")
        expected = whole[index].double()
        if part.shape != expected.shape:
            return math.inf
        difference += (part.double() - expected).square().sum().item()
        magnitude += expected.square().sum().item()
        found[index] = True
    if not found.all() or not math.isfinite(difference) or magnitude == 0.0:
        return math.inf
    return math.sqrt(difference / magnitude)
