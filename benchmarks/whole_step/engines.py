"""The two under ``deepspeed.initialize``: Cuboid's meshes and DeepSpeed's own AutoTP."""

from __future__ import annotations

import copy
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.runtime.utils import clip_grad_norm_
from transformers import LlamaForCausalLM

import cuboid
from cuboid.distributed.topology import Topology
from whole_step.contestant import Outcome
from whole_step.entries import Entry
from whole_step.isolation import OwnGroups
from whole_step.workload import ADAMW, CLIP, RANKS, StepWorkload


class _Engine:
    """A model under DeepSpeed.

    Args:
        workload: what is trained.
        model: whole; stays as it is.
        section: ``tensor_parallel`` of the config.
        replicas: how many parts the global batch is cut into.
        own: which of them is this rank's.
    """

    def __init__(
        self, workload: StepWorkload, model: LlamaForCausalLM, section: dict[str, Any], replicas: int = 1, own: int = 0
    ) -> None:
        self._rows = workload.rows().chunk(replicas)[own]
        self._groups = OwnGroups()
        config = {**settings(workload, len(self._rows)), "tensor_parallel": section}
        copied = copy.deepcopy(model)
        with self._groups.used():
            self.engine, *_ = deepspeed.initialize(
                model=copied, model_parameters=list(copied.parameters()), config=config
            )

    def step(self, *, tell_norm: bool = False) -> Outcome:
        """See :class:`~whole_step.contestant.Contestant`."""
        with self._groups.used():
            loss = self.engine(input_ids=self._rows, labels=self._rows).loss
            self.engine.backward(loss)
            norm = self._norm_before_step() if tell_norm else None
            self.engine.step()
            kept = self.engine.get_global_grad_norm()
        return Outcome(loss.detach(), norm if kept is None else kept)

    def _norm_before_step(self) -> float | None:
        """Where the engine won't tell it afterwards."""
        return None


class MeshStep(_Engine):
    """Cuboid on a mesh, whose ranks are all given the whole batch, or what is their replica's of it."""

    def __init__(self, entry: Entry, workload: StepWorkload, model: LlamaForCausalLM) -> None:
        shape = workload.shape(entry.mesh, model, reshard=entry.reshard)
        place = Topology(shape, RANKS)
        own = place.coordinate(dist.get_rank()).data
        super().__init__(workload, model, workload.section(entry.mesh, reshard=entry.reshard), place.data, own)
        self._traffic = cuboid.mesh_of(self.engine).traffic

    def step(self, *, tell_norm: bool = False) -> Outcome:
        """See :class:`~whole_step.contestant.Contestant`."""
        self._traffic.reset()
        return super().step(tell_norm=tell_norm)

    def sent(self) -> tuple[int, dict[str, int]]:
        """See :class:`~whole_step.contestant.Contestant`. Without the gradient norm's sum, which DeepSpeed sends."""
        return sum(self._traffic.snapshot().values()), self._traffic.calls()


class AutoTpStep(_Engine):
    """DeepSpeed's AutoTP: replicas of tensor-parallel ranks, which are neighbours and are given the same rows."""

    def __init__(self, entry: Entry, workload: StepWorkload, model: LlamaForCausalLM) -> None:
        section: dict[str, Any] = {"autotp_size": entry.tensor_parallel}
        if entry.split_head:
            section["vocab_parallel_lm_head"] = True
        own, replicas = dist.get_rank() // entry.tensor_parallel, RANKS // entry.tensor_parallel
        super().__init__(workload, model, section, replicas, own)

    def _norm_before_step(self) -> float | None:
        if self.engine.zero_optimization_stage() > 0:
            return None
        # Without ZeRO it clips by this function, and forgets what that returns.
        infinite = float("inf")
        return float(clip_grad_norm_(self.engine.module.parameters(), max_norm=infinite, mpu=self.engine.mpu))

    def sent(self) -> tuple[int, dict[str, int]]:
        """See :class:`~whole_step.contestant.Contestant`."""
        return 0, {}


def settings(workload: StepWorkload, rows: int) -> dict[str, Any]:
    """DeepSpeed's config without ``tensor_parallel``; the same for both.

    ZeRO is off in float32, where it would only add work: no contestant has optimizer state that it could save by
    splitting among many replicas. In bfloat16 it is stage 1, without which DeepSpeed 0.19.8 tells a wrong norm under
    any tensor parallelism.
    """
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": 1 if workload.low_precision else 0},
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}},
        "steps_per_print": 10**9,
    }
    if workload.low_precision:
        config["bf16"] = {"enabled": True}
    return config


def skip_shared_memory_build() -> None:
    """Keep DeepSpeed from compiling, for half a minute, a collective that needs all ranks to share memory."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
