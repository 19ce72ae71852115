"""``save_checkpoint`` and ``load_checkpoint`` of an engine, with DeepSpeed's arguments and Cuboid's checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed import DeepSpeedEngine
from deepspeed.runtime.dataloader import RepeatingLoader
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.utils import DummyOptim

from cuboid.checkpoint.format.folder import LATEST, read_pointer
from cuboid.checkpoint.metadata import CheckpointMetadata
from cuboid.checkpoint.optimizer_state import OptimizerAdapter, WholeStates
from cuboid.errors import CheckpointError
from cuboid.integrations.deepspeed.optimizer_state import adapt_optimizer
from cuboid.models.sharded.sharded_model import sharding_of
from cuboid.weights.checkpointing import Checkpointing, Part, Progress, progress_of
from cuboid.weights.state_dict_map import stored_names

#: The state of a dynamic loss scaler; its other attributes come from the config.
_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class CheckpointedEngine(DeepSpeedEngine):
    """A DeepSpeedEngine that writes and reads checkpoints which are Hugging Face checkpoints."""

    checkpointing: Checkpointing
    #: What :meth:`load_checkpoint` restored last, for a loop that draws random numbers before it goes on.
    loaded: CheckpointMetadata | None = None
    #: Of an optimizer that steps whole tensors.
    whole_states: WholeStates | None

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write ``save_dir/tag``, which plain transformers can load and any layout can resume. Collective.

        Call it between optimizer steps: gradients that are being accumulated aren't saved. Options are in the
        ``checkpoint`` section of the config.

        Args:
            save_dir: folder of checkpoints, shared by all ranks.
            tag: name of the checkpoint; by default ``global_step`` and the number of steps.
            client_state: the caller's own data: None, bools, numbers, strings, tensors, numpy arrays, and lists, tuples
                and dicts of them. ``data_fingerprint`` in it goes into the lineage.
            save_latest: whether ``save_dir/latest`` shall name this checkpoint.
            exclude_frozen_parameters: only for a model with adapters, whose checkpoints never have frozen weights. Any
                other model would be incomplete.

        Returns:
            Whether it was written; or, if asynchronous, is being written.

        Raises:
            CheckpointError: on every rank, if any of them failed.
        """
        # As the Trainer asks for adapters.
        if exclude_frozen_parameters and sharding_of(self.module).state.adapters is None:
            raise CheckpointError("exclude_frozen_parameters would leave a checkpoint that no model can be opened from")
        self.checkpointing.changed()
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        scaler = self._loss_scaler
        scale = None if scaler is None else {name: getattr(scaler, name) for name in _LOSS_SCALE}
        part = Part(optimizer=self._adapter, scheduler=self.lr_scheduler, loss_scale=scale)
        progress = Progress(self.global_steps, self.global_samples, self.skipped_steps)
        return self.checkpointing.save(Path(save_dir), name, part, progress, client_state or {}, latest=save_latest)

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str, dict[str, Any]]:
        """Resume from a checkpoint, written on any layout. Collective.

        Args:
            load_dir: folder of checkpoints, or one checkpoint.
            tag: name of the checkpoint; by default the one that ``load_dir/latest`` names.
            load_module_strict: as in DeepSpeed; False only for a model with adapters, whose checkpoints have no frozen
                weights.
            custom_load_fn: not supported.
            load_optimizer_states: if false, the optimizer keeps its state, except for its master weights.
            load_lr_scheduler_states: if false, the schedule keeps its state.
            load_module_only: load only the weights, for fine-tuning; this works with any Hugging Face checkpoint.

        Returns:
            The checkpoint's path, and the client state that it was saved with.

        Raises:
            CheckpointError: on every rank: there is none, it is incomplete, or it is of another model or optimizer.
        """
        is_partial = not load_module_strict and sharding_of(self.module).state.adapters is None
        if is_partial or custom_load_fn is not None:
            raise CheckpointError("load_module_strict=False and custom_load_fn have no meaning here; leave them out")
        adapter = self._adapter
        if load_module_only and tag is None and _is_plain(Path(load_dir)):
            self.checkpointing.load_weights(Path(load_dir), adapter)
            return str(load_dir), {}
        metadata = self.checkpointing.open(Path(load_dir), tag)
        if not load_module_only:
            schedule = self.lr_scheduler if load_lr_scheduler_states else None
            self.checkpointing.check(metadata, adapter if load_optimizer_states else None, schedule)
        self.checkpointing.load_weights(metadata, adapter)
        if not load_module_only:
            if load_optimizer_states and adapter is not None:
                self.checkpointing.load_optimizer(metadata, adapter)
                self._restore_loss_scale(metadata)
            self._restore(metadata, with_scheduler=load_lr_scheduler_states)
            self.checkpointing.restore_random(metadata)
        self.loaded = metadata
        return str(metadata.path), dict(metadata.document["client"])

    def wait_for_checkpoint(self) -> bool:
        """Wait until an asynchronous ``save_checkpoint`` is done. Collective.

        Returns:
            False if it could not be written and the config lets training continue.

        Raises:
            CheckpointError: it could not be written.
        """
        return self.checkpointing.wait()

    def destroy(self) -> None:
        """Wait for a checkpoint that is in flight, and release what the engine holds."""
        if hasattr(self, "checkpointing"):
            self.checkpointing.wait()
        super().destroy()

    @property
    def _adapter(self) -> OptimizerAdapter | None:
        if self.optimizer is None or isinstance(self.optimizer, DummyOptim):
            return None
        adapter = adapt_optimizer(self.optimizer, stored_names(self.module))
        adapter.whole = self.whole_states
        return adapter

    @property
    def _loss_scaler(self) -> DynamicLossScaler | None:
        scaler = getattr(self.optimizer, "loss_scaler", None)
        return scaler if isinstance(scaler, DynamicLossScaler) else None

    def _restore_loss_scale(self, metadata: CheckpointMetadata) -> None:
        scaler, saved = self._loss_scaler, metadata.document.get("loss_scale")
        # A run in another precision, or with a static scale, saves none; this run then starts from its config's.
        if scaler is None or saved is None:
            return
        for name in _LOSS_SCALE:
            if name not in saved:
                raise CheckpointError(f"{metadata.path}: its loss scale has no {name}")
            setattr(scaler, name, saved[name])

    def _restore(self, metadata: CheckpointMetadata, *, with_scheduler: bool) -> None:
        progress = progress_of(metadata)
        self.global_steps = progress.optimizer
        self.global_samples = progress.samples
        self.skipped_steps = progress.skipped
        self.micro_steps = self.global_steps * self.gradient_accumulation_steps()
        if with_scheduler and self.lr_scheduler is not None:
            self.checkpointing.load_scheduler(metadata, self.lr_scheduler)


def positioned(loader: Any, samples: int, samples_per_round: int) -> Any:
    """An endless iterator over a loader that skips the batches of the current epoch that were already trained on.

    Replicas together have trained on ``samples`` so far, and take ``samples_per_round`` in one batch of each.
    """
    batches = samples // samples_per_round % max(len(loader), 1)
    iterator = iter(RepeatingLoader(loader))
    return itertools.islice(iterator, batches, None)


def check_not_ours(folder: Path, tag: str | None) -> None:
    """Check that a function of DeepSpeed's for its own checkpoints isn't given one of Cuboid's.

    Raises:
        CheckpointError: it is; says how to open that.
    """
    if tag is None and (folder / LATEST).is_file():
        tag = read_pointer(folder / LATEST)
    path = folder if tag is None else folder / tag
    if (path / "manifest.json").is_file():
        raise CheckpointError(
            f"{path} is a checkpoint of Cuboid, and a Hugging Face checkpoint already: from_pretrained opens it, and "
            f"cuboid convert --master {path} OUT writes the optimizer's float32 weights as one"
        )


def _is_plain(folder: Path) -> bool:
    """Whether a folder holds a Hugging Face checkpoint that Cuboid didn't write."""
    is_cuboid = (folder / "manifest.json").is_file() or (folder / "latest").is_file()
    return (folder / "config.json").is_file() and not is_cuboid
