"""Tensors that wait in host memory between forward and backward: layers' inputs, and kept attention.

Each checkpointed layer makes a :class:`Frame`. What the forward hands it begins to leave the device at once, on a
stream of its own; the device's memory is released when the next layer's frame begins, behind an event on the computing
stream. In backward a frame that is read brings the one before it back too, on a second stream, so that copies run
beside the layer that is computed in between. The host never waits: order is given by events alone.

Tensors live as long as the graph that needs them. A step that fails drops its graph, and thereby returns its buffers.
"""

from __future__ import annotations

import operator
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Protocol

import torch

from cuboid.errors import CuboidError, UnsupportedModelError
from cuboid.seq1f1b.attention.chunked_attention import Kept, OnDevice
from cuboid.seq1f1b.runtime.memory import storage_id

#: Marks a place in a stream's work. torch has a class for each kind of device.
Event = Any


class Copies(Protocol):
    """Copies beside the computation."""

    def start_out(self, source: torch.Tensor, target: torch.Tensor, after: Event | None) -> Event:
        """Copy to the host what the device has computed by then, after an earlier copy; returns the copy's end."""

    def start_back(self, source: torch.Tensor, target: torch.Tensor, after: Event | None) -> Event:
        """Copy to the device, into memory that the computing stream has allocated."""

    def wait(self, event: Event) -> None:
        """Let the computing stream wait for the end of a copy."""


class CopyStreams:
    """One stream in each direction, since the bus carries both at once."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        # A CPU's stream is a name only: copies are done when the calls return.
        where = () if device.type == "cpu" else (device,)
        self._out, self._back = self._module.Stream(*where), self._module.Stream(*where)

    def start_out(self, source: torch.Tensor, target: torch.Tensor, after: Event | None) -> Event:
        """See :class:`Copies`."""
        return self._start(self._out, source, target, after)

    def start_back(self, source: torch.Tensor, target: torch.Tensor, after: Event | None) -> Event:
        """See :class:`Copies`."""
        return self._start(self._back, source, target, after)

    def wait(self, event: Event) -> None:
        """See :class:`Copies`."""
        self._computing.wait_event(event)

    @property
    def _computing(self) -> Any:
        return self._module.current_stream(self._device)

    def _start(self, stream: Any, source: torch.Tensor, target: torch.Tensor, after: Event | None) -> Event:
        # The source's values, or the kernels that used the target's memory before.
        computed = self._module.Event()
        computed.record(self._computing)
        stream.wait_event(computed)
        if after is not None:
            stream.wait_event(after)
        with self._module.stream(stream):
            target.copy_(source, non_blocking=True)
        over = self._module.Event()
        over.record(stream)
        return over


class HostBuffer:
    """Pinned memory, and the end of the last copy from or into it."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.last: Event | None = None
        self.step = 0

    def viewed_as(self, size: torch.Size, stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The buffer as a tensor."""
        return self.memory.view(dtype).as_strided(size, stride)


class HostBuffers:
    """A pool of host memory, which is allocated once and reused in every step.

    A buffer that a whole step hasn't used is released, so that changing shapes don't pile up.

    Attributes:
        used_bytes: of the buffers that are in use.
        held_bytes: of all buffers.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[HostBuffer]] = defaultdict(list)
        self._step = 0
        self.used_bytes = self.held_bytes = 0

    def begin_step(self) -> None:
        """Release what the step before hasn't used."""
        for size, buffers in self._free.items():
            kept = [buffer for buffer in buffers if buffer.step == self._step]
            self.held_bytes -= size * (len(buffers) - len(kept))
            self._free[size] = kept
        self._step += 1

    def take(self, size: int, *, pinned: bool) -> HostBuffer:
        """A buffer of ``size`` bytes.

        Raises:
            CuboidError: the host has no memory for it.
        """
        free = self._free[size]
        buffer = free.pop() if free else HostBuffer(self._allocate(size, pinned=pinned))
        self.used_bytes += size
        buffer.step = self._step
        return buffer

    def give(self, buffer: HostBuffer) -> None:
        """Return a buffer. A copy of it may still be running; the next one waits for it."""
        self.used_bytes -= buffer.memory.nbytes
        self._free[buffer.memory.nbytes].append(buffer)

    def _allocate(self, size: int, *, pinned: bool) -> torch.Tensor:
        try:
            with torch.inference_mode(mode=False):
                memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        except RuntimeError as error:
            raise CuboidError(
                f"activation_checkpointing.cpu_checkpointing: the host has no {size:,} bytes of "
                f"{'pinned ' if pinned else ''}memory more for what layers keep, beside {self.held_bytes:,}; leave it "
                "out, give shorter rows, or raise the limit of locked memory"
            ) from error
        self.held_bytes += size
        return memory


class HostCopy:
    """A tensor of which the host has a copy from its production to the end of its backward."""

    def __init__(self, store: HostStore, tensor: torch.Tensor, what: str) -> None:
        self._store, self._what = store, what
        self._copies = store.copies_on(tensor.device)
        self._device, self._dtype, self._size = tensor.device, tensor.dtype, tensor.shape
        self._stride, self._version = _dense_stride(tensor), tensor._version
        #: On the device, before it is released and after it has come back.
        self._tensor: torch.Tensor | None = tensor.detach()
        self.nbytes = tensor.numel() * tensor.element_size()
        self._buffer = store.buffers.take(self.nbytes, pinned=tensor.device.type != "cpu")
        self._buffer.last = self._copies.start_out(self._tensor, self._on_host(), self._buffer.last)
        #: Whether the device's memory has yet to be released for the first time.
        self._is_leaving = True
        #: Whether the computing stream has yet to wait for the last copy.
        self._is_copying = True
        store.out_bytes += self.nbytes

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether this is of the same values in the same memory."""
        mine = self._tensor
        return (
            mine is not None
            and storage_id(mine) == storage_id(tensor)
            and (mine.storage_offset(), mine.shape, mine.stride(), mine.dtype, self._version)
            == (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        )

    def release(self) -> None:
        """Free the device's memory for what the computing stream runs from now on.

        Raises:
            UnsupportedModelError: the tensor has been changed in place, perhaps while it was copied.
        """
        if not self._is_leaving:
            return
        assert self._tensor is not None
        if self._tensor._version != self._version:
            raise UnsupportedModelError(
                f"the model's code changes {self._what} in place, so that it can't be copied to the host beside the "
                'computation; leave out "cpu_checkpointing"'
            )
        self._wait()
        self._tensor, self._is_leaving = None, False

    def fetch(self) -> None:
        """Begin to bring the tensor back; one that is on the device stays there."""
        self._is_leaving = False
        if self._tensor is not None:
            return
        self._tensor = torch.empty_strided(self._size, self._stride, dtype=self._dtype, device=self._device)
        self._buffer.last = self._copies.start_back(self._on_host(), self._tensor, self._buffer.last)
        self._is_copying = True
        self._store.back_bytes += self.nbytes

    def read(self) -> torch.Tensor:
        """The tensor on the device."""
        self.fetch()
        assert self._tensor is not None
        self._wait()
        return self._tensor.detach()

    def _on_host(self) -> torch.Tensor:
        return self._buffer.viewed_as(self._size, self._stride, self._dtype)

    def _wait(self) -> None:
        if self._is_copying:
            self._copies.wait(self._buffer.last)
            self._is_copying = False

    def __del__(self) -> None:
        if hasattr(self, "_is_copying"):
            # The computing stream gets the tensor's memory back, from which or into which a copy may still run.
            self._wait()
            self._store.buffers.give(self._buffer)


class Frame:
    """What one checkpointed layer keeps.

    Args:
        store: of the model.
        before: the frame before it in the same forward, of which it may have some tensors too.
    """

    def __init__(self, store: HostStore, before: Frame | None) -> None:
        self._store = store
        # Backward frees frames in reverse order.
        self._before = None if before is None else weakref.ref(before)
        self._copies: list[HostCopy] = []
        self._has_begun = False

    def keep_input(self, tensor: torch.Tensor) -> Kept:
        """Keep one of the layer's inputs, which the layer before may have been given too."""
        before = None if self._before is None else self._before()
        shared = () if before is None else before._copies
        copy = next((copy for copy in shared if copy.is_of(tensor)), None)
        if copy is None:
            return self.keep(tensor, "the input of a layer")
        self._copies.append(copy)
        return _Held(self, copy)

    def keep(self, tensor: torch.Tensor, what: str = "attention's output") -> Kept:
        """Keep a tensor; integers, such as seeds of kernels, and parameters stay on the device."""
        if not tensor.is_floating_point() or not tensor.numel() or isinstance(tensor, torch.nn.Parameter):
            return OnDevice(tensor)
        copy = HostCopy(self._store, tensor, what)
        self._copies.append(copy)
        return _Held(self, copy)

    def begin(self) -> None:
        """Release what the frame before has on the device; called when the layer's inputs are kept."""
        before = None if self._has_begun or self._before is None else self._before()
        self._has_begun = True
        if before is not None:
            before.release(self)

    def release(self, successor: Frame | None = None) -> None:
        """Release what this frame has on the device, apart from what the next one has too."""
        for copy in self._copies:
            if successor is None or copy not in successor._copies:
                copy.release()

    def fetch(self) -> None:
        """Begin to bring everything back."""
        for copy in self._copies:
            copy.fetch()

    def fetch_with_next(self) -> None:
        """Bring back this frame, and the one whose backward comes next."""
        self._store.release_latest(self)
        self.fetch()
        before = None if self._before is None else self._before()
        if before is not None:
            before.fetch()


class _Held:
    """One tensor of a frame."""

    def __init__(self, frame: Frame, copy: HostCopy) -> None:
        self._frame, self._copy = frame, copy

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps, on the host."""
        return self._copy.nbytes

    def read(self) -> torch.Tensor:
        """The tensor on the device."""
        self._frame.fetch_with_next()
        return self._copy.read()


class HostStore:
    """What a rank's model keeps in host memory.

    Attributes:
        make_copies: makes the streams of a device.
        buffers: the host's memory.
        out_bytes, back_bytes: moved to the host and back, since the beginning.
        running: the frame of the layer whose forward runs.
        is_open: whether layers that run now are to keep their tensors here.
    """

    def __init__(self) -> None:
        self.make_copies: Callable[[torch.device], Copies] = CopyStreams
        self.buffers = HostBuffers()
        self.out_bytes = self.back_bytes = 0
        self.running: Frame | None = None
        self.is_open = True
        self._copies: dict[torch.device, Copies] = {}
        #: The frame that the next one follows in its forward.
        self._last: Callable[[], Frame | None] = _nothing
        #: The frame that none has followed yet, so that its tensors are still on the device.
        self._latest: Callable[[], Frame | None] = _nothing
        #: The last layer's frame of each unit between its forward and its backward; None without a pipeline.
        self._units: dict[Hashable, Callable[[], Frame | None]] | None = None

    def __deepcopy__(self, _: Any) -> HostStore:
        return HostStore()

    def copies_on(self, device: torch.device) -> Copies:
        """The streams of a device."""
        if device not in self._copies:
            self._copies[device] = self.make_copies(device)
        return self._copies[device]

    @contextmanager
    def frame(self) -> Iterator[Frame]:
        """Make the frame of a layer whose forward runs inside."""
        last, outer = self._last(), self.running
        if last is None:
            # The first layer of a forward or a unit. What ran before has no further layer that would release it.
            self.release_latest()
            if self._units is None:
                self.buffers.begin_step()
        self.running = frame = Frame(self, last)
        self._last = self._latest = weakref.ref(frame)
        try:
            yield frame
        finally:
            self.running = outer

    def release_latest(self, reader: Frame | None = None) -> None:
        """Release what the latest frame has on the device, unless it is the one that is read."""
        latest, self._latest = self._latest(), _nothing
        if latest is not None and latest is not reader:
            latest.release()

    def begin_units(self) -> None:
        """Begin a pipeline's step, whose units run in :meth:`unit`."""
        self.buffers.begin_step()
        self._units, self.is_open = {}, False

    @contextmanager
    def unit(self, key: Hashable, *, keeps: bool) -> Iterator[None]:
        """Inside, a unit is computed: its forward if it ``keeps`` what its layers have here, or anything else."""
        assert self._units is not None, "a unit outside of a step"
        self.is_open, self._last = keeps, _nothing
        try:
            yield
        finally:
            if keeps:
                self._units[key] = self._last
            self.is_open, self._last = False, _nothing

    def fetch_unit(self, key: Hashable) -> None:
        """Begin to bring back a unit whose backward is the computation after the next: its last layer's tensors."""
        assert self._units is not None, "a unit outside of a step"
        frame = self._units.pop(key, _nothing)()
        if frame is None:
            return
        if frame is self._latest():
            # Nothing runs in between, so that it stays on the device.
            self._latest = _nothing
        frame.fetch()


def _nothing() -> None:
    """Stands for a reference to a frame that is gone."""


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of a copy: the tensor's own if it has neither gaps nor overlaps, else those of a contiguous one."""
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
    ):
        if stride != expected:
            return tuple(accumulate(tensor.shape[:0:-1], operator.mul, initial=1))[::-1]
        expected *= size
    return tensor.stride()
