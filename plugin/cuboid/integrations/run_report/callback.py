"""``report.json`` and ``loss.png`` of a Trainer's run."""

from __future__ import annotations

import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from cuboid.errors import ConfigError, CuboidError
from cuboid.failures.rank_agreement import run_on_all_ranks
from cuboid.integrations.callbacks.step_times import StepTimes, TimedCallback
from cuboid.integrations.callbacks.training_engine import engine_of
from cuboid.integrations.run_report.figures import make_report
from cuboid.integrations.run_report.schema import CURVE, HeldoutPoint
from cuboid.models.sharded.sharded_model import mesh_of, unwrap


class ReportCallback(TimedCallback, ExportableState):
    """Writes ``report.json`` and ``loss.png`` into ``output_dir`` when the training ends, as ``cuboid train`` does.

    Of the whole run, resumed or not: each loss that the Trainer logged (with ``logging_steps=1`` that of each step) and
    each evaluation; speed, and with ``include_num_input_tokens_seen`` its tokens; and of each rank its parameters, peak
    memory and the bytes that it sends in a step. List it after
    :class:`~cuboid.integrations.callbacks.interrupt.InterruptCallback`, with which a run that is stopped has no report.

    Raises:
        ConfigError: when training begins, the model isn't in an engine of Cuboid's.
        CuboidError: on all ranks: the files can't be written.
    """

    def __init__(self) -> None:
        super().__init__()
        self._resumed_after: list[int] = []
        #: Before this process.
        self._earlier_s = 0.0
        self._began = time.perf_counter()
        self._sent_before: Counter[str] = Counter()
        self._sent: Counter[str] = Counter()
        self._engine: Any = None

    def state(self) -> dict[str, Any]:
        """What the report of a resumed run needs, for JSON; the Trainer puts it into its checkpoints."""
        return {"args": {}, "attributes": {"resumed_after": self._resumed_after, "wall_s": self._wall_s}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Find out whether the run is resumed."""
        self._engine = engine_of(model)
        if self._engine is None:
            raise ConfigError(
                "ReportCallback reports on an engine of Cuboid's; give the Trainer a config with tensor_parallel.mode "
                "3d_tensor or pipeline.engine seq1f1b"
            )
        self._began, self._times = time.perf_counter(), StepTimes()
        self._earlier_s, self._resumed_after = 0.0, []
        # A checkpoint from before this callback was added has none, and the Trainer couldn't save the next one.
        saved = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if state.global_step:
            attributes = saved.get("attributes", {}) if isinstance(saved, dict) else {}
            self._earlier_s = float(attributes.get("wall_s", 0.0))
            earlier = [*attributes.get("resumed_after", ()), state.global_step]
            self._resumed_after = list(dict.fromkeys(earlier))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note when a step begins, and what was sent before."""
        self._sent_before = Counter(mesh_of(self._engine).comm_counter.snapshot())
        super().on_step_begin(args, state, control, **kwargs)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Note how long it took, and what it sent."""
        super().on_step_end(args, state, control, **kwargs)
        self._sent = Counter(mesh_of(self._engine).comm_counter.snapshot()) - self._sent_before
        return None

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the report."""
        engine, self._engine = self._engine, None
        tokens = int(state.num_input_tokens_seen)
        model_config: Any = unwrap(engine.module).config
        report = make_report(
            engine,
            model=str(getattr(model_config, "_name_or_path", "") or model_config.model_type),
            data=None,
            config=dict(args.deepspeed_plugin.deepspeed_config) if args.deepspeed_plugin is not None else {},
            steps=state.global_step,
            resumed_after=self._resumed_after,
            seed=args.seed if args.data_seed is None else args.data_seed,
            sequence_length=None,
            train_losses=_train_losses(state),
            heldout=_evaluations(state),
            tokens_per_step=tokens / state.global_step if tokens and state.global_step else None,
            times=self._times,
            wall_s=self._wall_s,
            sent_bytes=dict(self._sent),
        )

        def write() -> None:
            if not state.is_world_process_zero:
                return
            # Imported here, because matplotlib takes a second and only rank 0 needs it.
            from cuboid.integrations.run_report.curve import draw

            try:
                report.write(Path(args.output_dir))
                draw(report, Path(args.output_dir) / CURVE)
            except OSError as error:
                raise CuboidError(f"the report can't be written: {error}") from error

        run_on_all_ranks(write, mesh_of(engine), what="report")

    @property
    def _wall_s(self) -> float:
        return self._earlier_s + time.perf_counter() - self._began


def _train_losses(state: TrainerState) -> list[float]:
    """The loss of each step, where it was logged; else NaN."""
    logged = {int(entry["step"]): float(entry["loss"]) for entry in state.log_history if "loss" in entry}
    return [logged.get(step, math.nan) for step in range(1, state.global_step + 1)]


def _evaluations(state: TrainerState) -> list[HeldoutPoint]:
    """The losses of the evaluations: of the one set, or of several by name, which the Trainer logs one by one."""
    points: dict[int, HeldoutPoint] = {}
    for entry in state.log_history:
        for name, value in entry.items():
            if name.startswith("eval_") and name.endswith("_loss"):
                step = int(entry["step"])
                point = points.get(step, HeldoutPoint(step=step, loss=None))
                kind = name.removeprefix("eval_").removesuffix("loss").removesuffix("_")
                change = {"others": {**point.others, kind: value}} if kind else {"loss": value}
                points[step] = point.model_copy(update=change)
    return list(points.values())
