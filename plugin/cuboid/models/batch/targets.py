"""The targets that the losses of tasks compare logits with, and their shapes and ranges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from cuboid.errors import CuboidError
from cuboid.models.architectures.supported_tasks import WORDS, Task, task_of
from cuboid.models.batch.local_batch import IGNORE_INDEX, check_ids

#: For each task, the arguments of a forward with which its loss compares logits. Those of language models are sharded
#: with the micro-batch; all others are whole on all ranks.
_NAMES: dict[Task, tuple[str, ...]] = {
    "causal": ("labels", "shift_labels"),
    "masked": ("labels",),
    "seq2seq": ("labels",),
    "sequence": ("labels",),
    "tokens": ("labels",),
    "answers": ("start_positions", "end_positions"),
    "images": ("labels",),
    "masked images": (),
    "hidden": (),
}
TARGETS = ("labels", "shift_labels", "start_positions", "end_positions")
#: Those that are whole on all ranks and never part of a sharded micro-batch.
ANSWERS = ("start_positions", "end_positions")


@dataclass(frozen=True)
class Targets:
    """The targets of a task's loss.

    Args:
        task: the model's task.
        outputs: number of outputs that the head has for each label; 0 for language models.
        classes: exclusive upper limit of integer labels; None if labels aren't classes, as in regression.
    """

    task: Task
    outputs: int = 0
    classes: int | None = None

    @classmethod
    def of(cls, model: type, config: PretrainedConfig) -> Targets:
        """Determine the targets of a model class with a config."""
        task = task_of(model)
        if task in ("causal", "masked", "seq2seq"):
            return cls(task, 0, config.get_text_config().vocab_size)
        if task not in ("sequence", "tokens", "images"):
            return cls(task)
        outputs = int(config.num_labels)
        # Without a problem type, several outputs and labels that are integers are classes.
        is_single = getattr(config, "problem_type", None) in (None, "single_label_classification")
        has_classes = task == "tokens" or (outputs > 1 and is_single)
        return cls(task, outputs, outputs if has_classes else None)

    def check_given(self, arguments: Mapping[str, Any]) -> None:
        """Check that a forward's arguments have all targets of the task. Not for language models.

        Raises:
            CuboidError: one is missing.
        """
        missing = [name for name in _NAMES[self.task] if arguments.get(name) is None]
        if missing:
            raise CuboidError(f"a micro-batch for {WORDS[self.task]} needs {' and '.join(missing)}")

    def items(self, arguments: Mapping[str, Any]) -> torch.Tensor | int:
        """Return the number of tokens or rows over which the loss is averaged. Not for language models."""
        labels = arguments.get("labels")
        if labels is None or labels.is_floating_point() or self.classes is None:
            return len(arguments["input_ids"])
        return (labels != IGNORE_INDEX).sum()

    def check(self, arguments: dict[str, Any]) -> None:
        """Check that the targets among a forward's arguments, if any, belong to the task and have its shapes.

        Raises:
            CuboidError: a target has another shape, or belongs to another task; or the ids aren't ``[B, S]``.
        """
        main = "pixel_values" if arguments.get("input_ids") is None else "input_ids"
        shape = arguments[main].shape
        if main == "input_ids":
            check_ids(arguments[main])
        for name in TARGETS:
            x = arguments.get(name)
            if x is None:
                continue
            if name not in _NAMES[self.task]:
                wanted = " and ".join(_NAMES[self.task]) or "no labels"
                raise CuboidError(f"{name} were given to a model for {WORDS[self.task]}, which takes {wanted}")
            if self.task == "seq2seq":
                _check_target_shape(arguments, x)
                continue
            shapes = self._shapes(shape, is_integer=not x.is_floating_point())
            if tuple(x.shape) not in shapes:
                raise CuboidError(
                    f"{name} is {list(x.shape)}, but {main} is {list(shape)}: {WORDS[self.task]} needs "
                    + " or ".join(str(list(each)) for each in shapes)
                )

    def _shapes(self, given: torch.Size, *, is_integer: bool) -> list[tuple[int, ...]]:
        """Return the shapes that targets may have for an input of this shape."""
        if self.task in ("causal", "masked", "tokens"):
            return [tuple(given[:2])]
        # An input of images is checked later, so it may have any number of dims here.
        rows = tuple(given[:1])
        shapes: list[tuple[int, ...]] = [rows, (*rows, 1)]
        if self.task == "answers" or (is_integer and self.classes is not None):
            return shapes
        # Several numbers per row, or multi-label classes, which don't exclude one another.
        return shapes if self.outputs == 1 else [(*rows, self.outputs)]


def _check_target_shape(arguments: dict[str, Any], labels: torch.Tensor) -> None:
    """Check an encoder-decoder's labels, which are for the decoder's positions; there may be any number of these."""
    source, ids = arguments["input_ids"], arguments.get("decoder_input_ids")
    if labels.dim() != 2 or labels.shape[0] != source.shape[0] or (ids is not None and labels.shape != ids.shape):
        beside = "" if ids is None else f" and decoder_input_ids is {list(ids.shape)}"
        raise CuboidError(
            f"labels is {list(labels.shape)}, but input_ids is {list(source.shape)}{beside}; an encoder-decoder needs "
            f"{[source.shape[0], 'target length'] if ids is None else list(ids.shape)}"
        )
