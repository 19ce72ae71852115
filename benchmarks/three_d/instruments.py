"""What a forward and backward sends, holds and saves, measured the same way for whoever runs them.

Only torch is needed here, so that an environment without Cuboid can measure too.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle


class Collective(NamedTuple):
    """One kind of call.

    Args:
        operation: "all_gather", "reduce_scatter", "all_reduce", or "all_to_all".
        whole_bytes: of the unsplit tensor: the output of an all-gather, the input of the others.
        ranks: who take part.
    """

    operation: str
    whole_bytes: int
    ranks: int


class Meter(TorchDispatchMode):
    """Inside, counts collectives, and the bytes of all tensors that were made inside and are still alive.

    A tensor counts from the end of the operation that made it until nothing refers to its memory any more; views count
    once. What a kernel allocates and frees again by itself isn't seen.

    Args:
        existing: tensors from outside, which aren't counted.
    """

    def __init__(self, existing: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.collectives: Counter[Collective] = Counter()
        self.peak_bytes = 0
        self._live_bytes = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in existing}

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation and look at what came of it."""
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self.collectives[_collective(func, args)] += 1
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self._live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        # A storage has one Python object as long as it lives.
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._live_bytes -= size


def _collective(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> Collective:
    name = func._schema.name.removeprefix("c10d::")
    if name == "_allgather_base_":
        return Collective("all_gather", args[0].nbytes, args[0].numel() // args[1].numel())
    if name == "_reduce_scatter_base_":
        return Collective("reduce_scatter", args[1].nbytes, args[1].numel() // args[0].numel())
    if name == "alltoall_base_":
        ranks = _ranks(args[2])
        # With sizes, this is an exchange of two ranks, whose own slices aren't in it.
        return Collective("all_to_all", args[1].nbytes * (ranks if args[3] else 1), ranks)
    if name == "allreduce_":
        return Collective("all_reduce", sum(tensor.nbytes for tensor in args[0]), _ranks(args[1]))
    raise NotImplementedError(f"{name} has no rule yet for how many bytes it sends; add one to {__name__}")


def _ranks(group: Any) -> int:
    return dist.ProcessGroup.unbox(group).size()


class Saved:
    """Inside, counts the bytes that autograd saves for backward: whole storages, each once.

    Args:
        module: what is run.
        linear: classes of its linear layers; what they save is told apart.
        gathered: shapes to which weights are gathered; activations have others.
        parameters: not to be counted.
    """

    def __init__(
        self,
        module: nn.Module,
        linear: tuple[type[nn.Module], ...],
        gathered: set[tuple[int, ...]],
        parameters: Iterable[torch.Tensor],
    ) -> None:
        self._linear_layers = [each for each in module.modules() if isinstance(each, linear)]
        self._gathered = gathered
        self._seen = {parameter.untyped_storage()._cdata for parameter in parameters}
        self._kept: list[torch.Tensor] = []
        self._inside_linear = False
        self._handles: list[RemovableHandle] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        #: Activations that linear layers save, activations that others save, and weights that were gathered.
        self.bytes = {"linear_inputs": 0, "other_activations": 0, "gathered_weights": 0}

    def __enter__(self) -> Saved:
        for layer in self._linear_layers:
            self._handles += [
                layer.register_forward_pre_hook(self._marker(True)),
                layer.register_forward_hook(self._marker(False)),
            ]
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        for handle in self._handles:
            handle.remove()
        self._kept.clear()

    def _marker(self, inside: bool) -> Callable[..., None]:
        def mark(*_: Any) -> None:
            self._inside_linear = inside

        return mark

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        key = tensor.untyped_storage()._cdata
        if key not in self._seen:
            self._seen.add(key)
            # As long as it is kept here, no other storage can come to its address.
            self._kept.append(tensor.detach())
            self.bytes[self._kind(tensor)] += tensor.untyped_storage().nbytes()
        return tensor

    def _kind(self, tensor: torch.Tensor) -> str:
        if tuple(tensor.shape) in self._gathered:
            return "gathered_weights"
        return "linear_inputs" if self._inside_linear else "other_activations"
