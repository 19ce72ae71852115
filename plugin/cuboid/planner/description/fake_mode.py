"""torch's ``FakeTensorMode``, with less work for the operators that layers run most."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import in_kernel_invocation_manager

from cuboid.seq1f1b.runtime.memory import storage_id

_aten = torch.ops.aten
#: Their result is their first argument, whose sizes they don't change.
_IN_PLACE = frozenset(
    {
        *(_aten.addmm_.default, _aten.baddbmm_.default, _aten.copy_.default, _aten.add_.Tensor, _aten.mul_.Tensor),
        *(_aten.fill_.Scalar, _aten.zero_.default, _aten.normal_.default, _aten.uniform_.default),
    }
)
#: Besides views: operators whose kernels for the meta device are in C++, and are right for every device.
_OF_META = frozenset(
    {
        *(_aten.mm.default, _aten.mm.out, _aten.bmm.default, _aten.bmm.out, _aten._unsafe_view.default),
        *(_aten.detach.default, _aten.clone.default, _aten._to_copy.default, _aten.new_empty.default),
    }
)


class LightFakeMode(FakeTensorMode):
    """Tensors without values, of the same sizes, strides and storages as under ``FakeTensorMode``.

    That mode spends 0.2 to 1 ms on each operator: it looks for constants among the arguments, tells their devices from
    each other, and keeps results by all that an operator could depend on. Views, products and operators in place, which
    are nine of ten that a rank of a mesh runs, need none of it and take a tenth of the time here.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator."""
        kwargs = kwargs or {}
        if self.in_kernel_invocation:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        if func in _IN_PLACE and _are_fake(args):
            return args[0]
        is_light = func in _OF_META or (func.namespace == "aten" and func.is_view)
        if not is_light or kwargs.get("device") is not None or not _are_fake((args, *kwargs.values())):
            return super().__torch_dispatch__(func, types, args, kwargs)
        with in_kernel_invocation_manager(self):
            result = func(*args, **kwargs)
        if isinstance(result, FakeTensor):
            return result  # The argument `out`.
        device = args[0].fake_device
        if isinstance(result, torch.Tensor):
            return FakeTensor(self, result, device)
        return [FakeTensor(self, part, device) for part in result]


class LiveFakeMode(LightFakeMode):
    """Keeps account of the storages that are made in it until they are freed.

    Attributes:
        live_bytes: of all of them, without ``gathered_bytes``.
        gathered_bytes: of the blocks into which shards of :attr:`parameters` are gathered.
        on_allocation: called after each new storage.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.live_bytes = self.gathered_bytes = 0
        self.on_allocation: Callable[[], None] = _do_nothing
        self._parameters: set[int] = set()
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._depth = 0

    def exclude(self, parameters: Iterable[torch.Tensor]) -> None:
        """Don't count parameters, of which operators return views, and from which blocks are gathered."""
        for x in parameters:
            self._parameters.add(storage_id(x))
            self._known.add(x.untyped_storage())

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator, and count what its kernel would allocate."""
        # Meta functions in Python call others, whose results no kernel has.
        self._depth += 1
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._depth -= 1
        if self._depth == 0 and not func.is_view:
            # As an all-gather makes its result from a shard.
            is_gathered = func is _aten.new_empty.default and storage_id(args[0]) in self._parameters
            for x in result if isinstance(result, list | tuple) else (result,):
                if isinstance(x, torch.Tensor) and x.untyped_storage() not in self._known:
                    self._count(x.untyped_storage(), is_gathered=is_gathered)
        return result

    def _count(self, storage: torch.UntypedStorage, *, is_gathered: bool) -> None:
        self._known.add(storage)
        self._add(storage.nbytes(), is_gathered)
        weakref.finalize(storage, self._add, -storage.nbytes(), is_gathered)
        self.on_allocation()

    def _add(self, size: int, is_gathered: bool) -> None:
        if is_gathered:
            self.gathered_bytes += size
        else:
            self.live_bytes += size


def _do_nothing() -> None:
    pass


def _are_fake(argument: Any) -> bool:
    """Whether all tensors of an argument are without values. Small ones on the CPU may have some, for ``item()``."""
    if isinstance(argument, torch.Tensor):
        return type(argument) is FakeTensor and argument.constant is None
    return not isinstance(argument, list | tuple) or all(map(_are_fake, argument))
