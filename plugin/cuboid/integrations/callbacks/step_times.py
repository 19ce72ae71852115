"""How long a run's steps and saves take: the rates of its metrics, and whether there is time for one more step."""

from __future__ import annotations

import time
from typing import Any

import psutil
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cuboid.integrations.callbacks import memory_use


class StepTimes:
    """The clock of a run: of its optimizer steps, without evaluations and saves between them.

    Args:
        earlier_s: mean seconds of a step before the run was resumed, where that is known.

    Attributes:
        count: steps that this process has made.
        longest_save_s: seconds of its longest save of a checkpoint.
    """

    def __init__(self, earlier_s: float = 0.0) -> None:
        self.count, self.longest_save_s = 0, 0.0
        self._has_begun = False
        self._begun = self._since = time.perf_counter()
        self._first_s, self._later_s = earlier_s, 0.0
        #: Since the last :meth:`rates`.
        self._steps, self._busy_s = 0, 0.0

    def begin(self) -> None:
        """A step begins."""
        self._has_begun, self._begun = True, time.perf_counter()

    def end(self) -> None:
        """It ends."""
        seconds = time.perf_counter() - self._begun
        if self.count:
            self._later_s += seconds
        else:
            self._first_s = seconds
        self.count += 1
        self._steps, self._busy_s = self._steps + 1, self._busy_s + seconds

    def saved(self, began: float) -> None:
        """A save ends that began at this :func:`time.perf_counter`."""
        self.longest_save_s = max(self.longest_save_s, time.perf_counter() - began)

    @property
    def mean_s(self) -> float:
        """Mean seconds of a step, without the first one, which includes warm-up, as long as there are others.

        Before this process has made one, that of the earlier ones, or 0.
        """
        return self._later_s / (self.count - 1) if self.count > 1 else self._first_s

    def is_late(self, max_time_s: float) -> bool:
        """Whether another step and the save after it would end later than so many seconds after the process began.

        Not before its first step: else a run that is started again and again would never get further.
        """
        elapsed_s = time.time() - psutil.Process().create_time()
        return self._has_begun and elapsed_s + self.mean_s + self.longest_save_s > max_time_s

    def rates(self, steps_left: int, *, tokens: int, flops: float | None, peak_flops: float | None) -> dict[str, float]:
        """The figures of ``metrics.jsonl`` for the time since the last call, which this ends.

        Args:
            steps_left: steps until the end of the run.
            tokens: that all replicas have trained on in that time; 0 if that isn't known.
            flops: of their forwards and backwards; None or 0 likewise.
            peak_flops: FLOP/s of all devices together; None if unknown.
        """
        now = time.perf_counter()
        steps, busy_s, passed_s = self._steps, self._busy_s, now - self._since
        self._steps, self._busy_s, self._since = 0, 0.0, now
        rates: dict[str, float] = {}
        if steps:
            rates["step_s"] = busy_s / steps
            if tokens:
                rates["tokens_per_s"] = tokens / busy_s
        rates["memory_bytes"] = memory_use.now_bytes()
        rates["left_s"] = steps_left * self.mean_s
        if steps and flops and peak_flops is not None:
            rates["mfu"] = flops / (busy_s * peak_flops)
        rates["idle_share"] = 1 - busy_s / max(passed_s, busy_s, 1e-9)
        return rates


class TimedCallback(TrainerCallback):
    """A callback that knows how long the steps of a Trainer's run take."""

    def __init__(self) -> None:
        self._times = StepTimes()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note when a step begins."""
        self._times.begin()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Note how long it took."""
        self._times.end()
        return None
