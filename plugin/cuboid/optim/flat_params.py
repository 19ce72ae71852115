"""Flatten parameters into one tensor, of which this replica's optimizer steps all or a share (ZeRO-1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from cuboid.checkpoint.optimizer_state import OptimizerTensor, Slot
from cuboid.distributed.axis_collectives import padded_length
from cuboid.distributed.collectives import gather_into, reduce_scatter_into
from cuboid.optim.grad_buffer import GradientBuffer, starts_of, views_of
from cuboid.optim.master_weights import follow


class FlatParameters:
    """A flat tensor of parameters of one dtype, their gradients, and the master weights of this replica's share.

    Replica r of D steps the r-th of D equal parts, regardless of where parameters begin, so that all have the same
    amount (ZeRO-1; Rajbhandari et al., arXiv 1910.02054, section 5.1). With D = 1 that is all of it.

    Args:
        parameters: in the same order on all replicas. Their data is moved into the flat tensor.
        master_dtype: of the master weights and gradients. If it is ``working_dtype``, parameters are their own masters.
        working_dtype: that the parameters get.
        share: index of this replica's part, and number of parts.
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
        # Before ``_move`` casts the parameters, so that the masters keep the precision that these were loaded with.
        masters = self._gathered_own(master_dtype) if working_dtype != master_dtype else None
        self._working = self._move(working_dtype)
        self.master = nn.Parameter(self._slice(self._working) if masters is None else masters)
        self._gradients = GradientBuffer(parameters, master_dtype, self._working.numel())
        self._share = torch.zeros_like(self.master) if parts > 1 else self._gradients.flat
        self.master.grad = self._share

    def reduce(self, group: dist.ProcessGroup | None) -> None:
        """Sum the gradients over the replicas: all of them or, with several parts, this replica's."""
        gradients = self._gradients.collect()
        if group is not None and self._parts > 1:
            reduce_scatter_into(self._share, gradients, group)
        elif group is not None:
            dist.all_reduce(gradients, group=group)
        self.master.grad = self._share

    def elsewhere(self, *, reduced: bool) -> list[nn.Parameter]:
        """The parameters whose ``.grad`` isn't what is stepped on, before or after :meth:`reduce`."""
        return [] if self._gradients.is_in_place and not (reduced and self._parts > 1) else self._parameters

    def has_gradients(self) -> bool:
        """Whether any accumulated gradient differs from zero; waits for the device."""
        return bool(self._gradients.collect().any())

    def reopen(self, replicas: int) -> None:
        """Make a later :meth:`reduce` return the present sum plus the gradients that are accumulated until then."""
        if self._parts > 1:
            # Only in this replica's own part, so that the next reduce-scatter adds it once.
            self._gradients.flat.zero_()
            self._slice(self._gradients.flat).copy_(self._share)
        else:
            self._gradients.flat.div_(replicas)

    def clear(self) -> None:
        """Zero the gradients."""
        self._gradients.clear()
        if self._parts > 1:
            self._share.zero_()

    @torch.no_grad()
    def take_changes(self) -> None:
        """Let the next step begin with the parameters' present values, which a script may have changed."""
        for parameter, view in zip(self._parameters, views_of(self._working, self._parameters), strict=True):
            if parameter.data_ptr() != view.data_ptr():
                parameter.data = view.copy_(parameter.detach())
        if self.has_copies:
            follow(self.master, self._slice(self._working))

    def publish(self, group: dist.ProcessGroup | None) -> None:
        """Copy the master weights of all replicas into the parameters."""
        weights = self.master.detach()
        if self.has_copies:
            weights = weights.to(self._working.dtype)
        elif self._parts > 1:
            # The masters are a view of the all-gather's output, so they are copied first.
            weights = weights.clone()
        if group is not None and self._parts > 1:
            gather_into(self._working, weights, group)
        elif weights.data_ptr() != self._working.data_ptr():
            self._working.copy_(weights)

    def weights_changed(self) -> None:
        """Copy the parameters into the master weights, after they were loaded."""
        self.master.data.copy_(self._slice(self._working))

    def gradients(self, counted: set[int]) -> list[torch.Tensor]:
        """This replica's share of the reduced gradients of parameters whose ``id`` is in ``counted``."""
        return [
            self._share[offset : offset + numel]
            for parameter, _, offset, numel in self._own_pieces()
            if id(parameter) in counted
        ]

    def optimizer_tensor(self, names: Mapping[int, str]) -> OptimizerTensor:
        """Maps the master weights to elements of parameters, for checkpoints."""
        slots = tuple(Slot(names[id(parameter)], *place) for parameter, *place in self._own_pieces())
        return OptimizerTensor(self.master, slots, tuple(names[id(parameter)] for parameter in self._parameters))

    @property
    def has_copies(self) -> bool:
        """Whether the master weights are copies in another precision."""
        return self.master.dtype != self._working.dtype

    def _own_pieces(self) -> Iterator[tuple[nn.Parameter, int, int, int]]:
        """This replica's share: for each parameter in it, the piece's offset in parameter and share, and its length."""
        for parameter, (start, _) in zip(self._parameters, pairwise(self._starts), strict=True):
            first, stop = max(start, self._own.start), min(start + parameter.numel(), self._own.stop)
            if first < stop:
                yield parameter, first - start, first - self._own.start, stop - first

    def _slice(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self._own.start : self._own.stop]

    def _gathered_own(self, dtype: torch.dtype) -> torch.Tensor:
        """This replica's share of the parameters' present values, with zeros in alignment gaps."""
        values = torch.zeros(len(self._own), dtype=dtype, device=self._parameters[0].device)
        for parameter, start, offset, numel in self._own_pieces():
            values[offset : offset + numel].copy_(parameter.detach().reshape(-1)[start : start + numel])
        return values

    def _move(self, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor of all parts, with the parameters' values; their data become views of it."""
        flat = torch.zeros(len(self._own) * self._parts, dtype=dtype, device=self._parameters[0].device)
        for parameter, view in zip(self._parameters, views_of(flat, self._parameters), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        return flat
