"""Broadcasts a step's micro-batches from one rank of a replica to all its ranks.

Every stage needs the shapes, the positions and the mask of what passes through it, and all ranks of a mesh must have
the same ones. So the first rank of a replica reads the data and broadcasts it. That is little (some bytes per token,
where a hidden state has thousands), and afterwards every stage can compute all message shapes by itself.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import AXES
from cuboid.errors import CuboidError
from cuboid.failures.rank_failure import RankFailure, is_lost
from cuboid.failures.replica_updates import EQUAL_SHARES
from cuboid.models.batch.batch_check import Limits

#: Tensors by the names in ``Limits.names``. All hold integers, except the labels of regression and multi-label tasks.
MicroBatch = dict[str, torch.Tensor]
#: Dtypes of the tensors after the broadcast, in which every number takes 64 bits: the first for all integers, the last
#: for float64, and the second for all other floats.
_DTYPES = (torch.int64, torch.float32, torch.float64)

#: What kernels for padding-free rows are given by collators, beside positions.
_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")

#: What works in place of an entry that has rules elsewhere.
_INSTEAD = {
    "adapter_names": "its rows have the same adapters; take a mesh without stages, where they may have different ones"
}

_FINE, _EXHAUSTED, _FAILED = 0, 1, 2
#: Numbers in a header: the status, the call, its micro-batches, and how many numbers follow.
_HEADER = 7
_READING = "reading the micro-batches"


def read_micro_batch(batch: Any, limits: Limits) -> MicroBatch:
    """Convert a micro-batch from one of the forms in which data loaders return it.

    Args:
        batch: a mapping with ``input_ids`` and optionally ``labels``, ``attention_mask``, ``position_ids``,
            ``shift_labels`` and the other tensors of the model's kind; or a pair (inputs, labels), where inputs are
            such a mapping or the ids.
        limits: the model's limits.

    Raises:
        CuboidError: the form or a key is unknown, or shapes contradict each other.
    """
    if isinstance(batch, list | tuple) and len(batch) == 2:
        inputs, labels = batch
        batch = {**(inputs if isinstance(inputs, Mapping) else {"input_ids": inputs}), "labels": labels}
    if not isinstance(batch, Mapping):
        raise CuboidError(
            f"a micro-batch must be a dict with input_ids and labels, or a pair (input_ids, labels), not a "
            f"{type(batch).__name__}"
        )
    entries = _without_packing({name: value for name, value in batch.items() if value is not None})
    unknown = [name for name in entries if name not in limits.names]
    if unknown:
        raise CuboidError(
            f"{unknown[0]} has no rule in a pipeline's micro-batch for {limits.kind.words}; "
            + _INSTEAD.get(unknown[0], f"known: {', '.join(limits.names)}")
        )
    if "input_ids" not in entries:
        raise CuboidError("a pipeline's micro-batch needs input_ids [batch, sequence]")
    tensors = {name: _as_tensor(name, value) for name, value in entries.items()}
    limits.kind.check_micro_batch(tensors)
    if "attention_mask" in tensors:
        # A mask may have any dtype, since only zero or nonzero matters, but is broadcast with the integers.
        tensors["attention_mask"] = (tensors["attention_mask"] != 0).to(torch.int64)
    return tensors


def _without_packing(entries: dict[str, Any]) -> dict[str, Any]:
    """Leave out what collators of padding-free rows say twice, for kernels: positions say where sequences begin.

    Raises:
        CuboidError: it contradicts the positions.
    """
    said = {name: value for name, value in entries.items() if name in _PACKING}
    if not said:
        return entries
    rest = {name: value for name, value in entries.items() if name not in said}
    positions = None if "position_ids" not in rest else _as_tensor("position_ids", rest["position_ids"])
    if positions is None or positions.dim() != 2 or positions.shape[0] != 1:
        raise CuboidError(
            f"{next(iter(said))} says where the sequences of a row begin, for which a pipeline needs position_ids "
            "[1, tokens], counted from 0 in each"
        )
    begins = positions[0] == 0
    starts = begins.nonzero().flatten().tolist()
    bounds = torch.tensor([*starts, positions.shape[1]])
    expected = {
        "cu_seq_lens": bounds,
        "max_length": bounds.diff().max() if starts else None,
        "seq_idx": (begins.cumsum(0) - 1)[None],
    }
    for name, value in said.items():
        wanted = expected[name.removesuffix("_q").removesuffix("_k")]
        if wanted is None or not torch.equal(_as_tensor(name, value).to(wanted), wanted):
            raise CuboidError(
                f"{name} contradicts position_ids, by which the sequences of the row begin at {starts[:8]}; leave it "
                "out, a pipeline goes by position_ids"
            )
    return rest


def _as_tensor(name: str, value: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CuboidError(
            f"{name} can't be made a tensor: {error}; give a tensor, or lists of numbers whose rows are equally long"
        ) from error


def split_rows(batch: MicroBatch, rows: int) -> list[MicroBatch]:
    """Cut a batch into micro-batches of ``rows`` rows; the last one may have fewer."""
    total = batch["input_ids"].shape[0]
    # Tensors that all rows share, such as positions ``[1, S]``, go into every micro-batch.
    shared = {name: tensor for name, tensor in batch.items() if tensor.shape[0] != total}
    return [
        {name: shared.get(name, tensor[first : first + rows]) for name, tensor in batch.items()}
        for first in range(0, total, rows)
    ]


@dataclass(frozen=True)
class StepCall:
    """What a rank is about to do with its replica's next micro-batches.

    Attributes:
        trains: whether it trains on them, rather than evaluating.
        recomputes: whether its stages recompute activations in backward, on which schedules depend. A script may have
            enabled that on some stages only, so that all ranks go by the first one's.
        seed: of the stages' random numbers. Only the first rank reads data, which may be drawn or shuffled, so that
            later its generator isn't in step with those of the others.
        scale: what it multiplies the loss with, before backward or for the caller.
    """

    trains: bool
    recomputes: bool = False
    seed: int = 0
    scale: float = 1.0

    def encode(self) -> tuple[int, ...]:
        """As numbers for a header."""
        return self.trains, self.recomputes, self.seed, _integer(self.scale)

    @classmethod
    def decode(cls, trains: int, recomputes: int, seed: int, scale: int) -> StepCall:
        """The inverse of :meth:`encode`."""
        return cls(bool(trains), bool(recomputes), seed, _number(scale))


def _integer(number: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


def _number(bits: int) -> float:
    number: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return number


def share_micro_batches(
    batches: Iterator[Any] | None,
    count: int | None,
    limits: Limits,
    mesh: Mesh,
    device: torch.device,
    call: StepCall,
) -> tuple[list[MicroBatch], StepCall]:
    """Return this replica's next ``count`` micro-batches, whole, on ``device``; all that are left if it is None.

    Collective over the ranks that hold one copy of the model. Only the first of them reads; on the others
    ``batches`` may be None. Its call, too, is returned on all of them.

    Raises:
        StopIteration: on every rank, if there are fewer than ``count``, or none.
        CuboidError: on every rank, if one is malformed, the reading rank has no iterator, or ``count`` is less than 1;
            on this rank, if the first one makes another call.
    """
    if count is not None and count < 1:
        error = CuboidError(f"a step of a pipeline needs at least 1 micro-batch of each replica, not {count}")
        # All ranks raise it.
        error.shared = True
        raise error
    if count is None:
        batches, count = _all_of(batches, mesh, device)

    def read() -> list[MicroBatch]:
        if batches is None:
            raise CuboidError(f"rank {mesh.rank} reads the data of its replica, but was given no iterator")
        if not isinstance(batches, Iterator):
            raise CuboidError(
                f"a {type(batches).__name__} isn't an iterator, and of a new one each step would take the first "
                "batches again; make one before the loop, data = iter(loader), or give iter([batch])"
            )
        return [read_micro_batch(next(batches), limits) for _ in range(count)]

    if mesh.copy_ranks[-1] == mesh.copy_ranks[0]:  # the replica is a single rank
        return [{name: x.to(device) for name, x in batch.items()} for batch in read()], call
    if mesh.rank == mesh.copy_ranks[0]:
        return _tell(read, call, limits.names, mesh, device), call
    return _listen(count, call, limits.names, mesh, device)


def _all_of(batches: Iterator[Any] | None, mesh: Mesh, device: torch.device) -> tuple[Iterator[Any] | None, int]:
    """Read all that is left on the reading rank; return an iterator over it, and broadcast the number of micro-batches.

    The number is at least 1, so that an empty iterator, or an error of the iterator, is reported when it is read.
    """
    count = torch.ones((), dtype=torch.int64, device=device)
    if mesh.rank == mesh.copy_ranks[0] and batches is not None:
        try:
            micro_batches = list(batches)
            batches = iter(micro_batches)
            count.fill_(max(len(micro_batches), 1))
        except BaseException as error:
            # Even a KeyboardInterrupt is kept until the micro-batches are read: the other ranks wait for the number.
            batches = _failing(error)
    if mesh.copy_ranks[-1] != mesh.copy_ranks[0]:
        _broadcast(count, mesh)
    return batches, int(count)


def _failing(error: BaseException) -> Iterator[Any]:
    yield from ()
    raise error


def _tell(
    read: Callable[[], list[MicroBatch]], call: StepCall, names: Sequence[str], mesh: Mesh, device: torch.device
) -> list[MicroBatch]:
    try:
        batches = read()
        sizes = [size for batch in batches for size in _sizes(batch, names)]
        # Everything that may fail, as the copies to the device, comes before the header: after it, the others wait for
        # a second broadcast.
        payload = _payload(batches, names, device)
        contents = torch.cat([torch.tensor(sizes, dtype=torch.int64, device=device), payload])
        header = _header(device, _FINE, *call.encode(), len(batches), len(contents))
    except StopIteration:
        _broadcast(_header(device, _EXHAUSTED), mesh)
        raise
    except BaseException as error:
        # Even a KeyboardInterrupt is broadcast: the other ranks are waiting for the header.
        if isinstance(error, CuboidError):
            error.arising_on(mesh.rank).shared = True
        failure = dataclasses.replace(RankFailure.of(error, mesh.rank, _READING), everywhere=True)
        text = torch.frombuffer(bytearray(failure.encode().encode()), dtype=torch.uint8).to(device, torch.int64)
        _broadcast(_header(device, _FAILED, len(text)), mesh)
        _broadcast(text, mesh)
        if isinstance(error, CuboidError) or not isinstance(error, Exception):
            raise
        raise failure.error() from error
    _broadcast(header, mesh)
    _broadcast(contents, mesh)
    return list(_split(payload, sizes, names))


def _payload(batches: Sequence[MicroBatch], names: Sequence[str], device: torch.device) -> torch.Tensor:
    """Return all numbers of the micro-batches, in 64 bits each."""
    tensors = [batch[name].flatten() for batch in batches for name in names if name in batch]
    return torch.cat([x.to(device, _DTYPES[0]) if _kind(x) == 0 else _bits(x.to(device)) for x in tensors])


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float64).view(torch.int64)


def _listen(
    count: int, call: StepCall, names: Sequence[str], mesh: Mesh, device: torch.device
) -> tuple[list[MicroBatch], StepCall]:
    header = _header(device, _FINE)
    _broadcast(header, mesh)
    status, *numbers = header.tolist()
    if status == _EXHAUSTED:
        raise StopIteration
    if status == _FAILED:
        text = torch.empty(numbers[0], dtype=torch.int64, device=device)
        _broadcast(text, mesh)
        failure = RankFailure.decode(bytes(text.to("cpu", torch.uint8).tolist()))
        assert failure is not None
        raise failure.error()
    *encoded, number, length = numbers
    first_call = StepCall.decode(*encoded)
    contents = torch.empty(length, dtype=torch.int64, device=device)
    _broadcast(contents, mesh)
    if (first_call.trains, number) != (call.trains, count):
        words = [
            f"{'trains' if is_trained else 'evaluates'} on {micro_batches} micro-batches"
            for is_trained, micro_batches in ((first_call.trains, number), (call.trains, count))
        ]
        raise CuboidError(
            f"rank {mesh.copy_ranks[0]} {words[0]}, and rank {mesh.rank} {words[1]}: the ranks of a pipeline must make "
            "the same calls, of train_batch as of eval_batch, each as often as the others; rank 0 alone can't evaluate"
        )
    if first_call.scale != call.scale:
        raise _other_scale(mesh.copy_ranks[0], first_call.scale, mesh.rank, call.scale)
    fields = _fields(count, names)
    sizes, payload = contents[:fields].tolist(), contents[fields:]
    return list(_split(payload, sizes, names)), first_call


def _other_scale(one: int, scale: float, other: int, other_scale: float) -> CuboidError:
    return CuboidError(
        f"rank {one} multiplies the loss by {scale:g}, and rank {other} by {other_scale:g}; give all ranks the same "
        "criterion"
    )


class ReplicasInStep:
    """Context manager around what each replica prepares by itself before a step; on exit, replicas share the outcome.

    A failure of one replica is raised on all. If the data of all replicas is exhausted, ``StopIteration`` propagates;
    if only that of some is, an error names them. This takes one all-reduce over the replicas, which also sums the
    number of label tokens, by which gradients are divided, of numbers that are out of range, and of lost boundaries,
    and compares by what they multiply the loss.
    """

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._mesh, self._device = mesh, device
        #: Number of this replica's label tokens, a tensor of no dims; to be set inside the context.
        self.items: torch.Tensor | None = None
        #: Total over all replicas, set on exit.
        self.total_items = 0
        #: How many of this replica's numbers are out of range, a tensor of no dims; to be set inside the context.
        self.out_of_range: torch.Tensor | None = None
        #: Total over all replicas, set on exit.
        self.total_out_of_range = 0
        #: How many boundaries this replica's packed rows lose, a tensor of no dims; to be set inside the context.
        self.lost_boundaries: torch.Tensor | None = None
        #: Total over all replicas, set on exit.
        self.total_lost_boundaries = 0
        #: What this replica multiplies the loss with; to be set inside the context.
        self.scale = 1.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None and is_lost(error):
            return
        status = _FINE if error is None else _EXHAUSTED if isinstance(error, StopIteration) else _FAILED
        statuses, scales = self._exchange(status)
        if _FAILED in statuses:
            self._raise_first(error)
        if _EXHAUSTED in statuses and _FINE in statuses:
            raise self._shorter(statuses) from error
        other = next((replica for replica, scale in enumerate(scales) if scale != scales[0]), None)
        if error is None and other is not None:
            ranks = self._mesh.topology.groups(("pipe", *AXES))
            unequal = _other_scale(ranks[0][0], _number(scales[0]), ranks[other][0], _number(scales[other]))
            # All ranks of all replicas raise it.
            unequal.shared = True
            raise unequal

    def _exchange(self, status: int) -> tuple[list[int], list[int]]:
        """All-reduce over the replicas: set the totals and return each replica's status and scale."""
        counts, data = (self.items, self.out_of_range, self.lost_boundaries), self._mesh.topology.data
        scales = data if data > 1 else 0  # Nothing to compare in one replica.
        summary = torch.zeros(len(counts) + data + scales, dtype=torch.int64, device=self._device)
        for index, number in enumerate(counts):
            if number is not None:
                summary[index] = number
        place = len(counts) + self._mesh.coordinate.data
        summary[place].fill_(status)
        if data > 1:
            summary[place + data].fill_(_integer(self.scale))
            dist.all_reduce(summary, group=self._mesh.data_parallel_group)
        self.total_items, self.total_out_of_range, self.total_lost_boundaries, *rest = summary.tolist()
        return rest[:data], rest[data:]

    def _raise_first(self, error: BaseException | None) -> None:
        """Raise the first failed replica's failure; return if ``error`` is that failure and should propagate itself."""
        reader = self._mesh.copy_ranks[0]
        # Data that ended is no failure: what failed on another replica is what users must know.
        local_failure = (
            None if error is None or isinstance(error, StopIteration) else RankFailure.of(error, reader, _READING)
        )
        text = None if local_failure is None else local_failure.encode()
        texts = [text] * self._mesh.topology.data
        if len(texts) > 1:
            dist.all_gather_object(texts, text, group=self._mesh.data_parallel_group)
        failures = [failure for text in texts if text is not None and (failure := RankFailure.decode(text.encode()))]
        first, alike = failures[0], len(failures) == len(texts) and len({failure.text for failure in failures}) == 1
        if isinstance(error, CuboidError) and (alike or first == local_failure):
            return
        if error is not None and not isinstance(error, Exception):
            return
        raise first.error() from error

    def _shorter(self, statuses: Sequence[int]) -> CuboidError:
        ended = [replica for replica, status in enumerate(statuses) if status == _EXHAUSTED]
        listed = ", ".join(map(str, ended))
        error = CuboidError(
            f"the data of replica {listed} of {len(statuses)} ended before that of the others: for this step it has "
            f"fewer micro-batches than they. {EQUAL_SHARES}"
        )
        # All ranks of all replicas raise it.
        error.shared = True
        return error


def _fields(count: int, names: Sequence[str]) -> int:
    """How many numbers come before the tensors of some micro-batches.

    For each name: rows (0 if the tensor is missing), columns (0 if it has one dim), and its dtype as an index into
    ``_DTYPES``.
    """
    return count * 3 * len(names)


def _header(device: torch.device, *numbers: int) -> torch.Tensor:
    """The status, and what it is followed by: as long for each, since ranks may have different calls in mind."""
    return torch.tensor([*numbers, *([0] * (_HEADER - len(numbers)))], dtype=torch.int64, device=device)


def _broadcast(tensor: torch.Tensor, mesh: Mesh) -> None:
    dist.broadcast(tensor, mesh.copy_ranks[0], group=mesh.model_parallel_group)


def _kind(x: torch.Tensor) -> int:
    return (1 if x.dtype != torch.float64 else 2) if x.is_floating_point() else 0


def _sizes(batch: MicroBatch, names: Sequence[str]) -> Iterator[int]:
    for name in names:
        x = batch.get(name)
        yield from (0, 0, 0) if x is None else (x.shape[0], x.shape[1] if x.dim() > 1 else 0, _kind(x))


def _numel(sizes: Sequence[int]) -> Iterator[int]:
    for first in range(0, len(sizes), 3):
        yield sizes[first] * max(sizes[first + 1], 1)


def _split(payload: torch.Tensor, sizes: Sequence[int], names: Sequence[str]) -> Iterator[MicroBatch]:
    parts = iter(payload.split(list(_numel(sizes))))
    fields = _fields(1, names)
    for first in range(0, len(sizes), fields):
        batch = {}
        for name, at in zip(names, range(first, first + fields, 3), strict=True):
            rows, columns, kind = sizes[at : at + 3]
            part = next(parts)
            if rows:
                numbers = part.view(torch.float64).to(_DTYPES[kind]) if kind else part
                batch[name] = numbers.view(rows, columns) if columns else numbers
        yield batch
