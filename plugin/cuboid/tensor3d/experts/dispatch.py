"""Which expert gets which tokens, and products of each expert's rows with its own weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from cuboid.errors import CuboidError

#: What CUDA's grouped kernel can take: rows of a multiple of so many bytes, that begin at one.
_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class Dispatch:
    """The order of T tokens with k experts each as R = T·k rows, those of one expert one after another.

    Args:
        choices: ``[R]``, which of the T·k choices each row is; choice c is one of token c // k.
        places: ``[R]``, the row of each choice.
        experts: ``[R]``, the expert of each row, ascending.
        ends: ``[E]`` of int32, the row behind each expert's last one.
        per_token: k.
    """

    choices: torch.Tensor
    places: torch.Tensor
    experts: torch.Tensor
    ends: torch.Tensor
    per_token: int

    @classmethod
    def of(cls, chosen: torch.Tensor, count: int) -> Dispatch:
        """Of ``[T, k]`` indices in 0 … count - 1. The same indices give the same order on every rank."""
        # Ranks add up rows by their places, so that rows of one expert must not come in any order.
        experts, choices = chosen.flatten().sort(stable=True)
        places = torch.empty_like(choices)
        places[choices] = torch.arange(len(choices), device=chosen.device)
        each = torch.arange(count, dtype=experts.dtype, device=chosen.device)
        ends = torch.searchsorted(experts, each, right=True, out_int32=True)
        return cls(choices, places, experts, ends, chosen.shape[1])

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """First and last (exclusive) row of each expert, on the host, which waits for the device the first time.

        Raises:
            CuboidError: the router chose an expert that there isn't.
        """
        ends = self.ends.tolist()
        if ends[-1] != len(self.choices):
            raise CuboidError(f"a router chose expert {int(self.experts[-1])}, and there are {len(ends)}")
        return list(zip([0, *ends[:-1]], ends, strict=True))

    @cached_property
    def tokens(self) -> torch.Tensor:
        """``[R]``, the token of each row."""
        return self.choices // self.per_token

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, F]`` of tokens to ``[R, F]`` of rows."""
        return x.index_select(0, self.tokens)

    def token_sums(self, rows: torch.Tensor) -> torch.Tensor:
        """``[R, F]`` to ``[T, F]``: the transpose of :meth:`rows`."""
        # Not by index_add, which adds in no certain order on CUDA, and in the dtype of the sum.
        return rows.index_select(0, self.places).unflatten(0, (-1, self.per_token)).sum(1)


def multiply_rows(x: torch.Tensor, weight: torch.Tensor, dispatch: Dispatch) -> torch.Tensor:
    """Each row times its expert's weight: ``[R, K]`` and ``[E, K, N]`` to ``[R, N]``."""
    if has_kernel(x, weight):
        return torch.nn.functional.grouped_mm(x, weight, offs=dispatch.ends)
    out = x.new_empty((x.shape[0], weight.shape[2]))
    for expert, own in _in_use(dispatch):
        torch.mm(x[own], weight[expert], out=out[own])
    return out


def multiply_transposed(a: torch.Tensor, b: torch.Tensor, dispatch: Dispatch) -> torch.Tensor:
    """aᵀ b over each expert's rows: ``[R, M]`` and ``[R, N]`` to ``[E, M, N]``, zeros for an expert without rows."""
    if has_kernel(a, b):
        products: torch.Tensor = torch.nn.functional.grouped_mm(a.t(), b, offs=dispatch.ends)
        # The kernel doesn't promise anything of a sum of no terms.
        starts = torch.nn.functional.pad(dispatch.ends, (1, 0))[:-1]
        return products.masked_fill_((starts == dispatch.ends).view(-1, 1, 1), 0)
    out = a.new_zeros((len(dispatch.ends), a.shape[1], b.shape[1]))
    for expert, own in _in_use(dispatch):
        torch.mm(a[own].t(), b[own], out=out[expert])
    return out


def has_kernel(*operands: torch.Tensor) -> bool:
    """Whether torch has one kernel for all experts, of which the host needs to know no sizes."""
    first = operands[0]
    if first.device.type != "cuda" or first.dtype is not torch.bfloat16:
        return False
    major, _ = torch.cuda.get_device_capability(first.device)
    # Elsewhere this function multiplies expert by expert, and each time asks the device again how many rows each has.
    if not hasattr(torch.nn.functional, "grouped_mm") or major not in (9, 10):
        return False
    return all(_is_aligned(each) for each in operands)


def _is_aligned(x: torch.Tensor) -> bool:
    rows = (size * x.itemsize for size in (*x.shape[1:], *(step for step in x.stride() if step != 1)))
    return x.data_ptr() % _ALIGNMENT_BYTES == 0 and all(size % _ALIGNMENT_BYTES == 0 for size in rows)


def _in_use(dispatch: Dispatch) -> Iterator[tuple[int, slice]]:
    """Experts that have rows, and which."""
    for expert, (start, stop) in enumerate(dispatch.spans):
        if start < stop:
            yield expert, slice(start, stop)
