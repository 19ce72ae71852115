"""The two with a training loop of their own: Transformers' tensor parallelism and PyTorch's FSDP2."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from transformers import LlamaForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from whole_step.contestant import Outcome
from whole_step.entries import Entry
from whole_step.workload import ADAMW, CLIP, RANKS, StepWorkload


class TpPlanStep:
    """``from_pretrained(tp_plan="auto")``: layers split among all ranks as DTensors, embedding and norms whole on each.

    Every rank computes the loss of the whole batch. bfloat16 is autocast, as the HF ``Trainer`` has it.

    Args:
        workload: what is trained.
        folder: a checkpoint of the model, which is the only way into tensor parallelism there.
    """

    def __init__(self, workload: StepWorkload, folder: Path) -> None:
        plan = DistributedConfig(tp_plan="auto")
        self._model = LlamaForCausalLM.from_pretrained(folder, distributed_config=plan, dtype=torch.float32).train()
        self._rows, self._low_precision = workload.rows(), workload.low_precision
        parameters = list(self._model.parameters())
        # Neither the optimizer nor clipping takes both kinds in one group.
        split = [p for p in parameters if isinstance(p, DTensor)]
        whole = [p for p in parameters if not isinstance(p, DTensor)]
        self._groups = [split, whole]
        self._optimizer = torch.optim.AdamW([{"params": group} for group in self._groups], **ADAMW)

    def step(self, *, tell_norm: bool = False) -> Outcome:  # noqa: ARG002 -- it always tells
        """See :class:`~whole_step.contestant.Contestant`."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self._low_precision):
            loss = self._model(input_ids=self._rows, labels=self._rows).loss
        loss.backward()
        norm = self._clip()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return Outcome(loss.detach(), norm)

    def _clip(self) -> torch.Tensor:
        norms = [_whole(get_total_norm(_gradients(group))) for group in self._groups]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        for group in self._groups:
            clip_grads_with_norm_(group, CLIP, norm)
        return norm

    def sent(self) -> tuple[int, dict[str, int]]:
        """See :class:`~whole_step.contestant.Contestant`."""
        return 0, {}


class FullyShardedStep:
    """FSDP2: each layer, and what is left of the model, a unit of its own; each rank has its own row.

    bfloat16 is its mixed-precision policy; gradients are summed in bfloat16, too, which sends least.
    """

    def __init__(self, entry: Entry, workload: StepWorkload, model: LlamaForCausalLM) -> None:
        self._model = copy.deepcopy(model)
        options: dict[str, Any] = {
            "mesh": init_device_mesh("cpu", (RANKS,)),
            "reshard_after_forward": entry.reshard,
        }
        if workload.low_precision:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in self._model.model.layers:
            fully_shard(layer, **options)
        fully_shard(self._model, **options)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), **ADAMW)
        self._rows = workload.rows().chunk(RANKS)[dist.get_rank()]

    def step(self, *, tell_norm: bool = False) -> Outcome:  # noqa: ARG002 -- it always tells
        """See :class:`~whole_step.contestant.Contestant`."""
        loss = self._model(input_ids=self._rows, labels=self._rows).loss
        loss.backward()
        norm = _whole(clip_grad_norm_(self._model.parameters(), CLIP))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return Outcome(loss.detach(), norm)

    def sent(self) -> tuple[int, dict[str, int]]:
        """See :class:`~whole_step.contestant.Contestant`."""
        return 0, {}


def _gradients(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
