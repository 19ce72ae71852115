"""The pipelines that are compared: Cuboid's, DeepSpeed's own, and PyTorch's 1F1B.

A step is the forward and backward of M micro-batches and one step of plain SGD, in all of them. What stages compute is
a task's business: :class:`RealTask` here, or the emulated one of :mod:`contestants.emulation`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from harness.llama import Llama
from network.serving import Contestant
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import LlamaForCausalLM

import cuboid
from cuboid.errors import ConfigError
from cuboid.models.batch.batch import IGNORE_INDEX
from cuboid.models.stages.model_costs import model_sizes
from cuboid.seq1f1b.runtime.memory import LiveActivations, MeteredPool
from cuboid.seq1f1b.runtime.profiler import Profiler
from cuboid.seq1f1b.schedule.actions import Action
from cuboid.seq1f1b.schedule.partition import cut_sequence, even_cut, segment_cost
from cuboid.seq1f1b.schedule.schedules import SCHEDULES, PipelineShape
from cuboid.seq1f1b.schedule.simulator import Span, Timeline, simulate
from cuboid.seq1f1b.schedule.timeline_trace import read_chrome_trace
from cuboid.seq1f1b.schedule.unit_costs import ModelSizes, unit_flops
from cuboid_patches.deepspeed import SHARED_MEMORY_BUILD

_SEED = 20240605
_PEERS = {"deepspeed": "DeepSpeed PipelineEngine", "torch": "torch.distributed.pipelining 1F1B"}
#: Counted from 1; the first one warms up.
_TRACED_STEP = 2


# --- what is done ---


class Task:
    """A step of one pipeline: P stages, M micro-batches of one sequence of S tokens each. Hashable.

    Attributes:
        learning_rate: of SGD.
        is_emulated: whether stages record their units themselves, and each step is to be checked.
        sizes: what the model multiplies.
    """

    stages: int
    micro_batches: int
    length: int
    layers: int
    learning_rate: float
    is_emulated: bool
    sizes: ModelSizes

    @property
    def balance(self) -> tuple[int, ...]:
        """Layers of each stage."""
        return (self.layers // self.stages,) * self.stages

    def cost(self, lengths: Sequence[int]) -> Callable[[Action], float]:
        """Of each unit, in seconds or in any unit of time; by default its operations."""
        return unit_flops(self.sizes, self.balance, tuple(lengths))

    def stage(self, number: int) -> nn.Module:
        """As peers take one."""
        raise NotImplementedError

    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the first stage is given and what the last one should give, by micro-batch; the same every time."""
        raise NotImplementedError

    def loss(self, output: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Mean of a micro-batch."""
        raise NotImplementedError


@dataclass(frozen=True)
class RealTask(Llama, Task):
    """A Llama whose stages really compute; all is in float32."""

    length: int = 2048
    hidden: int = 320
    intermediate: int = 864
    heads: int = 4
    key_value_heads: int | None = 2
    #: Bytes for tokens: with so small a head, all stages have the same work, as the theory assumes.
    vocabulary: int = 256
    stages: int = 2
    micro_batches: int = 2
    learning_rate: float = 1e-4
    is_emulated = False

    @property
    def sizes(self) -> ModelSizes:
        return model_sizes(self.config())

    def stage(self, number: int) -> nn.Module:
        return PlainStage(self.model(), number, self.stages)

    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and labels, shifted, ``[M, S]`` each."""
        generator = torch.Generator().manual_seed(_SEED)
        ids = torch.randint(self.vocabulary, (self.micro_batches, self.length), generator=generator)
        return ids, nn.functional.pad(ids[:, 1:], (0, 1), value=IGNORE_INDEX)

    def loss(self, output: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1).float(), wanted.flatten(), ignore_index=IGNORE_INDEX)


class PlainStage(nn.Module):
    """A stage as users of the peers write one, of Hugging Face's own layers: from ids ``[B, S]`` on the first stage or
    hidden states ``[B, S, H]`` to hidden states, or logits ``[B, S, V]`` on the last."""

    def __init__(self, model: LlamaForCausalLM, stage: int, stages: int) -> None:
        super().__init__()
        each = len(model.model.layers) // stages
        self.layers = model.model.layers[stage * each : (stage + 1) * each]
        self.rotary = model.model.rotary_emb
        self.embedding = model.model.embed_tokens if stage == 0 else None
        self.head = nn.Sequential(model.model.norm, model.lm_head) if stage == stages - 1 else None

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        hidden = given if self.embedding is None else self.embedding(given)
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        cosine_and_sine = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, position_ids=positions, position_embeddings=cosine_and_sine)
        return hidden if self.head is None else self.head(hidden)


# --- who does it ---


@dataclass(frozen=True)
class Entry:
    """Which pipeline takes part.

    Args:
        kind: "cuboid", "deepspeed" or "torch".
        schedule: a name in :data:`~cuboid.seq1f1b.schedule.schedules.SCHEDULES`; the peers have "1f1b".
        segments: k; 1 for all but "seq1f1b".
        partition: where sequences are cut, "flops" or "even".
    """

    kind: str
    schedule: str = "1f1b"
    segments: int = 1
    partition: str = "flops"

    @property
    def name(self) -> str:
        """As it stands in pictures."""
        if self.kind != "cuboid":
            return _PEERS[self.kind]
        segments = f", k={self.segments}" if self.schedule == "seq1f1b" else ""
        return f"Cuboid {self.schedule}{segments}" + (f", {self.partition} cut" if self.segments > 1 else "")

    def lengths(self, task: Task) -> tuple[int, ...]:
        """Tokens of each segment."""
        if self.partition == "even":
            return even_cut(task.length, self.segments)
        return cut_sequence(task.length, self.segments, cost=segment_cost(task.sizes))

    def shape(self, task: Task) -> PipelineShape:
        """Of its schedule."""
        return PipelineShape(task.stages, task.micro_batches, self.segments)

    def theory(self, task: Task) -> float:
        """The bubble of equal units: (P − 1)/(kM + P − 1), for GPipe and 1F1B with k = 1."""
        others = task.stages - 1
        return others / (self.segments * task.micro_batches + others)

    def simulated(self, task: Task, transfer_s: Callable[[Action], float] | None = None) -> Timeline:
        """The step as it would be with nothing but the units' times, and perhaps those of messages. For bytes it has
        tokens."""
        lengths, shape = self.lengths(task), self.shape(task)
        kept: Callable[[Action], int] = lambda action: lengths[action.segment]  # noqa: E731
        schedule = SCHEDULES[self.schedule](shape)
        return simulate(schedule, shape, task.cost(lengths), transfer_s=transfer_s, kept_bytes=kept)


def cuts(segments: Sequence[int]) -> list[Entry]:
    """Cuboid with each number of segments and both cuts."""
    return [
        Entry("cuboid", "seq1f1b", k, cut) for k in segments for cut in (("flops", "even") if k > 1 else ("flops",))
    ]


class First(NamedTuple):
    """What one rank saw of a first step: its loss on the last stage, the sum of its gradients' squares, and the peak of
    its live activations."""

    loss: float
    squares: float
    peak_bytes: int


def together(first: Sequence[First]) -> dict[str, Any]:
    """Loss, gradient norm and each stage's peak, of all ranks."""
    norm = math.sqrt(sum(each.squares for each in first))
    return {"loss": first[-1].loss, "gradient_norm": norm, "peak_bytes": [each.peak_bytes for each in first]}


class Pipeline(Contestant):
    """A stage of one pipeline.

    Attributes:
        optimizer: that changes the weights.
        pool: of the key/value stores, where there are any.
        loss: of the last step, on the last stage.
    """

    optimizer: torch.optim.Optimizer
    pool: MeteredPool | None = None
    loss = 0.0

    def __init__(self, task: Task) -> None:
        self.task, self.number = task, dist.get_rank()
        self.is_last = self.number == task.stages - 1
        self._recorder: Profiler | None = None
        self._squares = 0.0

    def first(self) -> First:
        """A step, in which all but the time is measured."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]

        def note(*_: object) -> None:
            gradients = (p.grad for p in parameters if p.grad is not None)
            self._squares = sum(gradient.double().square().sum().item() for gradient in gradients)

        hook = self.optimizer.register_step_pre_hook(note)
        self.begin()
        with LiveActivations(parameters, self.pool) as live:
            self.step()
        if not self.task.is_emulated:
            # It would take time that counts.
            hook.remove()
        return First(self.loss, self._squares, live.peak_bytes)

    def begin(self) -> None:
        """Record units anew, where stages do."""
        self._recorder = Profiler(torch.device("cpu")) if self.task.is_emulated else None

    def figures(self) -> dict[str, Any]:
        """Loss, sum of the gradients' squares and units, where each step is to be checked."""
        if self._recorder is None:
            return {}
        spans = tuple(Span(action, *times_s) for action, times_s in zip(*self._recorder.times_s(), strict=True))
        return {"loss": self.loss, "squares": self._squares, "spans": spans}


class TorchPipeline(Pipeline):
    """``torch.distributed.pipelining``'s ``Schedule1F1B``."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._module = task.stage(self.number)
        stage = PipelineStage(self._module, self.number, task.stages, torch.device("cpu"))
        self._schedule = Schedule1F1B(stage, task.micro_batches, loss_fn=task.loss)
        self._given, self._wanted = task.data()
        self.optimizer = torch.optim.SGD(self._module.parameters(), lr=task.learning_rate)

    def begin(self) -> None:
        super().begin()
        if self._recorder is not None:
            self._module.begin(self._recorder)

    def step(self) -> None:
        losses: list[torch.Tensor] = []
        if self.is_last:
            self._schedule.step(target=self._wanted, losses=losses, return_outputs=False)
        else:
            self._schedule.step(*([self._given] if self.number == 0 else []), return_outputs=False)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss = torch.stack(losses).mean().item() if self.is_last else 0.0


class _UnderDeepSpeed(Pipeline):
    """What DeepSpeed's engine and Cuboid's share."""

    def _start(self, module: nn.Module, batches: Iterator[Any], **config: Any) -> None:
        self.engine, *_ = deepspeed.initialize(
            model=module, model_parameters=list(module.parameters()), config={**self._config(), **config}
        )
        self._batches = batches
        self.optimizer = self.engine.optimizer

    def _config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.task.micro_batches,
            "optimizer": {"type": "SGD", "params": {"lr": self.task.learning_rate}},
            "gradient_clipping": 0.0,  # it would clip at 1 by default
            "steps_per_print": 10**9,
        }

    def _micro_batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The task's batch over and over, row by row."""
        return itertools.cycle(zip(*(rows.split(1) for rows in self.task.data()), strict=True))

    def step(self) -> None:
        loss: torch.Tensor = self.engine.train_batch(self._batches)
        self.loss = loss.item() if self.is_last else 0.0

    def close(self) -> None:
        self.engine.destroy()
        super().close()


class DeepSpeedPipeline(_UnderDeepSpeed):
    """DeepSpeed's ``PipelineEngine``.

    Raises:
        ConfigError: DeepSpeed doesn't compute on the CPU.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        if get_accelerator().device_name() != "cpu":
            raise ConfigError(
                f"DeepSpeed takes this machine's {get_accelerator().device_name()}, which gloo's ranks can't share; "
                "set the environment variable DS_ACCELERATOR=cpu"
            )
        SHARED_MEMORY_BUILD.skip()  # it takes half a minute, and point-to-point messages don't use it
        deepspeed.init_distributed()
        stages = [task.stage(number) for number in range(task.stages)]
        self._module = stages[self.number]
        module = PipelineModule(stages, num_stages=task.stages, loss_fn=task.loss, partition_method="uniform")
        self._start(module, self._micro_batches())
        assert self.engine.stage_id == self.number

    def begin(self) -> None:
        super().begin()
        if self._recorder is not None:
            self._module.begin(self._recorder)


class CuboidPipeline(_UnderDeepSpeed):
    """Cuboid as users have it: given the whole model, which it cuts.

    Args:
        entry: segments and cut.
        task: whole.
        traces: folder for what it writes of its second step.
    """

    def __init__(self, entry: Entry, task: RealTask, traces: Path) -> None:
        super().__init__(task)
        self._trace = traces / f"p{task.stages}_m{task.micro_batches}_k{entry.segments}_{entry.partition}"
        self._steps = 0
        pipeline = {
            "engine": "seq1f1b",
            "stages": task.stages,
            "segments": entry.segments,
            "partition": entry.partition,
            "stage_balance": list(task.balance),
            "trace": str(self._trace),
            "trace_step": _TRACED_STEP,
        }
        model = cuboid.shard(task.model(), {**self._config(), "pipeline": pipeline})
        batches = ({"input_ids": ids, "shift_labels": labels} for ids, labels in self._micro_batches())
        self._start(model, batches, pipeline=pipeline)
        self.pool = MeteredPool()
        self.engine.pipeline.pool = self.pool

    def step(self) -> None:
        super().step()
        self._steps += 1

    def figures(self) -> dict[str, Any]:
        """After the second step its timeline, on the first rank."""
        if self._steps != _TRACED_STEP or self.number > 0:
            return {}
        return {"timeline": read_chrome_trace(self._trace / f"step_{_TRACED_STEP}.json")}


# --- how they are shown ---


def row_name(row: dict[str, Any]) -> str:
    """A peer, or Cuboid's cut, for tables."""
    if row["kind"] != "cuboid":
        return {"torch": "`torch.distributed.pipelining`", "deepspeed": "DeepSpeed `PipelineEngine`"}[row["kind"]]
    return f"k = {row['segments']}" + (f", {row['partition']}" if row["segments"] > 1 else "")


def timeline_text(timeline: Timeline) -> list[list[str]]:
    """A timeline for the record: of each rank its units, with start and end in seconds."""
    return [[f"{span.action} {span.start_s:.6f} {span.end_s:.6f}" for span in spans] for spans in timeline.spans]


def read_timeline(text: list[list[str]]) -> Timeline:
    """The inverse of :func:`timeline_text`."""
    ranks = [[line.split() for line in units] for units in text]
    spans = [
        tuple(Span(Action.parse(action), float(start_s), float(end_s)) for action, start_s, end_s in units)
        for units in ranks
    ]
    return Timeline(tuple(spans), (0,) * len(spans))
