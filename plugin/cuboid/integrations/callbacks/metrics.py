"""``metrics.jsonl`` of a Trainer's run: what it logs, and the rates that it doesn't know."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments

from cuboid.errors import CheckpointError
from cuboid.integrations.callbacks.metrics_file import METRICS, MetricsFile, evaluation_losses
from cuboid.integrations.callbacks.step_times import StepTimes, TimedCallback
from cuboid.integrations.callbacks.training_engine import mesh_if_sharded
from cuboid.integrations.callbacks.utilization import computed_share, peak_of_all_ranks

logger = logging.getLogger(__name__)


class MetricsCallback(TimedCallback):
    """Writes ``metrics.jsonl``: a line for each log of the Trainer's, with ``logging_steps=1`` for each step.

    A line is in the file as soon as its step is logged. A run that is resumed cuts the file back to its step, so that
    each step is there once. ``CuboidTrainer`` gives the rates to the other loggers too (``report_to``).

    Args:
        folder: where the file is; by default ``args.output_dir``.

    Raises:
        CheckpointError: on all ranks, when training begins: another file is there, or it can't be written.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        super().__init__()
        self._folder = folder
        self._file: MetricsFile | None = None
        #: FLOP/s of all devices together; None if that isn't known.
        self._peak_flops: float | None = None
        #: Of the operations that the Trainer counts, those that a step computes.
        self._computed_share = 1.0
        #: What the Trainer had counted at the last line.
        self._tokens, self._flops = 0, 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Cut the file back to the step that training goes on after."""
        path = Path(args.output_dir if self._folder is None else self._folder) / METRICS
        self._file = MetricsFile(path, logger.warning, mesh_if_sharded(model), is_written=state.is_world_process_zero)
        self._file.begin(state.global_step)
        self._peak_flops = None if model is None else peak_of_all_ranks(args.device, next(model.parameters()).dtype)
        if model is not None and self._peak_flops is not None:
            self._computed_share = computed_share(model)
        self._times = StepTimes()
        self._tokens, self._flops = state.num_input_tokens_seen, state.total_flos

    def rates(self, state: TrainerState) -> dict[str, float]:
        """The rates since the last line, which this ends: seconds of a step, tokens per second, memory, and others."""
        tokens = int(state.num_input_tokens_seen) - self._tokens
        flops = self._computed_share * (state.total_flos - self._flops)
        self._tokens, self._flops = int(state.num_input_tokens_seen), state.total_flos
        left = state.max_steps - state.global_step
        return self._times.rates(left, tokens=tokens, flops=flops, peak_flops=self._peak_flops)

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
        losses = evaluation_losses(logs)
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
                if state.is_world_process_zero:
                    logger.warning("%s", error)
