"""What happens in a step of the Trainer's whose loss isn't finite, or jumps up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from cuboid.errors import ConfigError
from cuboid.integrations.callbacks.bad_loss import LossGuard, Policy
from cuboid.integrations.callbacks.training_engine import engine_of

logger = logging.getLogger(__name__)


class LossGuardCallback(TrainerCallback, ExportableState):
    """Names the step, replica, ranks and micro-batch of a bad loss, and decides what happens to the step's update.

    A loss is bad if it isn't a finite number, or (``spike``) if it is far above those of the last steps. All ranks
    decide alike, before the update: one more all-reduce a step, of a number for each micro-batch.

    Args:
        policy: what to do. ``"stop"``: an error on all ranks; the weights are those before the step. ``"skip"``: the
            step's gradients are dropped; weights and optimizer state stay as they are to the last bit, while the number
            of steps and the learning rate's schedule go on. ``"continue"``: nothing but the message.
        spike: standard deviations of the last ``window`` losses, above their mean, from which a loss counts as bad; 6
            is OLMo's choice. None: only what isn't finite. It begins when there are half as many losses.
        window: number of steps.
        most_skips: steps in a row that may be skipped; after these there is an error, as with ``"stop"``.
        say: called with a message on the first rank.

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
        self._arguments = {"policy": policy, "spike": spike, "window": window, "most_skips": most_skips}
        self._guard = LossGuard(policy, spike=spike, window=window, most_skips=most_skips, say=say)

    @property
    def skipped(self) -> list[int]:
        """The steps whose update this process has skipped."""
        return self._guard.skipped

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to decide alike; the Trainer puts it into its checkpoints."""
        return {"args": self._arguments, "attributes": self._guard.state()}

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
        self._guard.watch(engine)
        # A checkpoint from before this callback was added has none, and the Trainer couldn't save the next one.
        saved = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if isinstance(saved, dict):
            self._guard.restore(saved.get("attributes", {}))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Watch them no longer."""
        self._guard.watch(None)
