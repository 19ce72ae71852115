"""The run that both sides of a comparison make: the same model, batches and optimizer."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from cuboid.errors import CuboidError, UnsupportedModelError
from cuboid.models.architectures.certificate import BatchKind
from cuboid.models.architectures.refusals import check_unquantized
from cuboid.models.architectures.small_model_names import Dtype
from cuboid.models.batch.length_cases import (
    LONGEST,
    Case,
    Padding,
    check_length,
    covering,
    longest_sequence,
    packed_case,
    shrunk,
    thresholds,
)
from cuboid.models.certification.float64 import Precision, precision
from cuboid.models.kinds.probe_rows import vocabulary_size
from cuboid.models.kinds.registry import auto_class_of, check_class
from cuboid.weights.model_folder import model_config as read_model_config
from cuboid.weights.model_folder import without_own_code

IGNORE_INDEX = -100
_LENGTH = 32
#: Positions per chunk in steps with a chunked loss; few, so that short rows have several chunks too.
_CHUNK_POSITIONS = 3


@dataclass(frozen=True)
class Plan:
    """A short training run, the same for plain transformers and for Cuboid.

    Args:
        checkpoint: Hugging Face checkpoint that both sides load.
        dtype: of weights and arithmetic.
        keep_float64: whether casts to float32 inside the models are skipped, see :class:`KeepFloat64`.
        batch: rows of a micro-batch, for the whole mesh.
        cases: kinds of micro-batches, used in turn; None for the uniform ones that ``sequence_length``, ``varying``,
            ``masking``, ``left_padding`` and ``packed`` describe.
        sequence_length: tokens of a row; None for 32.
        varying: whether only every fourth micro-batch has that length, and others are shorter.
        steps: optimizer steps.
        data_parallel: replicas of the mesh.
        accumulate: micro-batches per replica and step.
        masking: whether rows have padding, and some labels are missing; if not, the models get no attention mask.
        left_padding: whether padding may be on the left too.
        positions: whether the models get position ids, which count from a row's first real token.
        packed: whether rows have several sequences each, separated by position ids that restart. Such rows have no
            padding and no attention mask.
        checkpointing: whether activations are recomputed in backward.
        mean_over: ``"tokens"``: a step's loss is the mean over all its label tokens, and the models get
            ``num_items_in_batch``; ``"micro_batches"``: it is the mean of the micro-batches' means, as in DeepSpeed.
        learning_rate, betas, epsilon, weight_decay: of torch's AdamW; tensors of one dim (norms, biases) don't decay.
        clipping: maximum gradient norm; 0 for none.
        shrink: whether to make thresholds of the model's config (such as an attention window) so small that the longest
            micro-batch crosses them.
        rounded: whether to round weights to bfloat16 first, regardless of ``dtype``.
        shard_in_memory: whether Cuboid's side loads the full model and then shards it, rather than loading shards.
        counts_items: whether a causal model's own loss takes ``num_items_in_batch``; else means of micro-batches are
            weighted by their tokens.
        left_out: kinds of micro-batches that are left out, because they give wrong results with the architecture, and
            why they do.
        seed: of the batches.
        trust_remote_code: whether code that comes with the model may be run.
        adapter: folder of PEFT with the adapter that is trained, while the model's own weights are frozen.
    """

    checkpoint: str
    dtype: Dtype = "float64"
    keep_float64: bool = True
    batch: int = 2
    cases: tuple[Case, ...] | None = None
    sequence_length: int | None = None
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
    # Adam divides a gradient by its own magnitude. Where the exact gradient is zero, there is only rounding noise,
    # which a small epsilon would turn into a full step.
    epsilon: float = 1e-4
    # Large, so that a few steps show whether it is applied to the right parameters.
    weight_decay: float = 0.1
    clipping: float = 0.0
    shrink: bool = False
    rounded: bool = False
    shard_in_memory: bool = False
    counts_items: bool = True
    left_out: tuple[tuple[BatchKind, str], ...] = ()
    seed: int = 0
    trust_remote_code: bool = False
    adapter: str | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "steps", "data_parallel", "accumulate"):
            if getattr(self, name) < 1:
                raise CuboidError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.sequence_length is not None and self.sequence_length < 4:
            raise CuboidError(f"sequence_length is {self.sequence_length}; it must be at least 4")

    @property
    def torch_dtype(self) -> torch.dtype:
        """``dtype`` as a torch dtype."""
        return getattr(torch, self.dtype)

    def recompute_contexts(self) -> tuple[Precision, Precision]:
        """Contexts of a forward and of its recomputation, for torch's activation checkpointing.

        The recomputation needs its own, because backward runs outside the caller's ``precision`` context.
        """
        return contextlib.nullcontext(), precision(keep_float64=self.keep_float64)

    def loading_options(self) -> dict[str, Any]:
        """Keyword arguments of ``from_pretrained``, for both sides."""
        options: dict[str, Any] = {"config": self.model_config(), "dtype": self.torch_dtype}
        options["trust_remote_code"] = self.trust_remote_code
        if self.dtype == "float64":
            options["experts_implementation"] = "eager"  # torch's grouped matrix product doesn't support float64
        return options

    @property
    def auto_class(self) -> Any:
        """Transformers' auto class for the task of the checkpoint's model.

        Raises:
            UnsupportedModelError: the task isn't supported.
        """
        architectures = self.stored_config().architectures or ()
        for known in (getattr(transformers, name, None) for name in architectures):
            if isinstance(known, type):
                check_class(known)
        return auto_class_of(architectures)

    def empty_model(self) -> PreTrainedModel:
        """The plan's model on the meta device.

        Raises:
            UnsupportedModelError: transformers' auto class has no model for its config.
        """
        config, auto_class = self.model_config(), self.auto_class
        if type(config) not in auto_class._model_mapping and not getattr(config, "auto_map", None):
            raise UnsupportedModelError(
                f"{auto_class.__name__} has no model for the model_type {config.model_type!r} of {self.checkpoint}; it "
                "may be the config of a part of another model, whose checkpoint can be verified"
            )
        with without_own_code(self.checkpoint), torch.device("meta"):
            model: PreTrainedModel = auto_class.from_config(config, trust_remote_code=self.trust_remote_code)
        return model

    def stored_config(self) -> PretrainedConfig:
        """The checkpoint's config as it is.

        Raises:
            CheckpointError: it can't be read, or needs code that isn't trusted.
            UnsupportedModelError: its weights are quantised.
        """
        config: PretrainedConfig = read_model_config(Path(self.checkpoint), trust_remote_code=self.trust_remote_code)
        check_unquantized(config, self.checkpoint)
        return config

    def model_config(self) -> PretrainedConfig:
        """The checkpoint's config without dropout, whose masks differ between layouts."""
        config = self.stored_config()
        _leave_dropout_out(config)
        # Lengths that a plan chooses itself exceed the range of rotary embeddings on purpose, to test what lies beyond.
        # Only where positions end, as in a learned table, do they have to stop.
        ends = (threshold.tokens for threshold in thresholds(config) if threshold.is_end)
        longest = next(ends, None) if self.sequence_length is None else longest_sequence(config)
        check_length(self.longest, longest, "sequence_length")
        return shrunk(config, self.longest) if self.shrink else config

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        if self.cases is not None:
            return max(case.length for case in self.cases)
        return self.sequence_length or _LENGTH

    @property
    def is_default(self) -> bool:
        """Whether all choices about the micro-batches have their defaults."""
        chosen = (self.cases, self.sequence_length, self.varying, self.masking, self.positions, self.packed)
        return chosen == (None, None, False, True, False, False)

    def without_left_padding(self) -> Plan:
        """This plan with padding on the right instead of the left."""
        right: dict[Padding, Padding] = {"left": "right", "rows": "right rows"}
        cases = self.cases and tuple(replace(c, padding=right.get(c.padding, c.padding)) for c in self.cases)
        return replace(self, left_padding=False, cases=cases)

    def without(self, refused: dict[BatchKind, str]) -> Plan:
        """This plan without the refused kinds of micro-batches, which are recorded in ``left_out``."""
        swaps: dict[Padding, Padding] = {}
        if "padding on the left" in refused:
            swaps = {"left": "right", "rows": "right rows"}
        if "padding on the right" in refused:
            swaps |= {"left": "none", "right": "none", "rows": "none", "right rows": "none"}
        cases = self.cases and tuple(
            replace(case, padding=swaps.get(case.padding, case.padding)) for case in self.cases
        )
        if cases and "packed sequences" in refused:
            cases = tuple(replace(case, packed=()) for case in cases)
        return replace(self, cases=cases, left_out=tuple(refused.items()))

    def without_positions(self) -> Plan:
        """This plan for a model that takes no position ids: nothing packed, and positions count from 0."""
        cases = self.cases and tuple(replace(case, packed=(), first_position=0) for case in self.cases)
        return replace(self, positions=False, packed=False, cases=cases)

    def chunk_bytes(self, step: int, vocabulary: int, ranks: int) -> int | None:
        """Byte limit of the logits in a chunk of the loss: small in even steps, None (the default) in odd ones.

        ``ranks`` is the number of ranks that share a chunk's positions and rows.
        """
        return None if step % 2 else 4 * self.batch * _CHUNK_POSITIONS * vocabulary // ranks

    def micro_batches(
        self, step: int, replica: int, vocabulary: int, pad_token: int | None = None
    ) -> list[dict[str, torch.Tensor]]:
        """A replica's ``accumulate`` micro-batches of a step, as keyword arguments, each ``[B, S]``."""
        indices = self.indices(step, replica)
        return [self.micro_batch(index, self.case(index), vocabulary, pad_token) for index in indices]

    def indices(self, step: int, replica: int) -> range:
        """The numbers of a replica's micro-batches in a step, counted over all replicas and steps."""
        first = (step * self.data_parallel + replica) * self.accumulate
        return range(first, first + self.accumulate)

    def label_tokens(self, step: int, vocabulary: int, pad_token: int | None = None) -> int:
        """Number of tokens in a step, over all replicas, that have a loss."""
        replicas = [self.micro_batches(step, replica, vocabulary, pad_token) for replica in range(self.data_parallel)]
        return sum(int((batch["labels"][:, 1:] != IGNORE_INDEX).sum()) for batch in chain(*replicas))

    def case(self, index: int) -> Case:
        """The kind of a micro-batch, by its number over all replicas and steps."""
        if self.cases is not None:
            return self.cases[index % len(self.cases)]
        longest = self.sequence_length or _LENGTH
        length = longest - (index % 4) * longest // 8 if self.varying else longest
        if self.packed:
            return packed_case(length)
        return Case("rows", length, ("rows" if self.left_padding else "right rows") if self.masking else "none")

    def cases_run(self) -> list[Case]:
        """The kinds of micro-batches that all steps have."""
        count = self.steps * self.data_parallel * self.accumulate
        return list(dict.fromkeys(self.case(index) for index in range(count)))

    def generator(self, index: int, stream: int = 0) -> torch.Generator:
        """A generator seeded by a micro-batch's number, so that both sides get the same batch on any layout."""
        return torch.Generator().manual_seed(self.seed * 1_000_003 + index + stream * 100_003)

    def micro_batch(
        self, index: int, case: Case, vocabulary: int, pad_token: int | None = None, stream: int = 0
    ) -> dict[str, torch.Tensor]:
        """The micro-batch with this number, tensors ``[B, S]``; each ``stream`` has other ids."""
        generator = self.generator(index, stream)
        shape = (self.batch, case.length)
        ids = torch.randint(vocabulary, shape, generator=generator)
        mask, positions = case.attention_mask(self.batch, first=index), case.position_ids(self.batch, first=index)
        if pad_token is not None:
            _place_pads(ids, pad_token, mask, positions, vocabulary)
        labels = ids.clone()
        if self.masking:
            labels[torch.rand(shape, generator=generator) < 0.15] = IGNORE_INDEX
            # With a mean per micro-batch, that of one without any label would be 0 / 0.
            needs_labels = self.batch == 1 and self.mean_over == "micro_batches"
            for row, kind in enumerate(case.row_kinds(self.batch, first=index)):
                if kind == "without labels" and not needs_labels:
                    labels[row] = IGNORE_INDEX
        batch = {"input_ids": ids, "labels": labels}
        if mask is not None:
            labels[mask == 0] = IGNORE_INDEX
            batch["attention_mask"] = mask
            if self.positions:
                positions = (mask.cumsum(1) - 1).clamp(min=0)
        elif self.positions and positions is None:
            positions = torch.arange(case.length).repeat(self.batch, 1)
        return batch if positions is None else {**batch, "position_ids": positions}


def _leave_dropout_out(config: PretrainedConfig) -> None:
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        elif isinstance(value, PretrainedConfig):
            _leave_dropout_out(value)


def covering_plan(config: PretrainedConfig) -> dict[str, Any]:
    """Fields of a plan whose micro-batches cross the thresholds of a model's config, which is shrunk for that."""
    return {"cases": covering(shrunk(config, LONGEST)), "shrink": True}


def _place_pads(
    ids: torch.Tensor, token: int, mask: torch.Tensor | None, positions: torch.Tensor | None, vocabulary: int
) -> None:
    """Put the pad token at padding, and at one real position of each row, as if it were the end-of-text token too."""
    ids[ids == token] = (token + 1) % vocabulary
    if mask is not None:
        ids[mask == 0] = token
    middle = ids.shape[1] // 2
    for row in range(ids.shape[0]):
        # Not at the start of a packed sequence: if its embedding is zero, so is every layer's output there, where the
        # derivative of a norm is huge.
        begins = positions is not None and positions[row, middle] == 0
        ids[row, middle + 1 if begins else middle] = token


def tokens_of(model: Any) -> tuple[int, int | None]:
    """A model's vocabulary size and, if it has one, its pad token."""
    pad = getattr(model.config.get_text_config(), "pad_token_id", None)
    vocabulary = vocabulary_of(model)
    return vocabulary, pad if isinstance(pad, int) and 0 <= pad < vocabulary else None


def vocabulary_of(model: Any) -> int:
    """A model's vocabulary size."""
    return vocabulary_size(model.config)


def width_of(model: Any) -> int:
    """The width of a model's residual stream; 0 if its config doesn't tell, so that no outputs are compared."""
    return int(getattr(model.config.get_text_config(), "hidden_size", 0))
