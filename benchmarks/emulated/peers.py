"""The peers' own 1F1B, around stages that sleep: PyTorch's and DeepSpeed's, with whole sequences."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from cuboid.errors import ConfigError
from cuboid.seq1f1b.runtime.profiler import Profiler
from cuboid.seq1f1b.schedule.actions import Action, Op
from cuboid_patches.deepspeed import SHARED_MEMORY_BUILD
from emulated.computing import Parameters, Sleeper
from emulated.work import Work, mean_square


class WholeStage(nn.Module):
    """A stage as peers take one: a module of hidden states ``[1, S, W]``, whose gradient autograd asks for."""

    def __init__(self, work: Work, stage: int) -> None:
        super().__init__()
        self.parts = Parameters(work, stage)
        self._stage = stage
        self._sleeper = Sleeper(work.duration_s((work.length,)))
        self.begin(None)

    def begin(self, recorder: Profiler | None) -> None:
        """Count micro-batches anew; ``recorder`` sees each unit from now on."""
        self._recorder = recorder
        self._counts = {op: itertools.count() for op in (Op.FORWARD, Op.BACKWARD)}

    @contextmanager
    def unit(self, op: Op) -> Iterator[None]:
        """Enter for the time of the next unit; 1F1B runs micro-batches in order, forward and backward."""
        action = Action(op, self._stage, next(self._counts[op]), 0)
        if self._recorder is None:
            yield
            return
        with self._recorder.observe(action), self._sleeper.unit(action):
            yield

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Hidden states for the next stage."""
        return _Whole.apply(given, self.parts.weight, self.parts.mix, self)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, _: torch.Tensor, __: torch.Tensor, stage: WholeStage) -> torch.Tensor:
        with stage.unit(Op.FORWARD):
            output, sums = stage.parts.run_forward(given, None)
            ctx.save_for_backward(given, sums)
            ctx.stage = stage
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        with ctx.stage.unit(Op.BACKWARD):
            found = ctx.stage.parts.run_backward(gradient, None, *ctx.saved_tensors)
        return found.given if ctx.needs_input_grad[0] else None, found.weight, found.mix, None


class TorchPipeline:
    """A contestant: see :class:`emulated.entries.Contestant`."""

    def __init__(self, work: Work, stage: int) -> None:
        self._module = WholeStage(work, stage)
        self._is_first, self._is_last = stage == 0, stage == work.stages - 1
        self._given, self._wanted = work.batch()
        piped = PipelineStage(self._module, stage, work.stages, torch.device("cpu"))
        self._schedule = Schedule1F1B(piped, work.micro_batches, loss_fn=mean_square)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self._module.parameters(), lr=0.0)

    def step(self, recorder: Profiler) -> float:
        """See :class:`emulated.entries.Contestant`."""
        self._module.begin(recorder)
        losses: list[torch.Tensor] = []
        if self._is_last:
            self._schedule.step(target=self._wanted, losses=losses, return_outputs=False)
        else:
            self._schedule.step(*([self._given] if self._is_first else []), return_outputs=False)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean().item() if self._is_last else 0.0

    def close(self) -> None:
        """See :class:`emulated.entries.Contestant`."""


class DeepSpeedPipeline:
    """A contestant: see :class:`emulated.entries.Contestant`.

    Raises:
        ConfigError: DeepSpeed doesn't compute on the CPU.
    """

    def __init__(self, work: Work, stage: int) -> None:
        if get_accelerator().device_name() != "cpu":
            raise ConfigError(
                f"DeepSpeed takes this machine's {get_accelerator().device_name()}, which gloo's ranks can't share; "
                "set the environment variable DS_ACCELERATOR=cpu"
            )
        SHARED_MEMORY_BUILD.skip()  # it takes half a minute, and point-to-point messages don't use it
        deepspeed.init_distributed()
        stages = [WholeStage(work, number) for number in range(work.stages)]
        module = PipelineModule(stages, num_stages=work.stages, loss_fn=mean_square, partition_method="uniform")
        self._module, self._is_last = stages[stage], stage == work.stages - 1
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": work.micro_batches,
            "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
            "gradient_clipping": 0.0,  # it would clip at 1 by default
            "steps_per_print": 10**9,
        }
        self._engine, *_ = deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config)
        assert self._engine.stage_id == stage == dist.get_rank()
        self._batches = itertools.cycle(zip(*(rows.split(1) for rows in work.batch()), strict=True))
        self.optimizer: torch.optim.Optimizer = self._engine.optimizer

    def step(self, recorder: Profiler) -> float:
        """See :class:`emulated.entries.Contestant`."""
        self._module.begin(recorder)
        loss: torch.Tensor = self._engine.train_batch(self._batches)
        return loss.item() if self._is_last else 0.0

    def close(self) -> None:
        """See :class:`emulated.entries.Contestant`."""
        self._engine.destroy()
