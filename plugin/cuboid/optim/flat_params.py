"""Parameters end to end in one tensor, with the share of them that this replica's optimizer steps on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from cuboid.checkpoint.optimizer_state import Holding, Slot
from cuboid.distributed.axis_collectives import padded_length
from cuboid.distributed.collectives import gather_into, reduce_scatter_into
from cuboid.optim.grad_buffer import GradientBuffer, starts_of, views_of


class FlatParameters:
    """Parameters of one dtype, laid end to end; their gradients; and the masters of this replica's share.

    Replica r of D steps on the r-th of D equal parts, wherever parameters begin, so that all hold the same: with ZeRO 1
    (Rajbhandari et al., arXiv 1910.02054, section 5.1). With D = 1 that is the whole.

    Args:
        parameters: alike in order on all replicas. Their data moves into the one tensor.
        master_dtype: of the masters and gradients. Where the parameters have it, they are their own masters.
        working_dtype: that the parameters get.
        share: which part is this replica's, and how many parts there are.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        master_dtype: torch.dtype,
        working_dtype: torch.dtype,
        share: tuple[int, int],
    ) -> None:
        self._parameters = list(parameters)
        index, parts = share
        self._starts = starts_of(parameters)
        length = padded_length(self._starts[-1], parts) // parts
        self._own = range(index * length, (index + 1) * length)
        self._parts = parts
        # Of the precision that they came with, before the parameters lose it.
        masters = self._gathered_own(master_dtype) if working_dtype != master_dtype else None
        self._working = self._move(working_dtype)
        self.master = nn.Parameter(self._slice(self._working) if masters is None else masters)
        self._gradients = GradientBuffer(parameters, master_dtype, self._working.numel())
        self._share = torch.zeros_like(self.master) if parts > 1 else self._gradients.flat
        self.master.grad = self._share

    def reduce(self, group: dist.ProcessGroup | None) -> None:
        """Add the gradients up over the replicas: all of them, or with several parts this replica's."""
        whole = self._gradients.collect()
        if group is not None and self._parts > 1:
            reduce_scatter_into(self._share, whole, group)
        elif group is not None:
            dist.all_reduce(whole, group=group)
        self.master.grad = self._share

    def reopen(self, replicas: int) -> None:
        """Undo :meth:`reduce` in such a way that a later one gives the same, and what is added till then."""
        if self._parts > 1:
            self._gradients.flat.zero_()
            self._slice(self._gradients.flat).copy_(self._share)
        else:
            self._gradients.flat.div_(replicas)

    def clear(self) -> None:
        """Forget the gradients."""
        self._gradients.clear()
        if self._parts > 1:
            self._share.zero_()

    def publish(self, group: dist.ProcessGroup | None) -> None:
        """Give the parameters the values of the masters, of all replicas."""
        own = self.master.detach()
        if self.master.dtype != self._working.dtype:
            own = own.to(self._working.dtype)
        elif self._parts > 1:
            own = own.clone()
        if group is not None and self._parts > 1:
            gather_into(self._working, own, group)
        elif own.data_ptr() != self._working.data_ptr():
            self._working.copy_(own)

    def weights_changed(self) -> None:
        """Take the parameters' values over into the masters."""
        self.master.data.copy_(self._slice(self._working))

    def gradients(self, counted: set[int]) -> list[torch.Tensor]:
        """This replica's share of the gradients of those parameters whose ids are ``counted``; after :meth:`reduce`."""
        return [
            self._share[offset : offset + numel]
            for parameter, _, offset, numel in self._own_pieces()
            if id(parameter) in counted
        ]

    def holding(self, names: Mapping[int, str]) -> Holding:
        """What of which parameters the master holds, for checkpoints."""
        slots = tuple(Slot(names[id(parameter)], *place) for parameter, *place in self._own_pieces())
        return Holding(self.master, slots, tuple(names[id(parameter)] for parameter in self._parameters))

    @property
    def has_copies(self) -> bool:
        """Whether the masters are copies in another precision."""
        return self.master.dtype != self._working.dtype

    def _own_pieces(self) -> Iterator[tuple[nn.Parameter, int, int, int]]:
        """This replica's share by parameters: each with where its piece starts in it and in the share, and how long."""
        for parameter, (start, _) in zip(self._parameters, pairwise(self._starts), strict=True):
            first, stop = max(start, self._own.start), min(start + parameter.numel(), self._own.stop)
            if first < stop:
                yield parameter, first - start, first - self._own.start, stop - first

    def _slice(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self._own.start : self._own.stop]

    def _gathered_own(self, dtype: torch.dtype) -> torch.Tensor:
        """This replica's share of the parameters as they are, zeros between them."""
        values = torch.zeros(len(self._own), dtype=dtype, device=self._parameters[0].device)
        for parameter, start, offset, numel in self._own_pieces():
            values[offset : offset + numel].copy_(parameter.detach().reshape(-1)[start : start + numel])
        return values

    def _move(self, dtype: torch.dtype) -> torch.Tensor:
        flat = torch.zeros(len(self._own) * self._parts, dtype=dtype, device=self._parameters[0].device)
        for parameter, view in zip(self._parameters, views_of(flat, self._parameters), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        return flat
