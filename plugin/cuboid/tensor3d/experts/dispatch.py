"""Which expert gets which tokens, and products of each expert's rows with its own weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor

from cuboid.errors import CuboidError

#: CUDA's grouped kernel needs rows whose size and start are multiples of this many bytes.
_ALIGNMENT_BYTES = 16


class ExpertRows(Protocol):
    """Which rows are each expert's."""

    @property
    def ends(self) -> torch.Tensor:
        """``[E]``, int32, one past each expert's last row."""
        ...

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First and last (exclusive) row of each expert, on the host."""
        ...


@dataclass
class Dispatch:
    """The order of T tokens with k experts each as R = T·k rows, in which each expert's rows are consecutive.

    Args:
        choices: ``[R]``, the choice (of T·k) that each row is; choice c belongs to token c // k.
        places: ``[R]``, the row of each choice.
        experts: ``[R]``, the expert of each row, ascending.
        ends: ``[E]``, one past each expert's last row.
        per_token: k.
        known_spans: :attr:`spans`, once they were read.

    All tensors are int32.
    """

    choices: torch.Tensor
    places: torch.Tensor
    experts: torch.Tensor
    ends: torch.Tensor
    per_token: int
    known_spans: list[tuple[int, int]] | None = None

    @classmethod
    def of(cls, indices: torch.Tensor, count: int) -> Dispatch:
        """From expert indices ``[T, k]`` in 0 … count - 1. Equal indices give the same order on every rank."""
        return cls(*order_of(indices, count), indices.shape[1])

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them, in the order of the arguments."""
        return self.choices, self.places, self.experts, self.ends

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First and last (exclusive) row of each expert, on the host. The first access waits for the device.

        Raises:
            CuboidError: the router chose an expert that doesn't exist.
        """
        if self.known_spans is None:
            ends = self.ends.tolist()
            if ends[-1] != len(self.choices):
                raise CuboidError(f"a router chose expert {int(self.experts[-1])}, and there are {len(ends)}")
            self.known_spans = list(zip([0, *ends[:-1]], ends, strict=True))
        return self.known_spans

    @property
    def tokens(self) -> torch.Tensor:
        """``[R]``, the token of each row."""
        return self.choices // self.per_token

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens ``[T, F]`` to their rows ``[R, F]``."""
        return x.index_select(0, self.tokens)

    def token_sums(self, rows: torch.Tensor) -> torch.Tensor:
        """Sum each token's rows, ``[R, F]`` to ``[T, F]``: the transpose of :meth:`rows`."""
        return sum_by_token(rows, self.places, self.per_token)


def order_of(indices: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The first four tensors of a :class:`Dispatch`, from expert indices ``[T, k]``; in graphs of layers, too."""
    # Stable: collectives sum rows by position, so ranks must order an expert's rows alike.
    experts, choices = indices.int().flatten().sort(stable=True)
    places = torch.empty_like(experts)
    places[choices] = torch.arange(len(choices), dtype=torch.int32, device=indices.device)
    numbers = torch.arange(count, dtype=torch.int32, device=indices.device)
    return choices.int(), places, experts, torch.searchsorted(experts, numbers, right=True, out_int32=True)


def sum_by_token(rows: torch.Tensor, places: torch.Tensor, per_token: int) -> torch.Tensor:
    """Sum each token's rows, ``[R, F]`` to ``[T, F]``, which are in ``places``."""
    # Not by index_add, which on CUDA adds in an undefined order, and in the dtype of its output.
    return rows.index_select(0, places).unflatten(0, (-1, per_token)).sum(1)


def multiply_rows(x: torch.Tensor, weight: torch.Tensor, dispatch: ExpertRows) -> torch.Tensor:
    """Each row times its expert's weight: ``[R, K]`` and ``[E, K, N]`` to ``[R, N]``."""
    if has_kernel(x, weight):
        return torch.nn.functional.grouped_mm(x, weight, offs=dispatch.ends)
    out = x.new_empty((x.shape[0], weight.shape[2]))
    for expert, rows in _in_use(dispatch):
        torch.mm(x[rows], weight[expert], out=out[rows])
    return out


def multiply_transposed(a: torch.Tensor, b: torch.Tensor, dispatch: ExpertRows) -> torch.Tensor:
    """aᵀ b over each expert's rows: ``[R, M]`` and ``[R, N]`` to ``[E, M, N]``, zeros for an expert without rows."""
    if has_kernel(a, b):
        products: torch.Tensor = torch.nn.functional.grouped_mm(a.t(), b, offs=dispatch.ends)
        # The kernel guarantees nothing about the result for an expert without rows.
        starts = torch.nn.functional.pad(dispatch.ends, (1, 0))[:-1]
        return products.masked_fill_((starts == dispatch.ends).view(-1, 1, 1), 0)
    out = a.new_zeros((len(dispatch.ends), a.shape[1], b.shape[1]))
    for expert, rows in _in_use(dispatch):
        torch.mm(a[rows].t(), b[rows], out=out[expert])
    return out


def has_kernel(*operands: torch.Tensor) -> bool:
    """Whether torch has one kernel for all experts, which doesn't need their row counts on the host."""
    first = operands[0]
    if first.device.type != "cuda" or first.dtype is not torch.bfloat16:
        return False
    major, _ = torch.cuda.get_device_capability(first.device)
    # Elsewhere, grouped_mm multiplies expert by expert, and each call copies the row counts from the device again.
    if not hasattr(torch.nn.functional, "grouped_mm") or major not in (9, 10):
        return False
    return all(_is_aligned(operand) for operand in operands)


def _is_aligned(x: torch.Tensor) -> bool:
    rows = (size * x.itemsize for size in (*x.shape[1:], *(step for step in x.stride() if step != 1)))
    return x.data_ptr() % _ALIGNMENT_BYTES == 0 and all(size % _ALIGNMENT_BYTES == 0 for size in rows)


def _in_use(dispatch: ExpertRows) -> Iterator[tuple[int, slice]]:
    """Experts that have rows, each with the slice of its rows."""
    if isinstance(dispatch.ends, FakeTensor):
        # Without values there is nothing to multiply, and nobody knows the slices.
        return
    for expert, (start, stop) in enumerate(dispatch.spans):
        if start < stop:
            yield expert, slice(start, stop)
