"""``Booster``'s checkpoint calls. They write Hugging Face checkpoints, which the other integrations can resume too."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from colossalai.checkpoint_io import CheckpointIO
from colossalai.interface import ModelWrapper

from cuboid.checkpoint.format.manifest import MANIFEST
from cuboid.checkpoint.metadata import CheckpointMetadata
from cuboid.checkpoint.optimizer_state import OptimizerAdapter
from cuboid.errors import CheckpointError
from cuboid.integrations.colossalai.model import CuboidModel
from cuboid.integrations.colossalai.optimizer import CuboidOptimizer
from cuboid.weights.api import save_pretrained
from cuboid.weights.checkpointing import Part, progress_of


class CuboidCheckpointIO(CheckpointIO):
    """Writes and reads the parts of a checkpoint. All calls are collective, with a folder that all ranks share.

    ``save_model``, ``save_optimizer`` and ``save_lr_scheduler`` with the same folder, and no step between them, make
    one checkpoint, in any order. ``save_model`` alone writes a Hugging Face checkpoint.

    Raises:
        CheckpointError: on every rank, if any of them failed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._model: CuboidModel | None = None
        self._opened: tuple[Path, CheckpointMetadata] | None = None

    def attach(self, model: CuboidModel) -> None:
        """Set the boosted model that is saved and loaded, with its optimizer."""
        self._model = model

    def save_model(
        self,
        model: ModelWrapper,
        checkpoint: str | Path,
        shard: bool = False,  # noqa: ARG002
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,  # noqa: ARG002
        use_safetensors: bool = False,  # noqa: ARG002
        use_async: bool = False,
    ) -> None:
        """Write the weights into a folder, as a Hugging Face checkpoint.

        Args:
            model: the boosted model.
            checkpoint: the folder.
            shard, size_per_shard, use_safetensors: ignored; files are always safetensors, of at most
                ``checkpoint.max_file_bytes``.
            gather_dtensor, prefix, use_async: only their defaults are supported; ``checkpoint.asynchronous`` in the
                config saves in the background.
        """
        _reject(gather_dtensor=not gather_dtensor, prefix=prefix, use_async=use_async)
        self._save(self._boosted(model), checkpoint, Part())

    def save_optimizer(
        self,
        optimizer: CuboidOptimizer,
        checkpoint: str | Path,
        shard: bool = False,  # noqa: ARG002
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,  # noqa: ARG002
        use_async: bool = False,
    ) -> None:
        """Add the optimizer's state to a folder, with the random states and the progress; see :meth:`save_model`.

        Float32 master weights, if there are any, are part of it.
        """
        _reject(gather_dtensor=not gather_dtensor, prefix=prefix, use_async=use_async)
        model = self._boosted(optimizer)
        self._save(model, checkpoint, Part(weights=False, optimizer=_adapter(model)))

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | Path) -> None:
        """Add the state of a learning-rate schedule to a folder."""
        self._save(self._boosted(), checkpoint, Part(weights=False, scheduler=lr_scheduler))

    def load_model(
        self,
        model: ModelWrapper,
        checkpoint: str | Path,
        strict: bool = True,
        low_cpu_mem_mode: bool = True,  # noqa: ARG002
        num_threads: int = 1,  # noqa: ARG002
    ) -> ModelWrapper:
        """Load the weights of a checkpoint: one of Cuboid's, written on any layout, or any Hugging Face checkpoint.

        Args:
            model: the boosted model.
            checkpoint: the checkpoint's folder.
            strict: only the default is supported.
            low_cpu_mem_mode, num_threads: ignored; a rank always reads only its own slices.
        """
        _reject(strict=not strict)
        boosted = self._boosted(model)
        if boosted.restored:
            raise CheckpointError(
                f"{checkpoint}: the optimizer's state was loaded before the weights, whose masters it holds; call "
                "load_model before load_optimizer"
            )
        folder = Path(checkpoint)
        source = self._open(boosted, folder) if (folder / MANIFEST).is_file() else folder
        boosted.checkpointing.load_weights(source, boosted.adapter)
        return model

    def load_optimizer(
        self,
        optimizer: CuboidOptimizer,
        checkpoint: str | Path,
        prefix: str | None = None,
        low_cpu_mem_mode: bool = True,  # noqa: ARG002
        num_threads: int = 1,  # noqa: ARG002
    ) -> None:
        """Restore the optimizer's state and this rank's random states. Call it after :meth:`load_model`."""
        _reject(prefix=prefix)
        model = self._boosted(optimizer)
        adapter = _adapter(model)
        metadata = self._open(model, Path(checkpoint))
        model.checkpointing.load_optimizer(metadata, adapter)
        model.checkpointing.restore_random(metadata)
        model.progress = progress_of(metadata)
        model.client_state.update(metadata.document["client"])
        model.restored = True

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | Path) -> None:
        """Restore the state of a learning-rate schedule."""
        model = self._boosted()
        model.checkpointing.load_scheduler(self._open(model, Path(checkpoint)), lr_scheduler)

    def save_lora_as_pretrained(
        self,
        model: ModelWrapper,
        checkpoint: str | Path,
        use_safetensors: bool = False,  # noqa: ARG002
    ) -> None:
        """Write the adapters alone, as PEFT's folder, which plain PEFT opens.

        Args:
            model: the boosted model.
            checkpoint: the folder.
            use_safetensors: ignored; files are always safetensors.
        """
        boosted = self._boosted(model)
        inner: Any = boosted.module
        if inner.cuboid.state.adapters is None:
            raise CheckpointError(
                f"{checkpoint}: the model has no adapters to save; booster.enable_lora before booster.boost puts them "
                "into it, and booster.save_model saves the model itself"
            )
        save_pretrained(inner, checkpoint)

    def _save(self, model: CuboidModel, checkpoint: str | Path, part: Part) -> None:
        folder, self._opened = Path(checkpoint).absolute(), None
        model.checkpointing.save(folder.parent, folder.name, part, model.progress, model.client_state, latest=False)

    def _open(self, model: CuboidModel, folder: Path) -> CheckpointMetadata:
        """Open and verify a checkpoint, once for all calls that load its parts."""
        if self._opened is None or self._opened[0] != folder:
            self._opened = (folder, model.checkpointing.open(folder))
        return self._opened[1]

    def _boosted(self, wrapper: Any = None) -> CuboidModel:
        known = (None, self._model, None if self._model is None else self._model.optimizer)
        if self._model is None or not any(wrapper is one for one in known):
            raise CheckpointError(
                f"the {type(wrapper).__name__} isn't what this booster's boost gave; boost it first, and give what "
                "boost returns"
            )
        return self._model

    # Abstract in ColossalAI, whose public methods call them; the public methods above don't.
    def _unused(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError

    load_sharded_model = load_unsharded_model = save_sharded_model = save_unsharded_model = _unused
    load_sharded_optimizer = load_unsharded_optimizer = save_sharded_optimizer = save_unsharded_optimizer = _unused


def _adapter(model: CuboidModel) -> OptimizerAdapter:
    adapter = model.adapter
    if adapter is None:
        raise CheckpointError("no optimizer was boosted with the model, so there is none to save or to load")
    return adapter


def _reject(**options: Any) -> None:
    for name, value in options.items():
        if value:
            raise CheckpointError(f"{name} has no meaning for these checkpoints; leave it at its default")
