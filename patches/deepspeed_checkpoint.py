"""``save_checkpoint`` and ``load_checkpoint`` of an engine, with DeepSpeed's arguments and Cuboid's checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from deepspeed import DeepSpeedEngine
from deepspeed.runtime.dataloader import RepeatingLoader
from deepspeed.runtime.utils import DummyOptim

from cuboid.checkpoint.lineage import Ancestor, first_ancestors, lineage_behind, new_identity
from cuboid.checkpoint.loader import Opened, open_checkpoint
from cuboid.checkpoint.optimizer import OptimizerAdapter
from cuboid.checkpoint.saver import Saver
from cuboid.config import CuboidConfig
from cuboid.errors import CheckpointError
from cuboid.hf.checkpoint import load_model, load_training, restore_random, take_contents
from cuboid.hf.model import mesh_of
from cuboid.hf.stored import stored_parameters
from cuboid.patches.deepspeed_optimizer import adapt_optimizer

_PACKAGES = ("cuboid", "torch", "transformers", "deepspeed", "safetensors")


@dataclass
class Origin:
    """What an engine was made with.

    Attributes:
        config: Cuboid's part of the config.
        source: the whole config as the user wrote it.
        ancestors: where its weights come from.
    """

    config: CuboidConfig
    source: dict[str, Any]
    ancestors: list[Ancestor]


class CheckpointedEngine(DeepSpeedEngine):
    """A DeepSpeedEngine that writes and reads checkpoints which are Hugging Face checkpoints."""

    origin: Origin

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write ``save_dir/tag``, which plain transformers opens and any layout resumes. All ranks call it.

        Call it between optimizer steps: gradients that are being accumulated aren't saved. How it goes about it is the
        ``checkpoint`` section's of the config.

        Args:
            save_dir: folder of checkpoints, which all ranks see.
            tag: name of this one; ``global_step`` and the number of steps unless given.
            client_state: the caller's own: None, bools, numbers, texts, tensors, numpy arrays, and lists, tuples and
                dicts of them. ``data_fingerprint`` in it goes into the lineage.
            save_latest: whether ``save_dir/latest`` is to name it.
            exclude_frozen_parameters: not possible, since the model would be incomplete.

        Returns:
            Whether it is there; or, if asynchronous, on its way.

        Raises:
            CheckpointError: on every rank, where any of them failed.
        """
        if exclude_frozen_parameters:
            raise CheckpointError("exclude_frozen_parameters would leave a checkpoint that no model can be opened from")
        contents = take_contents(
            self.module, self._adapter, step=self.global_steps, document=self._document(dict(client_state or {}))
        )
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        return self._saver.save(Path(save_dir), name, contents, latest=save_latest)

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
        """Go on from a checkpoint, whatever layout wrote it. All ranks call it.

        Args:
            load_dir: folder of checkpoints, or one checkpoint.
            tag: which one; by default what ``load_dir/latest`` names.
            load_module_strict, custom_load_fn: as DeepSpeed has them; only their defaults are possible.
            load_optimizer_states: without, the optimizer stays as it is, but for copies of the weights.
            load_lr_scheduler_states: without, the schedule stays as it is.
            load_module_only: only the weights, for fine-tuning; then any Hugging Face checkpoint will do.

        Returns:
            The checkpoint's path, and the client state that it was saved with.

        Raises:
            CheckpointError: on every rank: there is none, it isn't whole, or it is of another model or optimizer.
        """
        if not load_module_strict or custom_load_fn is not None:
            raise CheckpointError("load_module_strict=False and custom_load_fn have no meaning here; leave them out")
        self._saver.wait()
        mesh, settings = mesh_of(self.module), self.origin.config.checkpoint
        mesh.connect()
        if load_module_only and tag is None and _is_plain(Path(load_dir)):
            self._load_weights(Path(load_dir))
            self.origin.ancestors = first_ancestors(str(load_dir))
            return str(load_dir), {}
        opened = open_checkpoint(Path(load_dir), tag, mesh, verify=settings.verify)
        adapter = self._load_weights(opened.path)
        self.origin.ancestors = lineage_behind(opened.path, opened.document)
        if not load_module_only:
            if load_optimizer_states and adapter is not None:
                load_training(self.module, adapter, opened)
            self._restore(opened, with_scheduler=load_lr_scheduler_states)
            restore_random(self.module, opened)
        return str(opened.path), dict(opened.document["client"])

    def wait_for_checkpoint(self) -> bool:
        """Wait until an asynchronous ``save_checkpoint`` is done. All ranks call it.

        Returns:
            False where it could not be written and the config says to train on.

        Raises:
            CheckpointError: it could not be written.
        """
        return self._saver.wait()

    def destroy(self) -> None:
        """Wait for a checkpoint that is on its way, and release what the engine holds."""
        if hasattr(self, "origin"):
            self._saver.wait()
        super().destroy()

    @cached_property
    def _saver(self) -> Saver:
        return Saver(mesh_of(self.module), self.origin.config.checkpoint)

    @property
    def _adapter(self) -> OptimizerAdapter | None:
        if self.optimizer is None or isinstance(self.optimizer, DummyOptim):
            return None
        names = {id(parameter): name for name, parameter in stored_parameters(self.module).items()}
        return adapt_optimizer(self.optimizer, names)

    def _load_weights(self, folder: Path) -> OptimizerAdapter | None:
        """Take over weights, and give what knows of the optimizer's copies of them, if there is one."""
        load_model(self.module, folder)
        adapter = self._adapter
        if adapter is not None:
            adapter.weights_changed()
        return adapter

    def _document(self, client_state: dict[str, Any]) -> dict[str, Any]:
        return {
            **new_identity(),
            "framework": "deepspeed",
            "steps": {
                "optimizer": self.global_steps,
                "samples": self.global_samples,
                "skipped": self.skipped_steps,
            },
            "scheduler": None if self.lr_scheduler is None else self.lr_scheduler.state_dict(),
            "config": self.origin.source,
            "versions": {name: version(name) for name in _PACKAGES},
            "client": client_state,
            "lineage": [ancestor.model_dump() for ancestor in self.origin.ancestors],
        }

    def _restore(self, opened: Opened, *, with_scheduler: bool) -> None:
        steps = opened.document["steps"]
        self.global_steps = steps["optimizer"]
        self.global_samples = steps["samples"]
        self.skipped_steps = steps["skipped"]
        self.micro_steps = self.global_steps * self.gradient_accumulation_steps()
        scheduler = opened.document["scheduler"]
        if with_scheduler and self.lr_scheduler is not None:
            if scheduler is None:
                raise CheckpointError(
                    f"{opened.path}: has no schedule of the learning rate; load with load_lr_scheduler_states=False"
                )
            self.lr_scheduler.load_state_dict(scheduler)


def positioned(loader: Any, samples: int, samples_per_round: int) -> Any:
    """An endless iterator over a loader, behind the batches that so many samples of all replicas were in.

    Args:
        loader: of this rank's replica.
        samples: of all replicas, so far.
        samples_per_round: of all replicas, in one batch of each.
    """
    batches = samples // samples_per_round % max(len(loader), 1)
    iterator = iter(RepeatingLoader(loader))
    return itertools.islice(iterator, batches, None)


def _is_plain(folder: Path) -> bool:
    """Whether a folder holds a Hugging Face checkpoint and nothing of ours."""
    ours = (folder / "manifest.json").is_file() or (folder / "latest").is_file()
    return (folder / "config.json").is_file() and not ours
