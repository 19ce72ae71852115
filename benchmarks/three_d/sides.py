"""What is computed: two parts of GPT-2 with one block, the same weights and batch for everyone, and the truth; and a
contestant on one rank: what it holds of the whole, and what a forward and backward of it sends, holds and saves.

A GPT-2 block is what Colossal-AI's 3-D layers can build too: LayerNorms, linear layers with biases, causal attention,
GELU.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from network.serving import Contestant
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GPT2Config, GPT2LMHeadModel

from cuboid.seq1f1b.runtime.memory import LiveActivations

_SEED = 20240607
#: The vocabulary isn't used; it must be there.
_VOCABULARY = 128
#: For each dim of the whole tensor the indices, int64, of what a rank holds: its part is their outer product.
Place = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Block:
    """Sizes, and which part of the model runs."""

    part: str  # "mlp" (linear H→4H, GELU, linear 4H→H) or "layer" (the whole block)
    batch: int = 8
    length: int = 512
    hidden: int = 512
    heads: int = 8

    @property
    def title(self) -> str:
        what = {"mlp": "linear, GELU, linear", "layer": "transformer layer"}[self.part]
        return f"{what}: B={self.batch}, S={self.length}, H={self.hidden}, {self.heads} heads, float32"

    @property
    def path(self) -> str:
        return {"mlp": "transformer.h.0.mlp", "layer": "transformer.h.0"}[self.part]

    def model(self) -> GPT2LMHeadModel:
        """The whole model, with the same weights every time. Biases aren't zero and norms aren't one, or errors would
        hide."""
        sizes = {"n_embd": self.hidden, "n_head": self.heads, "n_layer": 1, "n_positions": self.length}
        sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "bos_token_id", "eos_token_id"), 0)
        others = {"activation_function": "gelu", "attn_implementation": "sdpa"}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=_VOCABULARY, **sizes, **others))
        generator = torch.Generator().manual_seed(_SEED)
        with torch.no_grad():
            for name, parameter in sorted(model.named_parameters()):
                is_norm = "ln_" in name and name.endswith("weight")
                scale = 0.1 if parameter.dim() == 1 else 0.02
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator) + is_norm)
        return model

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Input and output gradient, ``[B, S, H]`` each, the same every time."""
        generator = torch.Generator().manual_seed(_SEED)
        shape = (self.batch, self.length, self.hidden)
        return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)

    @functools.cache  # noqa: B019 -- there are two of them
    def truth(self) -> dict[str, torch.Tensor]:
        """One process in float64: "output", "input" for the input's gradient, and every weight's gradient by name."""
        part = self.model().get_submodule(self.path).double()
        x, dy = (tensor.double() for tensor in self.tensors())
        x.requires_grad_()
        y = part(x)
        y.backward(dy)
        gradients = {name: p.grad for name, p in part.named_parameters() if p.grad is not None}
        return {"output": y.detach(), "input": x.grad, **gradients}

    def numbers(self) -> dict[str, Any]:
        return {**asdict(self), "dtype": "float32"}


BLOCKS = (Block("mlp"), Block("layer"))
QUICK = (Block("mlp", 8, 32, 64, 8), Block("layer", 8, 32, 64, 8))


def everything(size: int) -> torch.Tensor:
    """Indices of a dim that isn't cut."""
    return torch.arange(size)


def chunk(size: int | torch.Tensor, index: int, pieces: int) -> torch.Tensor:
    """Indices in one of so many equal pieces of a dim, or of what is left of it."""
    indices = everything(size) if isinstance(size, int) else size
    return indices.chunk(pieces)[index]


def take(full: torch.Tensor, place: Place) -> torch.Tensor:
    return full[torch.meshgrid(*place, indexing="ij")].contiguous()


def relative_error(
    full: torch.Tensor, part: torch.Tensor, place: Place, add_up: Callable[[torch.Tensor], Any] = lambda _: None
) -> float:
    """‖parts − their places in whole‖ / ‖the same places of whole‖, Frobenius norms over the parts of all ranks, which
    ``add_up`` adds a tensor up over; infinite where one isn't a number or an element of ``full`` is in no part."""
    index = torch.meshgrid(*place, indexing="ij")
    covered, expected = torch.zeros(full.shape, dtype=torch.int32), full[index].double()
    assert part.shape == expected.shape, f"a part is {tuple(part.shape)}, its place {tuple(expected.shape)}"
    covered[index] = 1
    squares = torch.stack([(part.detach().double() - expected).square().sum(), expected.square().sum()])
    add_up(squares)
    add_up(covered)
    return (squares[0] / squares[1]).sqrt().nan_to_num(math.inf).item() if covered.all() else math.inf


# --- who computes it, and what that takes ---


class Collective(NamedTuple):
    """One kind of call."""

    operation: str  # "all_gather", "reduce_scatter", "all_reduce", or "all_to_all"
    whole_bytes: int  # of the unsplit tensor: the output of an all-gather, the input of the others
    ranks: int


class Meter(TorchDispatchMode):
    """Inside, counts collectives, and the bytes of all tensors that were made inside and are still alive.

    A tensor counts from the end of the operation that made it until nothing refers to its memory any more; views count
    once. What a kernel allocates and frees again by itself isn't seen. Tensors that are ``existing`` don't count.
    """

    def __init__(self, existing: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.collectives: Counter[Collective] = Counter()
        self.peak_bytes = self._live_bytes = 0
        self._known = {_storage(tensor) for tensor in existing}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run an operation and look at what came of it."""
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self.collectives[_collective(func, args)] += 1
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and _storage(leaf) not in self._known:
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self._live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        # A storage has one Python object as long as it lives.
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._live_bytes -= size


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _collective(func: Any, args: tuple[Any, ...]) -> Collective:
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


@dataclass
class Side(Contestant):
    """Forward and backward of a module, which takes this rank's part of the input and returns its part of the output;
    ``parameters`` have their places, by Hugging Face's names in the block, and ``around`` is entered around the step.
    """

    block: Block  # what is computed
    module: nn.Module  # this rank's part of it
    place: Place  # of the input and of the output
    parameters: dict[str, tuple[nn.Parameter, Place]]
    around: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext

    def __post_init__(self) -> None:
        x, self._dy = (take(full, self.place) for full in self.block.tensors())
        self._x = x.requires_grad_()

    def first(self) -> dict[str, Any]:
        """The first steps, in which all but the time is measured: errors of all ranks together, by what
        :meth:`Block.truth` has, and what this rank sends, saves, and has at a time."""
        errors = self._errors(self.step())
        self.begin()
        parameters = [parameter for parameter, _ in self.parameters.values()]
        with Meter([self._x, self._dy, *parameters]) as meter:
            self.step()
        self.begin()
        with LiveActivations(parameters) as live, self.around():
            y = self.module(self._x)
            saved_bytes = live.live_bytes
            y.backward(self._dy)
        answers = {"collectives": dict(meter.collectives), "saved_bytes": saved_bytes, "peak_bytes": meter.peak_bytes}
        return {"errors": errors, **answers}

    def begin(self) -> None:
        self._x.grad = None
        self.module.zero_grad()

    def step(self) -> torch.Tensor:
        """Forward and backward; gradients are then with the input and the parameters."""
        with self.around():
            y: torch.Tensor = self.module(self._x)
            y.backward(self._dy)
        return y

    def _errors(self, y: torch.Tensor) -> dict[str, float]:
        """Of the output and all gradients. Collective."""
        pieces = {"output": (y, self.place), "input": (self._x.grad, self.place)}
        pieces |= {name: (p.grad, place) for name, (p, place) in self.parameters.items() if p.grad is not None}
        truth = self.block.truth()
        missing = truth.keys() ^ pieces.keys()
        assert not missing, f"only one of this and GPT-2 has {', '.join(sorted(missing))}"
        return {name: relative_error(full, *pieces[name], dist.all_reduce) for name, full in truth.items()}
