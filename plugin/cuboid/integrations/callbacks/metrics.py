"""``metrics.jsonl`` of a Trainer's run: what it logs, and the rates that it doesn't know."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments

from cuboid.errors import CheckpointError
from cuboid.integrations.callbacks.metrics_file import METRICS, MetricsFile, evaluation_losses
from cuboid.integrations.callbacks.step_times import StepTimes, TimedCallback
from cuboid.integrations.callbacks.training_engine import engine_of, mesh_if_sharded
from cuboid.integrations.callbacks.utilization import computed_share, peak_of_all_ranks

logger = logging.getLogger(__name__)


class MetricsCallback(TimedCallback):
    """Writes ``metrics.jsonl``: a line for each log of the Trainer's, with ``logging_steps=1`` for each step.

    A line is in the file as soon as its step is logged. A run that is resumed cuts the file back to its step, so that
    each step is there once. ``CuboidTrainer`` gives the rates to the other loggers too (``report_to``). DeepSpeed's
    monitors, where the config has sections for them, get each line too, by the number of samples.

    Args:
        folder: where the file is; by default ``args.output_dir``.
        tokens_per_step: of all replicas, where each step has as many; by default what the Trainer counts.
        step_flops: called on a device whose peak is known, for the FLOPs of a step's forwards and backwards, or None;
            by default the Trainer's estimate is taken.
        prefix: of the names of evaluations, left out in the file and in DeepSpeed's monitors.
        say: called with a message on the first rank.

    Attributes:
        is_evaluated: whether an evaluation is kept that the file has after the step that training goes on after.

    Raises:
        CheckpointError: on all ranks, when training begins: another file is there, or it can't be written.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        tokens_per_step: int | None = None,
        step_flops: Callable[[], float | None] | None = None,
        prefix: str = "",
        say: Callable[[str], object] = logger.warning,
    ) -> None:
        super().__init__()
        self.is_evaluated = True
        self._folder, self._prefix, self._say = folder, prefix, say
        self._tokens_per_step, self._flops_of_step = tokens_per_step, step_flops
        self._step_flops: float | None = None
        self._engine: Any = None
        self._file: MetricsFile | None = None
        #: FLOP/s of all devices together; None if that isn't known.
        self._peak_flops: float | None = None
        #: Of the operations that the Trainer counts, those that a step computes.
        self._computed_share = 1.0
        #: What the Trainer had counted at the last line.
        self._step, self._tokens, self._flops = 0, 0, 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Cut the file back to the step that training goes on after."""
        path = Path(args.output_dir if self._folder is None else self._folder) / METRICS
        self._file = MetricsFile(path, self._say, mesh_if_sharded(model), is_written=state.is_world_process_zero)
        # One that is made now may have been made before, too, if the run was killed after it.
        self._file.begin(state.global_step, is_evaluated=self.is_evaluated and not args.eval_on_start)
        self._engine = engine_of(model)
        self._peak_flops = None if model is None else peak_of_all_ranks(args.device, next(model.parameters()).dtype)
        if self._peak_flops is not None:
            if self._flops_of_step is None:
                self._computed_share = computed_share(model)
            elif state.is_world_process_zero:
                # Describing the model takes a while.
                self._step_flops = self._flops_of_step()
        self._times = StepTimes()
        self._step, self._tokens, self._flops = state.global_step, state.num_input_tokens_seen, state.total_flos

    def rates(self, state: TrainerState) -> dict[str, float]:
        """The rates since the last line, which this ends: seconds of a step, tokens per second, memory, and others."""
        steps = state.global_step - self._step
        tokens = int(state.num_input_tokens_seen) - self._tokens
        flops = self._computed_share * (state.total_flos - self._flops)
        self._step = state.global_step
        self._tokens, self._flops = int(state.num_input_tokens_seen), state.total_flos
        if self._tokens_per_step is not None:
            tokens = self._tokens_per_step * steps
        if self._flops_of_step is not None:
            flops = (self._step_flops or 0.0) * steps
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
            self._add(state.global_step, {**known, **rates, **others})
            return
        losses = evaluation_losses(logs)
        if losses:
            self._add(state.global_step, {name.removeprefix(self._prefix): x for name, x in losses.items()})

    def sync(self) -> None:
        """Bring the file up to date on its device, if training has begun; collective.

        Raises:
            CheckpointError: that isn't possible.
        """
        if self._file is not None:
            self._file.sync()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Bring the file up to date on its device."""
        try:
            self.sync()
        except CheckpointError as error:
            if state.is_world_process_zero:
                self._say(str(error))

    def _add(self, step: int, figures: Mapping[str, float | None]) -> None:
        """Add a line, and give it to the monitors that DeepSpeed's config names (``tensorboard``, …)."""
        assert self._file is not None
        self._file.add(step, figures)
        engine = self._engine
        if self._file.is_written and engine is not None and engine.monitor.enabled:
            known = [(name, value) for name, value in figures.items() if value is not None and math.isfinite(value)]
            # By the number of samples, as DeepSpeed's own figures are.
            samples = engine.global_samples
            engine.monitor.write_events([(f"Train/Samples/{name}", value, samples) for name, value in known])
