"""Collectives whose results are NaN until they are waited for, and which notice what must not happen meanwhile.

gloo's collectives are often through before anybody looks. Under NCCL a result is there only for what is put on the
stream behind `wait`, an input is read at any time until then, and memory that was given back belongs to somebody else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from cuboid.distributed import collectives
from proofs.replaced import replaced_collectives


class PoisonError(AssertionError):
    """Something was done to a buffer of a collective between its start and its end."""


class _Poisoned:
    """A collective that was started: its result lies aside, and NaN in its place.

    Args:
        name: of the collective.
        outs: where the result will be, now poisoned.
        results: what it will be.
        inputs: must not change until the end, and live as long.
        open_works: of the process.
        started: the names of all so far.
    """

    def __init__(
        self,
        name: str,
        outs: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        open_works: list[_Poisoned],
        started: list[str],
    ) -> None:
        self._name, self._results, self._open = name, results, open_works
        # Only views of how the storages are laid out are kept, so that it is the caller who keeps them alive.
        self._outs, self._inputs = [_Place(out) for out in outs], [(_Place(x), x.clone()) for x in inputs]
        for out in outs:
            _poison(out)
        open_works.append(self)
        started.append(name)

    def is_completed(self) -> bool:
        return self not in self._open

    def wait(self, timeout: Any = None) -> bool:
        if self.is_completed():
            return True
        self._open.remove(self)
        for place, before in self._inputs:
            if not torch.equal(place.tensor(self._name, "input"), before):
                raise PoisonError(f"an input of {self._name} was changed before its end")
        for place, result in zip(self._outs, self._results, strict=True):
            out = place.tensor(self._name, "result")
            if not bool(_is_poisoned(out).all()):
                raise PoisonError(f"the result of {self._name} was written to before its end")
            out.copy_(result)
        return True


class _Place:
    """Where a tensor is, without keeping its storage alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._storage = StorageWeakRef(storage)
        self._dtype, self._shape, self._stride = tensor.dtype, tensor.shape, tensor.stride()
        self._offset = tensor.storage_offset()

    def tensor(self, name: str, what: str) -> torch.Tensor:
        if self._storage.expired():
            raise PoisonError(f"the memory of the {what} of {name} was freed before its end")
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        empty = torch.empty(0, dtype=self._dtype)
        return empty.set_(storage, self._offset, self._shape, self._stride)


def _poison(x: torch.Tensor) -> None:
    x.fill_(float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).max)


def _is_poisoned(x: torch.Tensor) -> torch.Tensor:
    return x.isnan() if x.is_floating_point() else x == torch.iinfo(x.dtype).max


@contextmanager
def poisoned() -> Iterator[list[str]]:
    """Inside, the asynchronous collectives of :mod:`cuboid.distributed` and of a spread head are poisoned.

    Yields:
        The names of those that were started.

    Raises:
        PoisonError: on leaving, if some was never waited for.
    """
    open_works: list[_Poisoned] = []
    started: list[str] = []
    gather, reduce_scatter = collectives._gather, collectives._reduce_scatter
    all_to_all, all_reduce = dist.all_to_all_single, dist.all_reduce

    def start_gather(out: Any, x: Any, group: Any = None, async_op: bool = False) -> Any:
        result = torch.empty_like(out)
        gather(result, x.clone(), group=group)
        if not async_op:
            out.copy_(result)
            return None
        # The rank's own part may lie in its place already, and stays there.
        ranks, rank = group.size(), group.rank()
        others = [place for place in range(ranks) if place != rank]
        places, results = out.view(ranks, -1), result.view(ranks, -1)
        if places[rank].data_ptr() != x.data_ptr():
            others = list(range(ranks))
        return _Poisoned(
            "all-gather", [places[r] for r in others], [results[r] for r in others], [x], open_works, started
        )

    def start_reduce_scatter(out: Any, x: Any, group: Any = None, async_op: bool = False) -> Any:
        result = torch.empty_like(out)
        reduce_scatter(result, x.clone(), group=group)
        if async_op:
            return _Poisoned("reduce-scatter", [out], [result], [x], open_works, started)
        out.copy_(result)
        return None

    def start_all_to_all(out: Any, x: Any, *sizes: Any, group: Any = None, async_op: bool = False) -> Any:
        result = torch.empty_like(out)
        all_to_all(result, x.clone(), *sizes, group=group)
        if async_op:
            return _Poisoned("all-to-all", [out], [result], [x], open_works, started)
        out.copy_(result)
        return None

    def start_all_reduce(x: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if not async_op:
            return all_reduce(x, op=op, group=group)
        result = x.clone()
        all_reduce(result, op=op, group=group)
        return _Poisoned("all-reduce", [x], [result], [], open_works, started)

    def of_pipe(name: str) -> Any:
        """torch's collective with one tensor, or one from or for each rank, on a side."""
        real = getattr(dist, name)

        def start(x: Any, *more: Any, group: Any = None, async_op: bool = False) -> Any:
            if not async_op:
                return real(x, *more, group=group)
            is_root = isinstance(more[-1], int) and more[-1] == dist.get_rank()
            match name:
                case "broadcast":
                    outs, inputs = ([], [x]) if is_root else ([x], [])
                case "reduce":
                    outs, inputs = [x], []
                case "scatter":
                    outs, inputs = [x], more[0] or []
                case "gather":
                    outs, inputs = more[0] or [], [x]
                case _:
                    outs, inputs = [x], [more[0]]
            copies = {id(tensor): tensor.clone() for tensor in (*outs, *inputs)}

            def copied(value: Any) -> Any:
                if isinstance(value, list):
                    return list(map(copied, value))
                return copies[id(value)] if isinstance(value, torch.Tensor) else value

            real(*map(copied, (x, *more)), group=group)
            return _Poisoned(name, outs, [copies[id(out)] for out in outs], inputs, open_works, started)

        return start

    with pytest.MonkeyPatch.context() as patch:
        for name in ("broadcast", "all_gather_into_tensor", "reduce", "scatter", "gather"):
            patch.setattr(dist, name, of_pipe(name))
        with replaced_collectives(start_gather, start_reduce_scatter, start_all_to_all, start_all_reduce):
            yield started
    if open_works:
        raise PoisonError(f"{len(open_works)} collectives were never waited for, such as {open_works[0]._name}")
