"""Micro-batches for a model's task, and a loss of the model's output."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from cuboid.models.architectures.supported_tasks import takes_images
from cuboid.models.architectures.transformers_names import decoder_ids
from cuboid.models.batch.broadcast import MicroBatch
from cuboid.models.batch.length_cases import Case
from cuboid.models.batch.local_batch import IGNORE_INDEX, image_shape
from cuboid.models.batch.targets import Targets
from cuboid.models.certification.check import ROWS, CannotProbe, ProbeOutcome, gradients_of, probe_batch

#: Sources with more tokens have shorter targets.
_LEAST_LENGTH = 12


def task_batch(case: Case, model: PreTrainedModel, *, has_types: bool = False, has_labels: bool = False) -> MicroBatch:
    """A micro-batch with the targets that a model's loss compares with.

    Args:
        case: length, padding and packing of its rows.
        model: a small one.
        has_types: whether it has token types.
        has_labels: whether padding has labels, too.
    """
    targets = Targets.of(type(model), model.config)
    if takes_images(type(model)):
        return _images(case, model, targets)
    vocabulary = model.config.get_text_config().vocab_size
    batch = probe_batch(case, vocabulary, has_labels=has_labels)
    pad = getattr(model.config.get_text_config(), "pad_token_id", None)
    if pad is not None and "attention_mask" in batch:
        # Some models recognize padding by its ids.
        batch["input_ids"][batch["attention_mask"] == 0] = pad
    generator = torch.Generator().manual_seed(case.length + 1)
    rows, length = batch["input_ids"].shape
    if has_types:
        batch["token_type_ids"] = torch.randint(0, model.config.type_vocab_size, (rows, length), generator=generator)
    if targets.task == "causal":
        return batch
    if targets.task == "seq2seq":
        return with_target(batch, probe_batch(target_case(case), vocabulary, has_labels=has_labels), model)
    return with_answers(batch, targets, generator)


def with_answers(batch: MicroBatch, targets: Targets, generator: torch.Generator) -> MicroBatch:
    """A micro-batch of ids and causal labels, with the labels replaced by those of another task."""
    batch = dict(batch)
    labels = batch.pop("labels")
    rows, length = labels.shape
    if targets.task == "masked":
        hidden = torch.rand((rows, length), generator=generator) < 0.5
        batch["labels"] = labels.masked_fill(hidden, IGNORE_INDEX)
    elif targets.task == "tokens":
        batch["labels"] = torch.where(labels == IGNORE_INDEX, labels, labels % targets.outputs)
    elif targets.task == "answers":
        for name in ("start_positions", "end_positions"):
            batch[name] = torch.randint(0, length, (rows,), generator=generator)
    elif targets.task == "sequence":
        batch["labels"] = _labels_of_rows(targets, rows, generator)
    return batch


def target_case(case: Case) -> Case:
    """The case of a source's target: shorter, or longer than a short source, and padded on the same side."""
    longest = case.length > _LEAST_LENGTH
    length = case.length * 2 // 3 if longest else case.length + _LEAST_LENGTH // 2
    return replace(case, length=length, packed=())


def with_target(source: MicroBatch, target: MicroBatch, model: PreTrainedModel) -> MicroBatch:
    """A source and its target as one micro-batch. Without padding, the model makes decoder ids from labels itself."""
    batch = {name: x for name, x in source.items() if name != "position_ids"} | {"labels": target["labels"]}
    if "attention_mask" in target:
        batch["decoder_attention_mask"] = target["attention_mask"]
        ids = decoder_ids(model, target["labels"])
        batch["decoder_input_ids"] = target["input_ids"] if ids is None else ids
    return batch


def _images(case: Case, model: PreTrainedModel, targets: Targets) -> MicroBatch:
    """A micro-batch of images, with the classes or the masked patches of the task."""
    generator = torch.Generator().manual_seed(case.length)
    shape = image_shape(model.config)
    if shape is None:
        raise CannotProbe("its config has no image_size of a height and a width")
    channels = int(getattr(model.config, "num_channels", 3))
    images = torch.randn((ROWS, channels, *shape), generator=generator, dtype=torch.float64)
    batch = {"pixel_values": images.to(model.dtype)}
    if targets.task == "images":
        batch["labels"] = _labels_of_rows(targets, ROWS, generator)
    elif targets.task == "masked images":
        patch = model.config.patch_size
        height, width = (patch, patch) if isinstance(patch, int) else patch
        patches = (shape[0] // height) * (shape[1] // width)
        batch["bool_masked_pos"] = torch.rand((ROWS, patches), generator=generator) < 0.5
    return batch


def _labels_of_rows(targets: Targets, rows: int, generator: torch.Generator) -> torch.Tensor:
    if targets.classes is not None:
        return torch.randint(0, targets.classes, (rows,), generator=generator)
    shape = (rows,) if targets.outputs == 1 else (rows, targets.outputs)
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def loss_of(output: Any, batch: MicroBatch) -> torch.Tensor:
    """A model's own loss; without a head, a function of all outputs that leaves out padding."""
    if getattr(output, "loss", None) is not None:
        loss: torch.Tensor = output.loss
        return loss
    hidden = output.last_hidden_state
    if "attention_mask" in batch:
        hidden = hidden * batch["attention_mask"].unsqueeze(-1)
    parts = [hidden, *([] if getattr(output, "pooler_output", None) is None else [output.pooler_output])]
    return torch.stack([(part * _weights(part)).mean() for part in parts]).sum()


def _weights(x: torch.Tensor) -> torch.Tensor:
    """Weights in the shape of ``x`` that differ from one element to the next."""
    return torch.arange(x.numel(), dtype=x.dtype, device=x.device).cos().view_as(x)


def run_whole(model: PreTrainedModel, batch: MicroBatch, **options: Any) -> ProbeOutcome:
    """Forward and backward of an uncut model with the loss of its task; gradients are left with its parameters.

    Args:
        model: without gradients.
        batch: from :func:`task_batch`.
        options: further arguments of its forward.
    """
    loss = loss_of(model(**batch, **options), batch)
    loss.backward()  # type: ignore[no-untyped-call]
    if not bool(loss.isfinite()):
        raise ValueError("its loss isn't finite")
    return ProbeOutcome(loss.detach(), gradients_of([model]))
