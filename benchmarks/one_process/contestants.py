"""The same training step with and without Cuboid, by hand and under DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import deepspeed
import torch
from llama import llama_config
from transformers import LlamaForCausalLM

import cuboid
from cuboid_patches.deepspeed import SHARED_MEMORY_BUILD

_SEED = 0
_LEARNING_RATE = 1e-4
_SHARDED = {"tensor_parallel": {"mode": "3d_tensor", "mesh": {"batch": 1, "sequence": 1, "hidden": 1}}}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Workload:
    """Sizes of a Llama and of its batch."""

    batch: int = 8
    length: int = 512
    hidden: int = 512
    intermediate: int = 1376
    heads: int = 8
    layers: int = 4
    vocabulary: int = 4096

    def model(self, dtype: torch.dtype) -> LlamaForCausalLM:
        """Every time with the same weights."""
        torch.manual_seed(_SEED)
        config = llama_config(self, layers=self.layers, vocabulary=self.vocabulary)
        return LlamaForCausalLM(config).to(dtype).train()

    def ids(self) -> torch.Tensor:
        """Tokens ``[B, S]``, which are their own labels; the same every time."""
        generator = torch.Generator().manual_seed(_SEED)
        return torch.randint(self.vocabulary, (self.batch, self.length), generator=generator)

    def numbers(self) -> dict[str, Any]:
        """For the record."""
        return {**asdict(self), "model": LlamaForCausalLM.__name__}


#: In a few seconds, to see whether everything works. The times say nothing.
QUICK = Workload(batch=2, length=64, hidden=64, intermediate=96, heads=4, layers=2, vocabulary=128)


@dataclass(frozen=True)
class Entry:
    """Which training takes part.

    Args:
        engine: "plain" for PyTorch's own optimizer, or "deepspeed".
        has_cuboid: on a mesh of 1×1×1, or not at all.
        dtype: of :data:`DTYPES`.
    """

    engine: str
    has_cuboid: bool
    dtype: str

    @property
    def name(self) -> str:
        """As it stands in tables."""
        peer = {"plain": "Hugging Face", "deepspeed": "DeepSpeed"}[self.engine]
        return f"{peer} with Cuboid" if self.has_cuboid else peer

    def build(self, workload: Workload) -> Contestant:
        """Set up the training."""
        return _plain(self, workload) if self.engine == "plain" else _under_deepspeed(self, workload)


def pairs(dtypes: list[str], engines: list[str]) -> list[tuple[Entry, Entry]]:
    """Without Cuboid and with it, for each dtype and engine."""
    return [
        (Entry(engine, has_cuboid=False, dtype=dtype), Entry(engine, has_cuboid=True, dtype=dtype))
        for dtype in dtypes
        for engine in engines
    ]


class Contestant:
    """One training.

    Args:
        model: what is called.
        optimizer: that changes the weights, whatever else is around it.
        backward: from the loss.
        update: the weights, after which the gradients are gone.
        ids: tokens of the batch.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        backward: Callable[[torch.Tensor], None],
        update: Callable[[], None],
        ids: torch.Tensor,
    ) -> None:
        self._model, self._optimizer, self._ids = model, optimizer, ids
        self._backward, self._update = backward, update

    def step(self) -> torch.Tensor:
        """Forward, backward and AdamW; the loss."""
        loss: torch.Tensor = self._model(input_ids=self._ids, labels=self._ids, use_cache=False).loss
        self._backward(loss)
        self._update()
        return loss.detach()

    @contextmanager
    def noting_gradients(self) -> Iterator[list[torch.Tensor]]:
        """Copies of what the optimizer is given while the ``with`` block lasts."""
        noted: list[torch.Tensor] = []

        def note(*_: object) -> None:
            for group in self._optimizer.param_groups:
                noted.extend(p.grad.double().flatten() for p in group["params"] if p.grad is not None)

        hook = self._optimizer.register_step_pre_hook(note)
        try:
            yield noted
        finally:
            hook.remove()


def _plain(entry: Entry, workload: Workload) -> Contestant:
    model: Any = workload.model(DTYPES[entry.dtype])
    if entry.has_cuboid:
        model = cuboid.shard(model, {**_SHARDED, "train_micro_batch_size_per_gpu": workload.batch})
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Contestant(model, optimizer, torch.Tensor.backward, update, workload.ids())


def _under_deepspeed(entry: Entry, workload: Workload) -> Contestant:
    SHARED_MEMORY_BUILD.skip()  # it takes half a minute, and one process has nobody to share with
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": workload.batch,
        "optimizer": {"type": "AdamW", "params": {"lr": _LEARNING_RATE, "torch_adam": True}},
        "gradient_clipping": 0.0,  # it would clip at 1 by default
        "steps_per_print": 10**9,
        **(_SHARDED if entry.has_cuboid else {}),
    }
    if entry.dtype == "bfloat16":
        config |= {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    model = workload.model(torch.float32)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    # ZeRO wraps the optimizer that changes the weights.
    optimizer = engine.optimizer
    while not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return Contestant(engine, optimizer, engine.backward, engine.step, workload.ids())
