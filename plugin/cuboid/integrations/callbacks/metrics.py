"""``metrics.jsonl`` of a Trainer's run: what it logs, and the rates that it doesn't know."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cuboid.errors import CheckpointError
from cuboid.failures.rank_agreement import run_on_all_ranks
from cuboid.integrations.callbacks import memory_use
from cuboid.integrations.callbacks.metrics_file import METRICS, MetricsFile
from cuboid.integrations.callbacks.training_engine import mesh_if_sharded
from cuboid.integrations.callbacks.utilization import peak_flops

logger = logging.getLogger(__name__)


class StepTimes:
    """How long steps take, and how much of the time none runs."""

    def __init__(self) -> None:
        self._begun = self._since = time.perf_counter()
        #: Since the last :meth:`take`.
        self._steps, self._busy_s = 0, 0.0
        self._first_s, self._later_s, self._later = 0.0, 0.0, 0

    def begin(self) -> None:
        """A step begins."""
        self._begun = time.perf_counter()

    def end(self) -> None:
        """It ends."""
        seconds = time.perf_counter() - self._begun
        if not self._first_s:
            self._first_s = seconds
        else:
            self._later_s, self._later = self._later_s + seconds, self._later + 1
        self._steps, self._busy_s = self._steps + 1, self._busy_s + seconds

    @property
    def mean_s(self) -> float:
        """Mean seconds of a step, without the first one, which includes warm-up; 0 before there is one."""
        return self._later_s / self._later if self._later else self._first_s

    def take(self) -> tuple[int, float, float]:
        """Since the last call: the number of steps, their seconds, and the share of the time in which none ran."""
        now = time.perf_counter()
        taken = self._steps, self._busy_s, 1 - self._busy_s / max(now - self._since, self._busy_s, 1e-9)
        self._steps, self._busy_s, self._since = 0, 0.0, now
        return taken


class MetricsCallback(TrainerCallback):
    """Writes ``metrics.jsonl``: a line for each log of the Trainer's, with ``logging_steps=1`` for each step.

    A line is in the file as soon as its step is logged. A run that is resumed cuts the file back to its step, so that
    each step is there once. ``CuboidTrainer`` gives the rates to the other loggers too (``report_to``).

    Args:
        folder: where the file is; by default ``args.output_dir``.

    Raises:
        CheckpointError: on all ranks, when training begins: another file is there, or it can't be written.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = folder
        self._file: MetricsFile | None = None
        #: FLOP/s of all devices together; None if that isn't known.
        self._peak_flops: float | None = None
        self._times = StepTimes()
        #: What the Trainer had counted at the last line.
        self._tokens, self._flops = 0, 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Cut the file back to the step that training goes on after."""
        path = Path(args.output_dir if self._folder is None else self._folder) / METRICS
        self._file = MetricsFile(path, logger.warning) if state.is_world_process_zero else None

        def begin() -> None:
            if self._file is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file.begin(state.global_step)

        run_on_all_ranks(begin, mesh_if_sharded(model), what="start of the metrics")
        peak = None if model is None else peak_flops(args.device, next(model.parameters()).dtype)
        self._peak_flops = None if peak is None else peak * (dist.get_world_size() if dist.is_initialized() else 1)
        self._times = StepTimes()
        self._tokens, self._flops = state.num_input_tokens_seen, state.total_flos

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note when a step begins."""
        self._times.begin()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note how long it took."""
        self._times.end()

    def rates(self, state: TrainerState) -> dict[str, float]:
        """The rates since the last line, which this ends: seconds of a step, tokens per second, memory, and others."""
        steps, busy_s, idle_share = self._times.take()
        tokens, flops = int(state.num_input_tokens_seen) - self._tokens, state.total_flos - self._flops
        self._tokens, self._flops = int(state.num_input_tokens_seen), state.total_flos
        rates: dict[str, float] = {}
        if steps:
            rates["step_s"] = busy_s / steps
            if tokens:
                rates["tokens_per_s"] = tokens / busy_s
        rates["memory_bytes"] = memory_use.now_bytes()
        rates["left_s"] = (state.max_steps - state.global_step) * self._times.mean_s
        if steps and self._peak_flops is not None:
            rates["mfu"] = flops / (busy_s * self._peak_flops)
        rates["idle_share"] = idle_share
        return rates

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write a line of a step, or of an evaluation."""
        if self._file is None or logs is None:
            return
        if "loss" in logs:
            known = {name: logs.get(name) for name in ("loss", "learning_rate", "grad_norm")}
            rates = {} if "idle_share" in logs else self.rates(state)
            others = {name: value for name, value in logs.items() if name not in known and name != "epoch"}
            self._file.add(state.global_step, {**known, **rates, **others})
            return
        # The Trainer's last log has the mean of the training losses.
        losses = {name: value for name, value in logs.items() if name.endswith("_loss") and name != "train_loss"}
        if losses:
            self._file.add(state.global_step, losses)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Bring the file up to date on its device."""
        if self._file is not None:
            try:
                self._file.sync()
            except CheckpointError as error:
                logger.warning("%s", error)
