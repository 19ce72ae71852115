"""Checks the numbers of a micro-batch: they are in the range of the tables that they index, and equal on all ranks.

The checks hardly slow down a step. Each rank computes checksums of its tensors on the device, which are all-gathered
over the mesh. The host reads the result once it is available: on a CPU immediately; on an accelerator after it has
queued more work, so that it waits at most for this forward to begin and never for one to end.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from cuboid.distributed.axis_collectives import all_gather
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import AXES
from cuboid.errors import CuboidError
from cuboid.models.batch.generator_check import Library, generator_numbers, generators_differ, shared_number
from cuboid.models.batch.local_batch import IGNORE_INDEX, LABELS, TOKEN_TYPES, granule
from cuboid.tensor3d.layers.vocab_cross_entropy import PADDING
from cuboid.tensor3d.virtual_tokens import FIRST_ID

#: What ranks compare besides the tensors: the arguments of the call, and the number by which the loss is divided.
_CALL, _ITEMS = "shapes or the other arguments", "num_items_in_batch"


class BatchRules(Protocol):
    """What the check of a micro-batch needs of a :class:`~cuboid.models.kinds.model_kind.ModelKind`."""

    @property
    def words(self) -> str:
        """What the model is for, for error messages."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that a micro-batch may have, without token types; the main input comes first."""

    @property
    def main_input(self) -> str:
        """The argument that a forward can't do without."""

    @property
    def outputs(self) -> int:
        """Number of outputs that a head has for each label; 0 for language models."""

    def check_micro_batch(self, tensors: dict[str, torch.Tensor]) -> None:
        """Check the shapes and dtypes of a pipeline's micro-batch."""


@dataclass(frozen=True)
class Limits:
    """The ranges of a micro-batch's numbers. Upper limits are exclusive.

    Args:
        kind: of the model.
        tokens: rows of the embedding: the limit of ids.
        labels: size of the vocabulary, or number of classes: the limit of labels. None if labels may be any numbers.
        positions: rows of the learned position table, if there is one: the limit of positions.
        types: rows of the table of token types, if the model takes such ids.
        counts: whether the model takes no positions, and counts them by itself.
        first_position: the first position, if the model counts positions by itself.
        longest: tokens of the longest sequence that the model is made for, if its config has it.
        masks: positions of the causal masks that attention modules keep as buffers, if they do.
        spreads_hidden: whether the tokens of a row that its mask hides altogether attend to all positions alike, also
            to those that a mesh fills up.
        shifts_labels: whether the loss compares each position with the next one's label, so that the first label isn't
            used.
        virtual_tokens: number of ids from ``FIRST_ID`` on that an adapter's virtual tokens have.
        told: what users of this model have been warned of, so that they are once.
    """

    kind: BatchRules
    tokens: int
    labels: int | None
    positions: int | None = None
    types: int | None = None
    counts: bool = False
    first_position: int = 0
    longest: int | None = None
    masks: int | None = None
    spreads_hidden: bool = False
    shifts_labels: bool = False
    virtual_tokens: int = 0
    told: set[str] = field(default_factory=set, repr=False, compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors that a micro-batch may have."""
        return self.kind.tensors if self.types is None else (*self.kind.tensors, TOKEN_TYPES)

    def warn_of_length(self, tensors: Mapping[str, Any], mesh: Mesh) -> None:
        """Warn on the first rank if rotary embeddings are used beyond the positions that the model is made for.

        Args:
            tensors: tensors of a micro-batch. If it has position ids, which may restart, there is no warning.
            mesh: this rank's mesh.
        """
        length = 0 if tensors.get("input_ids") is None else tensors["input_ids"].shape[1]
        counts = self.positions is None and tensors.get("position_ids") is None
        if self.longest is not None and length > self.longest and counts and mesh.rank == 0 and not mesh.in_threads:
            warnings.warn(
                f"a micro-batch has sequences of {length} tokens, beyond the model's {self.longest} positions "
                "(max_position_embeddings): its rotary embeddings compute them, as in plain transformers, but it was "
                "not made for them",
                stacklevel=1,
            )

    def check_filled(self, length: int, filled: int, *, counts: bool) -> None:
        """Check that sequences of ``length`` tokens, filled up to what mesh and segments divide, have positions.

        Args:
            length: as given.
            filled: as the model gets them.
            counts: whether the model counts positions by itself, those that are filled up too.

        Raises:
            CuboidError: they don't.
        """
        # A table that begins behind a padding token's row has that row for what is filled up.
        table = self.positions if counts and self.first_position == 0 else None
        most = min((limit for limit in (self.masks, table) if limit is not None), default=filled)
        if filled > most:
            raise CuboidError(
                f"a micro-batch has sequences of {length} tokens, which are filled up to {filled} for the mesh or "
                f"segments, but the model has {'masks' if most == self.masks else 'a table'} of {most} positions "
                f"(max_position_embeddings); give shorter ones, or a mesh whose axes divide {most}"
            )

    def warn_of_lost_boundaries(self, mesh: Mesh) -> None:
        """Warn, once and on the first rank of a replica, of what :func:`lost_boundaries` has found.

        It isn't an error: positions may restart on purpose where sequences are meant to see one another.
        """
        if "boundaries" in self.told or mesh.rank != mesh.copy_ranks[0]:
            return
        self.told.add("boundaries")
        warnings.warn(
            "position_ids restart inside a row, as in packed sequences, between two tokens that attention_mask shows: "
            "given an attention_mask, even of ones, transformers looks for no boundaries in position_ids, and neither "
            "does this model, so that the sequences of the row attend to one another. To keep them apart leave out "
            "attention_mask, and give padding labels of -100; or give each sequence a row of its own. If they are "
            "meant to see one another, all is well",
            stacklevel=1,
        )

    def of(self, name: str) -> int | None:
        """Return the limit of one of :attr:`names`; None if it has none."""
        if name in LABELS:
            return self.labels
        if name in ("input_ids", "decoder_input_ids"):
            return self.tokens
        return {"position_ids": self.positions, TOKEN_TYPES: self.types}.get(name)

    def out_of_range(self, name: str, x: torch.Tensor, ignore_index: int = IGNORE_INDEX) -> torch.Tensor | None:
        """Return a bool tensor, in the shape ``[B, S]`` or ``[B]`` of ``x``, that is true where ``x`` is out of range.

        None if the tensor has no limit.
        """
        limit = self.of(name)
        if limit is None or x.is_floating_point():
            return None
        outside = (x < 0) | (x >= limit)
        if self.virtual_tokens and name == "input_ids":
            outside &= (x < FIRST_ID) | (x >= FIRST_ID + self.virtual_tokens)
        if name in LABELS:
            outside &= (x != ignore_index) & (x != PADDING)
        if name == "labels" and self.shifts_labels:
            outside[:, 0] = False
        return outside

    def error(self, name: str, x: torch.Tensor, ignore_index: int = IGNORE_INDEX, *, where: str = "") -> CuboidError:
        """Return an error about the first number out of range in a tensor that has some."""
        outside = self.out_of_range(name, x, ignore_index)
        assert outside is not None
        place = tuple(outside.nonzero()[0].tolist())
        more = int(outside.sum()) - 1
        rest = f" (and {more} more)" if more else ""
        has_classes = name in LABELS and self.kind.outputs
        table = {"position_ids": "position table", TOKEN_TYPES: "table of token types"}.get(name, "vocabulary")
        ignored = f"; {ignore_index} stands for no label" if name in LABELS else ""
        return CuboidError(
            f"{name}[{', '.join(map(str, place))}]{rest}{where} is {int(x[place])}, but the model's "
            f"{'head' if has_classes else table} has {self.of(name)} {'classes' if has_classes else 'entries'}, "
            f"0 to {(self.of(name) or 0) - 1}{ignored}"
        )


def lost_boundaries(micro_batches: Iterable[Mapping[str, torch.Tensor]]) -> torch.Tensor | None:
    """Count, as a scalar tensor, where positions restart between two tokens of a row that the mask shows.

    These are no boundaries to the model, because there is a mask. Padding on the left, whose positions may be anything,
    isn't counted, and neither are positions that jump ahead. None if no micro-batch has positions and a mask.
    """
    counts = []
    for batch in micro_batches:
        if "attention_mask" in batch and "position_ids" in batch:
            # In generation, the mask has the tokens in the cache, too.
            shown = batch["attention_mask"][:, -batch["position_ids"].shape[1] :] != 0
            restarts = batch["position_ids"].diff(dim=1) <= 0
            counts.append((restarts & shown[:, 1:] & shown[:, :-1]).sum())
    return torch.stack(counts).sum() if counts else None


class BatchCheck:
    """A check of one micro-batch: started on the device, read later by the host.

    It also compares the ranks' random number generators; see :class:`cuboid.tensor3d.layers.dropout.Generators`.

    Collective over the mesh. A rank sends 72 bytes to each other one, and 8 for each further kind of tensor.

    Args:
        arguments: arguments of the model's forward: whole tensors, which should be equal on all ranks of the mesh.
        limits: the model's limits.
        mesh: the model's mesh.
        modes: settings of the host that must be equal on all ranks, such as whether the model is training; their
            ``repr`` is compared.
        libraries: whose generators the model draws from.
    """

    def __init__(
        self,
        arguments: dict[str, Any],
        limits: Limits,
        mesh: Mesh,
        modes: tuple[Any, ...],
        libraries: Collection[Library] = (),
    ) -> None:
        self._names = limits.names
        self._tensors = {name: arguments[name] for name in self._names if arguments.get(name) is not None}
        self._ignore_index: int = arguments.get("ignore_index", IGNORE_INDEX)
        self._limits, self._mesh = limits, mesh
        ids = self._tensors[limits.kind.main_input]
        device = ids.device
        lost = lost_boundaries((self._tensors,)) if "position_ids" in self._tensors else None
        self._may_lose_boundaries = lost is not None
        flags = [] if lost is None else [lost > 0]
        filled = -ids.shape[1] % granule(mesh) if limits.spreads_hidden and "attention_mask" in self._tensors else 0
        if filled:
            flags.append(_hidden_rows(self._tensors, self._ignore_index).any())
        self._filled = filled
        if limits.positions is not None and "position_ids" not in self._tensors:
            # The model will count positions by itself, so check those. Encoder and decoder have equal position tables.
            first, decoder_ids = limits.first_position, self._tensors.get("decoder_input_ids", ids)
            last = first + max(ids.shape[1], decoder_ids.shape[1])
            self._tensors["position_ids"] = torch.arange(first, last, device=device).unsqueeze(0)
        self._bounded: list[str] = []
        for name, x in self._tensors.items():
            outside = limits.out_of_range(name, x, self._ignore_index)
            if outside is not None:
                self._bounded.append(name)
                flags.append(outside.any())
        #: Each rank's generators, and a number of the first one if they differ; known once the check has been read.
        self._states: torch.Tensor | None = None
        self._number: int | None = None
        if mesh.shape.size > 1:
            sums = all_gather(self._summary(arguments, modes, libraries, device), mesh.along(*AXES))
            # Threads of one process share their generators.
            self._states = None if mesh.in_threads else sums[:, -2:]
            flags += (sums != sums[0]).any(0).unbind()
        # ``flags`` is empty on one rank, which has nothing to compare, for images without classes.
        self._verdict = _OnHost(torch.stack(flags) if flags else torch.zeros(0, dtype=torch.bool, device=device))

    def read_if_there(self) -> None:
        """Call :meth:`read` if the host doesn't have to wait for the result, which is on a CPU."""
        if self._verdict.is_there:
            self.read()

    def read(self) -> None:
        """Wait for the result and raise an error if it is bad. Later calls do nothing.

        Raises:
            CuboidError: ranks have different micro-batches, or numbers are out of range; raised on all ranks.
        """
        if not self._tensors:
            return
        tensors, self._tensors = self._tensors, {}
        verdict = self._verdict.read()
        loses_boundaries = self._may_lose_boundaries and verdict.pop(0)
        has_hidden_rows = self._filled and verdict.pop(0)
        if self._states is not None and verdict[-2]:
            self._number = shared_number(self._states.tolist())
        # The generators, which come last, may differ.
        names = (_CALL, _ITEMS, *self._names)
        differing = [name for name, bad in zip(names, verdict[len(self._bounded) :], strict=False) if bad]
        if differing:
            raise CuboidError(
                f"the {self._mesh.shape.size} ranks of a mesh must be given the same micro-batch, but theirs differ in "
                f"{', '.join(differing)}: shard the data by cuboid.mesh_of(model).coordinate.data out of "
                "cuboid.mesh_of(model).topology.data, not by rank, and shuffle it with the same seed"
            )
        for name, bad in zip(self._bounded, verdict, strict=False):
            if bad:
                raise self._limits.error(name, tensors[name], self._ignore_index)
        if has_hidden_rows:
            row = int(_hidden_rows(tensors, self._ignore_index).nonzero()[0])
            length = tensors["attention_mask"].shape[1]
            raise CuboidError(
                f"attention_mask[{row}] hides all tokens of its row, which then attend to all positions alike, also to "
                f"the {self._filled} that the mesh adds to {length}, so that the result would be another one: leave "
                f"the row out, give it labels of {self._ignore_index}, or make rows {length + self._filled} tokens long"
            )
        if loses_boundaries:
            self._limits.warn_of_lost_boundaries(self._mesh)

    def number_if_differing(self) -> int | None:
        """A number of the first rank's generators if the ranks' differ, else None. Waits for the check."""
        self.read()
        return self._number

    def require_equal(self) -> None:
        """Raise an error, on all ranks, if their generators differ."""
        if self.number_if_differing() is not None:
            assert self._states is not None
            raise generators_differ(self._states.tolist(), self._mesh)

    def _summary(
        self, arguments: dict[str, Any], modes: tuple[Any, ...], libraries: Collection[Library], device: torch.device
    ) -> torch.Tensor:
        items = arguments.get("num_items_in_batch")
        call: list[Any] = [*modes, self._ignore_index, {name: tuple(x.shape) for name, x in self._tensors.items()}]
        if isinstance(items, torch.Tensor):
            divisor = items.detach().to(device, torch.float64).flatten()[0].view(torch.int64)
        else:
            divisor = torch.zeros((), dtype=torch.int64, device=device)
            call.append(None if items is None else float(items))
        digest = int.from_bytes(hashlib.blake2b(repr(call).encode(), digest_size=8).digest(), "big", signed=True)
        # `full` passes the number as a kernel argument, where `tensor` would copy it to the device and wait.
        numbers = [torch.full((), digest, dtype=torch.int64, device=device), divisor]
        places = _places(max(map(torch.numel, self._tensors.values())), device)
        for name in self._names:
            x = self._tensors.get(name)
            is_mask = name.endswith("attention_mask")
            numbers.append(torch.zeros_like(divisor) if x is None else _checksum(x, places, is_mask=is_mask))
        for number in generator_numbers(libraries):
            numbers.append(torch.full((), number, dtype=torch.int64, device=device))
        return torch.stack(numbers)


def _hidden_rows(tensors: Mapping[str, torch.Tensor], ignore_index: int) -> torch.Tensor:
    """``[B]``, where a row's mask hides all of it, and the row has a label."""
    rows = (tensors["attention_mask"] == 0).flatten(1).all(1)
    labels = tensors.get("labels")
    return rows if labels is None else rows & (labels != ignore_index).reshape(len(rows), -1).any(1)


def _places(count: int, device: torch.device) -> torch.Tensor:
    """Return a pseudo-random weight for each place, so that different numbers or another order change the checksum.

    The mixing function of SplitMix64 (Steele, Lea and Flood 2014), in int64, which wraps around equally on all devices.
    """
    x = torch.arange(1, count + 1, device=device) * -0x61C8864680B583EB
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    return x ^ (x >> 27)


def _checksum(x: torch.Tensor, places: torch.Tensor, *, is_mask: bool) -> torch.Tensor:
    numbers = x != 0 if is_mask and x.is_floating_point() else x
    # The labels of a regression are compared by their bits.
    integers = numbers.double().view(torch.int64) if numbers.is_floating_point() else numbers.to(torch.int64)
    return (integers.flatten() * places[: x.numel()]).sum()


class _OnHost:
    """A few numbers that are copied asynchronously from the device to the host."""

    def __init__(self, x: torch.Tensor) -> None:
        self.is_there = x.device.type == "cpu"
        if self.is_there:
            self._host = x
            return
        self._host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
        self._host.copy_(x, non_blocking=True)
        self._event = torch.Event(x.device.type)
        self._event.record(torch.accelerator.current_stream(x.device))

    def read(self) -> list[Any]:
        """Wait for the numbers and return them."""
        if not self.is_there:
            self._event.synchronize()
        numbers: list[Any] = self._host.tolist()
        return numbers
