"""Save and load the training checkpoints of one model; shared by the DeepSpeed and ColossalAI integrations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from cuboid.checkpoint.format.state_document import Ancestor, first_ancestors, lineage_behind, new_identity
from cuboid.checkpoint.loader import check_optimizer_state, open_checkpoint
from cuboid.checkpoint.metadata import CheckpointMetadata
from cuboid.checkpoint.optimizer_state import OptimizerAdapter
from cuboid.checkpoint.save_plan import SavePlan
from cuboid.checkpoint.saver import Saver
from cuboid.config.schema import CuboidConfig
from cuboid.errors import CheckpointError
from cuboid.failures.rank_agreement import run_on_all_ranks
from cuboid.models.sharded.sharded_model import mesh_of, unwrap
from cuboid.optim.param_groups import GroupNames
from cuboid.optim.schedule_groups import check_ungrouped, regrouped
from cuboid.requirements import versions
from cuboid.weights.training_state import load_model, load_training, make_save_plan, restore_random

Framework = Literal["deepspeed", "colossalai"]
#: For messages about a schedule that can't be restored.
_WITHOUT = "load without the schedule (load_lr_scheduler_states=False under DeepSpeed)"
_PACKAGES = ("cuboid", "torch", "transformers", "safetensors")


@dataclass
class Origin:
    """How a run was started.

    Attributes:
        framework: the one that trains the model.
        config: Cuboid's part of the config.
        source: the full config as the user wrote it.
        ancestors: lineage of the weights.
    """

    framework: Framework
    config: CuboidConfig
    source: dict[str, Any]
    ancestors: list[Ancestor]

    @classmethod
    def of(cls, framework: Framework, config: CuboidConfig, source: dict[str, Any], model: nn.Module) -> Origin:
        """The origin of a run that starts with a model as it was loaded."""
        inner: Any = unwrap(model)
        return cls(framework, config, source, first_ancestors(str(inner.config._name_or_path)))


@dataclass
class Progress:
    """The progress of a run.

    Attributes:
        optimizer: number of optimizer steps.
        samples: number of rows trained on, over all replicas.
        skipped: number of steps that were skipped because gradients weren't finite.
    """

    optimizer: int = 0
    samples: int = 0
    skipped: int = 0


@dataclass
class Part:
    """The part of the training state that one call saves; by default the weights only.

    Attributes:
        weights: whether to save the weights.
        optimizer: the optimizer to save, if any.
        scheduler: the learning-rate schedule to save, if any.
        loss_scale: state of a dynamic loss scale, if there is one.
    """

    weights: bool = True
    optimizer: OptimizerAdapter | None = None
    scheduler: Any = None
    loss_scale: dict[str, float] | None = None


@dataclass
class Checkpointing:
    """Writes and reads the checkpoints of one model.

    Args:
        model: sharded, or an engine around one.
        origin: of the run.
        groups: names of the parameters, on all stages, of each of the optimizer's parameter groups.
    """

    model: nn.Module
    origin: Origin
    groups: GroupNames = ()
    _identity: dict[str, str] | None = None

    def __post_init__(self) -> None:
        self._mesh = mesh_of(self.model)
        self._settings = self.origin.config.checkpoint
        self._saver = Saver(self._mesh, self._settings)

    def changed(self) -> None:
        """Note that the state has changed since the last save, so that the next one is a new checkpoint."""
        # The new identity is made at the next save, since this is called after every step.
        self._identity = None

    def save(
        self,
        root: Path,
        tag: str,
        part: Part,
        progress: Progress,
        client_state: Mapping[str, Any],
        *,
        latest: bool,
    ) -> bool:
        """Write ``root/tag``, or a part of it; see :meth:`cuboid.checkpoint.saver.Saver.save`."""

        def make_plan() -> SavePlan:
            return make_save_plan(
                self.model,
                part.optimizer,
                step=progress.optimizer,
                document=self._document(part, progress, dict(client_state)),
                weights=part.weights,
            )

        plan = run_on_all_ranks(make_plan, self._mesh, what=f"save of {tag}")
        return self._saver.save(root, tag, plan, latest=latest)

    def wait(self) -> bool:
        """See :meth:`cuboid.checkpoint.saver.Saver.wait`."""
        return self._saver.wait()

    def open(self, root: Path, tag: str | None = None) -> CheckpointMetadata:
        """Find and verify a checkpoint; see :func:`cuboid.checkpoint.loader.open_checkpoint`."""
        self._saver.wait()
        self._mesh.connect()
        return open_checkpoint(root, tag, self._mesh, verify=self._settings.verify)

    def load_weights(self, source: CheckpointMetadata | Path, optimizer: OptimizerAdapter | None) -> None:
        """Load the weights into the model, and into the optimizer's master weights. Collective.

        Args:
            source: a checkpoint of cuboid, or any Hugging Face checkpoint.
            optimizer: of the model, if there is one.

        Raises:
            CheckpointError: on every rank, if any of them can't read its part.
        """
        self._saver.wait()
        self._mesh.connect()
        self._mesh.connect_host()
        self.changed()
        if isinstance(source, CheckpointMetadata):
            path, ancestors = source.path, lineage_behind(source.path, source.document)
        else:
            path, ancestors = source, first_ancestors(str(source))
        load_model(self.model, path)
        if optimizer is not None:
            run_on_all_ranks(optimizer.weights_changed, self._mesh, what="copies of the loaded weights")
        self.origin.ancestors = ancestors

    def check(self, metadata: CheckpointMetadata, optimizer: OptimizerAdapter | None, scheduler: Any) -> None:
        """Check that an optimizer and a schedule, if given, can take a checkpoint's state. Collective.

        Raises:
            CheckpointError: on every rank, before anything is changed: a script may go on without the checkpoint.
        """

        def check() -> None:
            if optimizer is not None:
                check_optimizer_state(metadata, optimizer, self.groups)
            if scheduler is not None:
                self._schedule_of(metadata, scheduler)

        run_on_all_ranks(check, self._mesh, what="comparison with the checkpoint's optimizer")

    def load_optimizer(self, metadata: CheckpointMetadata, optimizer: OptimizerAdapter) -> None:
        """Restore the optimizer's state; see :func:`cuboid.weights.training_state.load_training`."""
        self.changed()
        load_training(self.model, optimizer, metadata, self.groups)

    def load_scheduler(self, metadata: CheckpointMetadata, scheduler: Any) -> None:
        """Restore a learning-rate schedule's state, with its lists by parameter group in this optimizer's order.

        Raises:
            CheckpointError: the checkpoint has none, or that of another class, or of other groups.
        """
        scheduler.load_state_dict(self._schedule_of(metadata, scheduler))

    def _schedule_of(self, metadata: CheckpointMetadata, scheduler: Any) -> Mapping[str, Any]:
        state: Mapping[str, Any] | None = metadata.document["scheduler"]
        if state is None:
            raise CheckpointError(f"{metadata.path}: has no schedule of the learning rate; {_WITHOUT}")
        # Checkpoints of earlier versions don't name the class.
        saved, present = metadata.document.get("scheduler_class"), type(scheduler).__name__
        if saved not in (None, present):
            raise CheckpointError(
                f"{metadata.path}: holds the state of a {saved}, but the schedule of the learning rate is a {present}; "
                f"take the same one, or {_WITHOUT}"
            )
        groups = metadata.document.get("scheduler_groups")
        if groups is None:
            with _without_schedule(metadata):
                check_ungrouped(state, len(self.groups))
            return state
        return self.schedule_in_order(metadata, state, groups, scheduler)

    def schedule_in_order(
        self, metadata: CheckpointMetadata, state: Mapping[str, Any], groups: Sequence[Sequence[str]], scheduler: Any
    ) -> Mapping[str, Any]:
        """A schedule's saved state with its lists by parameter group in the order of this optimizer's groups.

        Args:
            metadata: of the checkpoint that it is of.
            state: as saved.
            groups: the names of the parameters of each of the saved groups.
            scheduler: of this optimizer.

        Raises:
            CheckpointError: a group has no counterpart, or several with other values.
        """
        with _without_schedule(metadata):
            return regrouped(state, groups, self.groups, scheduler.state_dict())

    def restore_random(self, metadata: CheckpointMetadata) -> None:
        """Restore this rank's random states; see :func:`cuboid.weights.training_state.restore_random`."""
        run_on_all_ranks(lambda: restore_random(self.model, metadata), self._mesh, what="random states")

    def _document(self, part: Part, progress: Progress, client_state: dict[str, Any]) -> dict[str, Any]:
        if self._identity is None:
            self._identity = new_identity()
        scheduler = part.scheduler
        return {
            **self._identity,
            "framework": self.origin.framework,
            "steps": asdict(progress),
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "scheduler_class": None if scheduler is None else type(scheduler).__name__,
            "scheduler_groups": None if scheduler is None else [list(names) for names in self.groups],
            "loss_scale": part.loss_scale,
            "config": self.origin.source,
            "versions": versions(*_PACKAGES, self.origin.framework),
            "client": client_state,
            "lineage": [ancestor.model_dump() for ancestor in self.origin.ancestors],
        }


@contextmanager
def _without_schedule(metadata: CheckpointMetadata) -> Iterator[None]:
    """In the ``with`` block, errors about a schedule say what to do."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{metadata.path}: {error}; group the parameters as they were, or {_WITHOUT}") from None


def progress_of(metadata: CheckpointMetadata) -> Progress:
    """The progress of a run when it wrote a checkpoint."""
    return Progress(**metadata.document["steps"])
