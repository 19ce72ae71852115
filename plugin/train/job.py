"""What a run is asked to do, checked as far as one process can before it meets the others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from cuboid import CheckpointError, ConfigError, CuboidError, load_config, split_config
from cuboid.train.report import TRACE
from cuboid.train.tokens import Tokens, TokensMeta, fingerprint


@dataclass(frozen=True)
class TrainOptions:
    """The command line of ``cuboid train``.

    Attributes:
        model: folder of a Hugging Face checkpoint with its tokenizer.
        data: text file, folder of text files, or folder written by ``cuboid prepare``.
        config: DeepSpeed config, JSON or YAML.
        out: folder for the results; made if need be.
        steps: optimizer steps; None for the length of the config's learning-rate schedule.
        sequence_length: tokens of a block.
        heldout_blocks: blocks of the held-out loss, at most.
        evaluations: how many times the held-out loss is taken during the run, the last one included.
        seed: of the order of the data, and of dropout.
    """

    model: Path
    data: Path
    config: Path
    out: Path
    steps: int | None = None
    sequence_length: int = 512
    heldout_blocks: int = 32
    evaluations: int = 5
    seed: int = 0


@dataclass(frozen=True)
class Job:
    """A checked :class:`TrainOptions`.

    Attributes:
        options: what was asked.
        config: the DeepSpeed config, its schedule as long as the run, its trace in the run's folder.
        steps: optimizer steps.
        micro_batch: sequences of one micro-batch of one replica of the mesh.
        accumulation: micro-batches of one optimizer step.
        dtype: of the weights.
        tokenizer: the model's.
        vocabulary: entries of the model's embedding.
        tokens: the data, if it was tokenized beforehand.
    """

    options: TrainOptions
    config: dict[str, Any]
    steps: int
    micro_batch: int
    accumulation: int
    dtype: torch.dtype
    tokenizer: Any
    vocabulary: int
    tokens: Tokens | None

    @property
    def has_pipeline(self) -> bool:
        """Whether the model is cut into stages, and the engine takes a whole step at once."""
        return "engine" in (self.config.get("pipeline") or {})

    def global_batch(self, replicas: int) -> int:
        """Sequences of one optimizer step on that many replicas of the mesh."""
        return self.micro_batch * self.accumulation * replicas


def plan(options: TrainOptions) -> Job:
    """Check everything that needs no other rank.

    Raises:
        CuboidError: a file is missing, a number is out of range, or model, tokenizer and data don't fit
            one another.
        ConfigError: a key of the config that this job needs is missing or malformed.
    """
    for name in ("sequence_length", "heldout_blocks", "evaluations"):
        _at_least(getattr(options, name), f"--{name.replace('_', '-')}", 2 if name == "sequence_length" else 1)
    config = load_config(options.config)
    if isinstance(config.get("tensor_parallel"), dict):
        config["tensor_parallel"].setdefault("gather_logits", False)  # nobody here looks at them
    steps = _steps(options.steps, config)
    _place_trace(config, options.out, steps)
    micro_batch = _count(config, "train_micro_batch_size_per_gpu", default=None)
    accumulation = _count(config, "gradient_accumulation_steps", default=1)
    tokenizer = load_tokenizer(options.model)
    vocabulary = _check_model(options, tokenizer)
    tokens = None
    if Tokens.is_store(options.data):
        tokens = Tokens.open(options.data)
        check_tokens(tokens.meta, tokenizer, vocabulary)
    elif not options.data.exists():
        raise CuboidError(f"--data {str(options.data)!r} does not exist; name a text file or a folder of text files")
    return Job(options, config, steps, micro_batch, accumulation, _dtype(config), tokenizer, vocabulary, tokens)


def load_tokenizer(model: Path) -> Any:
    """The tokenizer beside a checkpoint.

    Raises:
        CheckpointError: no such folder, no model in it, or no tokenizer.
    """
    if not (model / "config.json").is_file():
        raise CheckpointError(
            f"model {str(model)!r} is not the folder of a Hugging Face checkpoint: no config.json in it"
        )
    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"model {str(model)!r} has no tokenizer that transformers can load: {error}") from error


def check_tokens(meta: TokensMeta, tokenizer: Any, vocabulary: int) -> None:
    """Refuse tokens that another tokenizer wrote, or that the model's embedding doesn't reach.

    Raises:
        CuboidError: as said.
    """
    if meta.tokenizer_sha256 != fingerprint(tokenizer):
        raise CuboidError(
            "the data was tokenized with another tokenizer than the model's; run `cuboid prepare` again with "
            "this --model, or give the text itself as --data"
        )
    if meta.largest_id >= vocabulary:
        raise CuboidError(
            f"the data holds token {meta.largest_id}, but the model's vocabulary has {vocabulary} entries "
            f"(0 to {vocabulary - 1})"
        )


def check_size(meta: TokensMeta, sequence_length: int, global_batch: int) -> None:
    """Refuse data that can't fill one optimizer step, or one held-out block.

    Raises:
        CuboidError: as said, with the number of tokens that would do.
    """
    for split, tokens, blocks in (("train", meta.train, global_batch), ("held-out", meta.heldout, 1)):
        if tokens // sequence_length < blocks:
            raise CuboidError(
                f"the {split} part of the data has {tokens} tokens; {blocks} blocks of {sequence_length} "
                f"tokens need {blocks * sequence_length}. Give more text, or a smaller --sequence-length "
                "or batch"
            )


def _check_model(options: TrainOptions, tokenizer: Any) -> int:
    try:
        text_config = AutoConfig.from_pretrained(options.model).get_text_config()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the config.json in {str(options.model)!r} can't be read: {error}") from error
    vocabulary = int(text_config.vocab_size)
    if len(tokenizer) > vocabulary:
        raise CuboidError(
            f"the tokenizer in {str(options.model)!r} has {len(tokenizer)} entries, but the model's "
            f"vocabulary only {vocabulary}; resize the model's embedding or use the tokenizer that it was "
            "trained with"
        )
    positions = getattr(text_config, "max_position_embeddings", None)
    if positions is not None and options.sequence_length > positions:
        raise CuboidError(f"--sequence-length {options.sequence_length} is beyond the model's {positions} positions")
    return vocabulary


def _steps(asked: int | None, config: dict[str, Any]) -> int:
    """The length of the run; a schedule of another length in ``config`` is stretched to it, warm-up too."""
    schedule = (config.get("scheduler") or {}).get("params") or {}
    written = schedule.get("total_num_steps")
    steps = written if asked is None else asked
    if not isinstance(steps, int):
        raise ConfigError("--steps is missing, and the config has no scheduler.params.total_num_steps to take it from")
    _at_least(steps, "--steps", 1)
    if isinstance(written, int) and written > 0 and written != steps:
        warmup = schedule.get("warmup_num_steps")
        if isinstance(warmup, int):
            schedule["warmup_num_steps"] = max(1, round(warmup * steps / written))
    if "total_num_steps" in schedule:
        schedule["total_num_steps"] = steps
    return steps


def _place_trace(config: dict[str, Any], out: Path, steps: int) -> None:
    """Let a trace go to the run's folder, unless another was named, and be taken before the run ends."""
    ours, _ = split_config(config)
    if ours is None or ours.pipeline is None or not ours.pipeline.trace:
        return
    section = config["pipeline"]
    section["trace"] = str(out / TRACE) if ours.pipeline.trace is True else ours.pipeline.trace
    section["trace_step"] = min(ours.pipeline.trace_step, steps)


def _count(config: dict[str, Any], key: str, default: int | None) -> int:
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{key} is {value!r}; `cuboid train` needs a number of at least 1 there")
    return value


def _at_least(value: int, name: str, least: int) -> None:
    if value < least:
        raise CuboidError(f"{name} is {value}; it must be at least {least}")


def _dtype(config: dict[str, Any]) -> torch.dtype:
    section = config.get("bf16")
    return torch.bfloat16 if isinstance(section, dict) and section.get("enabled") is True else torch.float32
