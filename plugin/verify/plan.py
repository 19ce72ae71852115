"""What both sides of a comparison do: the same model, the same batches, the same optimizer."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch
from transformers import AutoConfig, PretrainedConfig

from cuboid.errors import CuboidError
from cuboid.hf.certification.float64 import Precision, precision

Dtype = Literal["float64", "float32", "bfloat16"]
IGNORE_INDEX = -100
_ROW_KINDS = ("whole", "padded right", "padded left", "without labels")


@dataclass(frozen=True)
class Plan:
    """A short training run, the same for plain transformers and for Cuboid.

    Args:
        checkpoint: Hugging Face checkpoint that both sides load.
        dtype: of weights and arithmetic.
        keep_float64: whether casts to float32 inside the models are skipped, see :class:`KeepFloat64`.
        batch: rows of a micro-batch, as a mesh is given it.
        sequence_length: tokens of a row.
        varying: whether only every fourth micro-batch is so long, and others are shorter.
        steps: optimizer steps.
        data_parallel: replicas of the mesh.
        accumulate: micro-batches of a replica and step.
        masking: whether rows are padded on either side, and labels are missing here and there. Without, the models are
            given no attention mask.
        left_padding: whether padding may be on the left as well.
        positions: whether the models are given position ids, which count from a row's first real token.
        packed: whether rows hold several sequences each, told apart by position ids that restart. Such rows have no
            padding and no attention mask.
        checkpointing: whether activations are recomputed in backward.
        mean_over: what a step's loss is the mean over. ``"tokens"``: all label tokens of the step, the models being
            given ``num_items_in_batch``; ``"micro_batches"``: the micro-batches' own means, as DeepSpeed has it.
        learning_rate, betas, epsilon, weight_decay: of torch's AdamW.
        clipping: largest gradient norm; 0 for none.
        shard_in_memory: whether Cuboid's side loads the model whole and shards it then, not while it loads.
        seed: of the batches.
    """

    checkpoint: str
    dtype: Dtype = "float64"
    keep_float64: bool = True
    batch: int = 2
    sequence_length: int = 32
    varying: bool = False
    steps: int = 2
    data_parallel: int = 1
    accumulate: int = 1
    masking: bool = True
    left_padding: bool = True
    positions: bool = False
    packed: bool = False
    checkpointing: bool = False
    mean_over: Literal["tokens", "micro_batches"] = "tokens"
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    # Adam divides a gradient by its own size. An element whose exact gradient is zero has rounding noise for one,
    # and a small epsilon would make a whole step of that.
    epsilon: float = 1e-4
    weight_decay: float = 0.01
    clipping: float = 0.0
    shard_in_memory: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "steps", "data_parallel", "accumulate"):
            if getattr(self, name) < 1:
                raise CuboidError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.sequence_length < 4:
            raise CuboidError(f"sequence_length is {self.sequence_length}; it must be at least 4")

    @property
    def torch_dtype(self) -> torch.dtype:
        """``dtype`` as torch's."""
        return getattr(torch, self.dtype)

    def recompute_contexts(self) -> tuple[Precision, Precision]:
        """For torch's checkpointing: the contexts of a forward and of its recomputation.

        Backward recomputes where no mode of the caller's is active.
        """
        return contextlib.nullcontext(), precision(keep_float64=self.keep_float64)

    def loading_options(self) -> dict[str, Any]:
        """For ``from_pretrained``, on both sides."""
        options: dict[str, Any] = {"config": self.model_config(), "dtype": self.torch_dtype}
        if self.dtype == "float64":
            options["experts_implementation"] = "eager"  # torch's grouped product of experts knows no float64
        return options

    def model_config(self) -> PretrainedConfig:
        """The checkpoint's config without dropout, whose random numbers no two layouts draw alike."""
        config = AutoConfig.from_pretrained(self.checkpoint)
        for name, value in config.to_dict().items():
            if name.endswith(("dropout", "pdrop", "layerdrop")) and isinstance(value, float):
                setattr(config, name, 0.0)
        longest = getattr(config, "max_position_embeddings", None)
        if longest is not None and self.sequence_length > longest:
            raise CuboidError(f"sequence_length is {self.sequence_length}, but the model ends at {longest} positions")
        return config

    def micro_batches(self, step: int, replica: int, vocabulary: int) -> list[dict[str, torch.Tensor]]:
        """What a replica trains on in a step: ``accumulate`` micro-batches of arguments, each ``[B, S]``."""
        first = replica * self.accumulate
        numbers = range(first, first + self.accumulate)
        return [self._micro_batch(step, number, vocabulary) for number in numbers]

    def label_tokens(self, step: int, vocabulary: int) -> int:
        """Tokens of a step, in all replicas, that have a loss."""
        replicas = [self.micro_batches(step, replica, vocabulary) for replica in range(self.data_parallel)]
        return sum(int((batch["labels"][:, 1:] != IGNORE_INDEX).sum()) for batch in chain(*replicas))

    def _micro_batch(self, step: int, number: int, vocabulary: int) -> dict[str, torch.Tensor]:
        index = step * self.data_parallel * self.accumulate + number
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        shape = (self.batch, self._length(index))
        ids = torch.randint(vocabulary, shape, generator=generator)
        mask, labels = torch.ones(shape, dtype=torch.long), ids.clone()
        if self.masking:
            labels[torch.rand(shape, generator=generator) < 0.15] = IGNORE_INDEX
            for row in range(self.batch):
                self._mask_row(mask[row], labels[row], kind=self._row_kind(row, index))
            labels[mask == 0] = IGNORE_INDEX
        batch = {"input_ids": ids, "labels": labels}
        if self.packed:
            batch["position_ids"] = _packed_positions(shape, generator)
            return batch
        if self.masking:
            batch["attention_mask"] = mask
        if self.positions:
            batch["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        return batch

    def _length(self, index: int) -> int:
        return self.sequence_length - (index % 4) * self.sequence_length // 8 if self.varying else self.sequence_length

    def _row_kind(self, row: int, index: int) -> str:
        kind = _ROW_KINDS[(row + index) % len(_ROW_KINDS)]
        if kind == "padded left" and not self.left_padding:
            kind = "padded right"
        # A micro-batch without any label has no mean.
        return "whole" if kind == "without labels" and self.batch == 1 and self.mean_over == "micro_batches" else kind

    def _mask_row(self, mask: torch.Tensor, labels: torch.Tensor, kind: str) -> None:
        padding = 0 if self.packed else math.ceil(mask.numel() / 4)
        if kind == "padded right":
            mask[mask.numel() - padding :] = 0
        elif kind == "padded left":
            mask[:padding] = 0
        elif kind == "without labels":
            labels[:] = IGNORE_INDEX


def vocabulary_of(model: Any) -> int:
    """Tokens of a model."""
    return int(model.config.get_text_config().vocab_size)


def _packed_positions(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Positions ``[B, S]`` of sequences that begin where the row does, and at one place in six after that."""
    begins = torch.rand(shape, generator=generator) < 1 / 6
    begins[:, 0] = True
    index = torch.arange(shape[1]).expand(shape)
    return index - (index * begins).cummax(dim=1).values
