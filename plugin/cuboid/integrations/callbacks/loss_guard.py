"""A loss that isn't finite, or that jumps up: named before the weights are updated by it, and what happens then."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from statistics import fmean, pstdev
from typing import Any, Literal

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from cuboid.distributed.collectives import sum_over_ranks
from cuboid.distributed.topology import AXES
from cuboid.errors import ConfigError, CuboidError
from cuboid.failures.rank_agreement import run_on_all_ranks
from cuboid.integrations.callbacks.training_engine import engine_of
from cuboid.models.sharded.sharded_model import mesh_of, unwrap
from cuboid.models.stages.stage_model import StageModel

logger = logging.getLogger(__name__)

Policy = Literal["stop", "skip", "continue"]
_POLICIES = ("stop", "skip", "continue")
#: Micro-batches that a message names, at most.
_NAMED = 8


class LossGuardCallback(TrainerCallback, ExportableState):
    """Names the step, replica, ranks and micro-batch of a bad loss, and decides what happens to the step's update.

    A loss is bad if it isn't a finite number, or (``spike``) if it is far above those of the last steps. All ranks
    decide alike, before the update: one more all-reduce a step, of a number for each micro-batch. A loop of its own
    calls :meth:`watch` in place of the Trainer's events.

    Args:
        policy: what to do. ``"stop"``: an error on all ranks; the weights are those before the step. ``"skip"``: the
            step's gradients are dropped; weights and optimizer state stay as they are to the last bit, while the number
            of steps and the learning rate's schedule go on. ``"continue"``: nothing but the message.
        spike: standard deviations of the last ``window`` losses, above their mean, from which a loss counts as bad; 6
            is OLMo's choice. None: only what isn't finite. It begins when there are half as many losses.
        window: number of steps.
        most_skips: steps in a row that may be skipped; after these there is an error, as with ``"stop"``.
        say: called with a message on the first rank.

    Attributes:
        skipped: the steps whose update this process has skipped.
        loss: of the last step, mean over all replicas; as it is, if it isn't finite.

    Raises:
        ConfigError: an argument is out of range, or, when training begins, the model isn't in an engine of Cuboid's.
        CuboidError: on all ranks, in a step with a bad loss.
    """

    def __init__(
        self,
        policy: Policy = "stop",
        *,
        spike: float | None = None,
        window: int = 128,
        most_skips: int = 10,
        say: Callable[[str], object] = logger.warning,
    ) -> None:
        if policy not in _POLICIES:
            raise ConfigError(f"what to do about a bad loss is {policy!r}; it is one of {', '.join(_POLICIES)}")
        for name, value, least in (("spike", spike, 0), ("window", window, 2), ("most_skips", most_skips, 1)):
            if value is not None and not least <= value < math.inf:
                raise ConfigError(f"{name} of a bad loss is {value}; it must be at least {least}, and finite")
        self.skipped: list[int] = []
        self.loss = math.nan
        self._arguments = {"policy": policy, "spike": spike, "window": window, "most_skips": most_skips}
        self._policy, self._spike, self._window, self._most_skips, self._say = policy, spike, window, most_skips, say
        #: Finite losses of the last steps, bad ones too: a loss that stays high is no spike for long.
        self._recent: deque[float] = deque(maxlen=window)
        self._skips_in_a_row = 0
        self._engine: Any = None

    def watch(self, engine: Any) -> None:
        """Decide in this engine's steps from now on; None for no more."""
        if self._engine is not None:
            self._engine.before_update = None
        self._engine = engine
        if engine is not None:
            engine.before_update = self.decide

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to decide alike, for JSON; the Trainer puts it into its checkpoints."""
        memory = {"recent": list(self._recent), "skips_in_a_row": self._skips_in_a_row}
        return {"args": self._arguments, "attributes": memory}

    def restore(self, attributes: Mapping[str, Any]) -> None:
        """Go on from the attributes of a :meth:`state`."""
        self._recent = deque(attributes.get("recent", ()), maxlen=self._window)
        self._skips_in_a_row = int(attributes.get("skips_in_a_row", 0))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Watch the engine's steps from now on."""
        engine = engine_of(model)
        if engine is None or not hasattr(engine, "before_update"):
            raise ConfigError(
                "LossGuardCallback decides before each update of an engine of Cuboid's; give the Trainer a config with "
                "tensor_parallel.mode 3d_tensor or pipeline.engine seq1f1b"
            )
        self.watch(engine)
        # A checkpoint from before this callback was added has none, and the Trainer couldn't save the next one.
        saved = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if isinstance(saved, dict):
            self.restore(saved.get("attributes", {}))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Watch them no longer."""
        self.watch(None)

    def decide(self, parts: list[torch.Tensor]) -> bool:
        """Whether to update the weights, given this replica's losses of the step; collective, the same on all ranks.

        Raises:
            CuboidError: on all ranks, if a bad loss ends training.
        """
        losses = self._of_replicas(parts)
        self.loss = loss = fmean(map(sum, losses))
        problem = self._problem(loss, losses)
        if math.isfinite(loss):
            self._recent.append(loss)
        if problem is None:
            self._skips_in_a_row = 0
            return True
        step, mesh = self._engine.global_steps + 1, mesh_of(self._engine)
        is_last_skip = self._policy == "skip" and self._skips_in_a_row >= self._most_skips
        text = f"the loss is {loss:.6g} at step {step}{problem}"
        if self._policy == "stop" or is_last_skip:
            skips = f", and {self._skips_in_a_row} updates before it were skipped" if is_last_skip else ""
            unlabelled = "; the mean over no label at all is NaN, too" if math.isnan(loss) else ""

            def stop() -> None:
                raise CuboidError(
                    f"{text}{skips}; a lower learning rate, a longer warm-up, or gradient clipping may help{unlabelled}"
                )

            run_on_all_ranks(stop, mesh, what="a check of the loss")
        skips_update = self._policy == "skip"
        if mesh.rank == 0:
            self._say(f"{text}; {'its update is skipped' if skips_update else 'training goes on'}")
        if skips_update:
            self.skipped.append(step)
            self._skips_in_a_row += 1
        return not skips_update

    def _of_replicas(self, parts: list[torch.Tensor]) -> list[list[float]]:
        """The losses of each replica's micro-batches, ``[replicas][micro-batches]``, on every rank."""
        engine, mesh = self._engine, mesh_of(self._engine)
        # At the end of an epoch there may be fewer than usual; on a pipeline's other stages there are none.
        width = max(engine.gradient_accumulation_steps(), 1)
        table = torch.zeros(mesh.topology.data, width, dtype=torch.float64, device=engine.device)
        # All ranks of a mesh have the same loss.
        is_first = all(getattr(mesh.coordinate, axis) == 0 for axis in AXES)
        if parts and is_first and mesh.has_last_stage:
            table[mesh.coordinate.data, : len(parts)] = torch.stack(parts).to(table)
        losses: list[list[float]] = sum_over_ranks(table, engine.device)
        return losses

    def _problem(self, loss: float, losses: list[list[float]]) -> str | None:
        """What is wrong with a loss and where, in words; None if nothing is."""
        places = [(replica, number) for replica, row in enumerate(losses) for number in range(len(row))]
        if not math.isfinite(loss):
            bad = [(replica, number) for replica, number in places if not math.isfinite(losses[replica][number])]
            return self._named(", in ", bad)
        if self._spike is None or len(self._recent) < max(self._window // 2, 2):
            return None
        mean, deviation = fmean(self._recent), pstdev(self._recent)
        if loss <= mean + self._spike * deviation:
            return None
        above = f"{(loss - mean) / deviation:.1f}" if deviation else "infinitely many"
        most = max(places, key=lambda place: losses[place[0]][place[1]])
        return (
            f", {above} standard deviations above the mean {mean:.6g} of the {len(self._recent)} steps before"
            + self._named(", most of it in ", [most])
        )

    def _named(self, beginning: str, places: list[tuple[int, int]]) -> str:
        if not places:
            return ""
        topology, stage = mesh_of(self._engine).topology, unwrap(self._engine)
        # A pipeline that spreads its head over its ranks has one loss for all micro-batches.
        pipeline = stage.staging.plan.config.pipeline if isinstance(stage, StageModel) else None
        is_one_for_all = pipeline is not None and pipeline.spreads_head
        members = topology.groups(("pipe", *AXES))
        names = []
        for replica, number in places[:_NAMED]:
            name = "" if is_one_for_all else f"micro-batch {number + 1} of "
            ranks = members[replica]
            of_ranks = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
            names.append(f"{name}replica {replica} ({of_ranks})" if topology.data > 1 else f"{name}{of_ranks}")
        return beginning + ", ".join(dict.fromkeys(names)) + (" …" if len(places) > _NAMED else "")
