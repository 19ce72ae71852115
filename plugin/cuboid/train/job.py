"""Parse and check the arguments of a run, as far as one process can before the process group exists."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from cuboid import CuboidError, load_config
from cuboid.checkpoint.format.bounded_files import check_output, check_output_file
from cuboid.checkpoint.format.folder import LATEST, check_replaceable
from cuboid.data.batches import LARGEST_SHARE
from cuboid.data.corpus import check_corpus
from cuboid.data.tokenizer_files import load_tokenizer, tokenizer_in
from cuboid.data.tokens import TOKENS, TokenFolder, check_tokens
from cuboid.integrations.callbacks.loss_guard import Policy
from cuboid.integrations.callbacks.metrics_file import METRICS, check_metrics
from cuboid.integrations.run_report.schema import CURVE, REPORT
from cuboid.models.architectures.refusals import check_unquantized
from cuboid.models.batch.length_cases import check_length, longest_sequence
from cuboid.models.certification.sides import shifts_labels
from cuboid.models.kinds.causal import check_causal
from cuboid.train.resume import Resumed, find_run, find_run_if_any, reject_other_run
from cuboid.train.run_folder import BLOCKS, CHECKPOINTS, MODEL, TRACE, WRITING
from cuboid.train.settings import (
    at_least,
    check_config,
    count,
    keep_checkpoints,
    place_trace,
    run_length,
    weights_dtype,
)
from cuboid.train.trainer_args import names_optimizer, read_trainer_args, trained_by
from cuboid.weights.model_folder import (
    CONFIG,
    as_damage_of,
    check_model_folder,
    model_config,
    weights_bytes,
    without_own_code,
)

#: Keys of a model's config that aren't about its architecture.
_NOT_ARCHITECTURE = frozenset({"transformers_version", "_name_or_path", "dtype", "torch_dtype"})


@dataclass(frozen=True)
class TrainOptions:
    """The command line of ``cuboid train``.

    Attributes:
        model: folder of a Hugging Face checkpoint with its tokenizer; None to train a new model of ``arch_config``.
        data: text file, folder of text files, or folder written by ``cuboid prepare``.
        config: DeepSpeed config, JSON or YAML.
        out: folder for the results; created if missing.
        steps: optimizer steps; None for the length of the config's learning-rate schedule.
        sequence_length: tokens per block.
        heldout_blocks: maximum number of blocks for the held-out loss.
        evaluations: number of evaluations of the held-out loss during the run, including the last.
        seed: of the data's order, of dropout, and of a new model's weights.
        save_every: optimizer steps between checkpoints; None for none, unless the run is interrupted.
        keep_last: number of checkpoints to keep; None for the config's.
        resume: whether to resume the run whose checkpoints are in ``out``.
        resume_from: name of the checkpoint to resume from; None for the latest.
        resume_if_any: with ``resume``: begin a new run if there is none to resume, and resume from an older checkpoint
            if the latest is damaged.
        arch_config: a model's ``config.json``, or the folder that it is in; None with a ``model``.
        tokenizer: folder of a tokenizer; None for the model's, or the one beside the tokens in ``data``.
        trust_remote_code: whether code that comes with the model may be run.
        max_time_s: seconds after which the run is stopped as by a signal; None for no limit.
        log_every_s: seconds between two lines of a log, at least.
        eval_data: names of other texts that are evaluated as the held-out one is, and paths as of ``data``.
        mixed: names of other texts to train on, paths as of ``data``, and their shares of the blocks.
        on_bad_loss: what happens in a step whose loss isn't finite, or jumps up.
        loss_spike: standard deviations of the last losses above their mean from which one is bad; None: only what
            isn't finite.
        trainer_args: JSON or YAML with arguments of the Trainer's.
        report_to: names of loggers of transformers.
    """

    model: Path | None
    data: Path
    config: Path
    out: Path
    steps: int | None = None
    sequence_length: int = 512
    heldout_blocks: int = 32
    evaluations: int = 5
    seed: int = 0
    save_every: int | None = None
    keep_last: int | None = None
    resume: bool = False
    resume_from: str | None = None
    resume_if_any: bool = False
    arch_config: Path | None = None
    tokenizer: Path | None = None
    trust_remote_code: bool = False
    max_time_s: float | None = None
    log_every_s: float = 10.0
    eval_data: tuple[tuple[str, Path], ...] = ()
    mixed: tuple[tuple[str, Path, Fraction], ...] = ()
    on_bad_loss: Policy = "stop"
    loss_spike: float | None = None
    trainer_args: Path | None = None
    report_to: tuple[str, ...] = ()

    @property
    def architecture(self) -> Path:
        """Path of the model's ``config.json``, or of the folder that it is in."""
        source = self.model or self.arch_config
        assert source is not None, "checked in plan()"
        return source

    @property
    def tokenizer_folder(self) -> Path:
        """Folder of the tokenizer."""
        return self.tokenizer or self.model or self.data


@dataclass(frozen=True)
class TrainJob:
    """A checked :class:`TrainOptions`."""

    options: TrainOptions
    #: The DeepSpeed config, with a schedule as long as the run and its trace in the run's folder.
    config: dict[str, Any]
    #: Optimizer steps.
    steps: int
    #: Sequences of one micro-batch of one replica of the mesh.
    micro_batch: int
    #: Micro-batches of one optimizer step.
    accumulation: int
    #: Of the weights.
    dtype: torch.dtype
    tokenizer: Any
    model_config: PretrainedConfig
    #: Entries of the model's embedding.
    vocabulary: int
    #: Hash of the model's architecture.
    model_sha256: str
    #: The data, if it has been tokenized by ``cuboid prepare``.
    tokens: TokenFolder | None
    #: The run to resume, if any.
    resumed: Resumed | None
    #: The Trainer's arguments that the user gives.
    trainer_args: Mapping[str, Any] = field(default_factory=dict)

    def global_batch(self, replicas: int) -> int:
        """Sequences per optimizer step with this number of replicas of the mesh."""
        return self.micro_batch * self.accumulation * replicas


def check_options(options: TrainOptions) -> tuple[dict[str, Any], dict[str, Any]]:
    """Check what can be checked without writing anything, or loading the tokenizer.

    Returns:
        The config, and the Trainer's arguments that the user gives.

    Raises:
        CuboidError, ConfigError: as :func:`plan`.
    """
    for name in ("sequence_length", "heldout_blocks", "evaluations"):
        at_least(getattr(options, name), f"--{name.replace('_', '-')}", 2 if name == "sequence_length" else 1)
    at_least(options.save_every or 0, "--save-every", 0)
    config = load_config(options.config)
    trainer_args = read_trainer_args(options.trainer_args, options.report_to, config)
    check_config(config, is_complete=False, has_optimizer=names_optimizer(trainer_args))
    _check_source(options)
    _check_named(options)
    return config, trainer_args


def plan(options: TrainOptions) -> TrainJob:
    """Check everything that doesn't need the other ranks.

    Raises:
        CuboidError: a file is missing, a number is out of range, or model, tokenizer and data don't match.
        ConfigError: a key of the config that this job needs is missing or malformed.
        CheckpointError: there is no run to resume, or another one's checkpoints or result are in ``out``.
    """
    config, trainer_args = check_options(options)
    if isinstance(config.get("tensor_parallel"), dict):
        config["tensor_parallel"].setdefault("gather_logits", False)  # only the loss is used
    settings = model_config(options.architecture, trust_remote_code=options.trust_remote_code)
    check_unquantized(settings, str(options.architecture))
    resumed = _find_resumed(options)
    # A run that was killed while it wrote its result, and had no checkpoint, is begun again.
    is_unfinished = options.resume_if_any and (options.out / WRITING).exists()
    if resumed is None and not is_unfinished:
        reject_other_run(options.out, (MODEL, REPORT))
    # --steps, else the resumed run's length, else (None) that of the config's schedule.
    requested_steps = resumed.state.steps if resumed is not None and options.steps is None else options.steps
    steps = run_length(requested_steps, config)
    if resumed is not None and steps < resumed.state.step:
        raise CuboidError(
            f"--steps is {steps}, but the run in {resumed.path} is {resumed.state.step} steps long already"
        )
    trace = place_trace(config, options.out, steps if resumed is None else steps - resumed.state.step)
    keep_checkpoints(config, options.keep_last)
    check_config(config, is_complete=True, has_optimizer=names_optimizer(trainer_args))
    micro_batch = count(config, "train_micro_batch_size_per_gpu", default=None)
    accumulation = count(config, "gradient_accumulation_steps", default=1)
    dtype = weights_dtype(config)
    tokenizer = _tokenizer(options)
    vocabulary, model_sha256 = _check_model(options, settings, tokenizer)
    # Room for the result, and for a checkpoint's weights if there are checkpoints.
    size_bytes = _new_bytes(options, settings, dtype) if options.model is None else weights_bytes(options.model, dtype)
    check_output(options.out, size_bytes * (2 if options.save_every else 1))
    if trace is not None:
        check_output(trace)
    _check_results(options, 0 if resumed is None else resumed.state.step, steps)
    tokens = None
    if TokenFolder.is_store(options.data):
        tokens = TokenFolder.open(options.data)
        check_tokens(tokens.meta, tokenizer, vocabulary)
    if resumed is not None:
        fixed = {name: getattr(options, name) for name in ("seed", "sequence_length", "heldout_blocks")}
        data = {} if tokens is None or options.mixed else {"data_fingerprint": tokens.meta.data_sha256}
        trained = trained_by(trainer_args)
        resumed.reject_differences(**fixed, model_sha256=model_sha256, **data, trainer_args=trained)
    return TrainJob(
        options=options,
        config=config,
        steps=steps,
        micro_batch=micro_batch,
        accumulation=accumulation,
        dtype=dtype,
        tokenizer=tokenizer,
        model_config=settings,
        vocabulary=vocabulary,
        model_sha256=model_sha256,
        tokens=tokens,
        resumed=resumed,
        trainer_args=trainer_args,
    )


def _find_resumed(options: TrainOptions) -> Resumed | None:
    if not options.resume:
        return None
    return find_run_if_any(options.out) if options.resume_if_any else find_run(options.out, options.resume_from)


def _check_results(options: TrainOptions, done: int, steps: int) -> None:
    """Check that nothing is in the way of what the run will write into its folder, which itself can be written."""
    for name in (CHECKPOINTS, MODEL, TRACE, TOKENS):
        if os.path.lexists(options.out / name):
            check_output(options.out / name)
    for name in (REPORT, CURVE, BLOCKS, METRICS, f"{CHECKPOINTS}/{LATEST}"):
        if os.path.lexists(options.out / name):
            check_output_file(options.out / name)
    check_metrics(options.out / METRICS)
    # Of all steps, as Ctrl-C saves after any. What is there is gone through, since there may be billions of steps.
    for path in (options.out / CHECKPOINTS).glob("global_step*"):
        step = path.name.removeprefix("global_step")
        if step.isdecimal() and len(step) < 20 and done < int(step) <= steps:
            check_replaceable(path)


def _tokenizer(options: TrainOptions) -> Any:
    trusted = options.trust_remote_code
    if options.model is not None:
        return load_tokenizer(options.model, trust_remote_code=trusted)
    if options.tokenizer is not None:
        return tokenizer_in(options.tokenizer, trust_remote_code=trusted)
    return tokenizer_in(options.data, remedy="name its folder by --tokenizer", trust_remote_code=trusted)


def _check_source(options: TrainOptions) -> None:
    """Check that the data exists, and that the model comes from either a checkpoint or a config."""
    if not _exists(options.data, "--data"):
        raise CuboidError(f"--data {str(options.data)!r} does not exist; name a text file or a folder of text files")
    if not TokenFolder.is_store(options.data):
        check_corpus(options.data)
    if (options.model is None) == (options.arch_config is None):
        raise CuboidError("give either --model, a checkpoint, or --arch-config, the config.json of a new model")
    if options.model is not None:
        if options.tokenizer is not None:
            raise CuboidError("--tokenizer goes with --arch-config; a --model has its own")
        check_model_folder(options.model)
    elif not _exists(options.architecture, "--arch-config"):
        raise CuboidError(f"--arch-config {str(options.arch_config)!r} does not exist; name a model's config.json")


def _check_named(options: TrainOptions) -> None:
    """Check the names of the other texts to train on or to evaluate, their shares, and that they exist."""
    named = [("--mix", name, path) for name, path, _ in options.mixed]
    named += [("--eval", name, path) for name, path in options.eval_data]
    for option, name, path in named:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name) or name in ("heldout", "train"):
            raise CuboidError(
                f"{option} {name}={path}: the name is part of a figure's, so it has letters, digits, - and _ alone, "
                "begins with a letter, and is neither heldout nor train"
            )
        if [other for _, other, _ in named].count(name) > 1:
            raise CuboidError(
                f"{option} names {name} twice; give each text a name of its own (the held-out part of what --mix names "
                "is evaluated anyway)"
            )
        if not _exists(path, option):
            raise CuboidError(f"{option} {name}={path} does not exist; name a text file or a folder of text files")
        if not TokenFolder.is_store(path):
            check_corpus(path)
    share = sum(share for _, _, share in options.mixed)
    if share > LARGEST_SHARE:
        raise CuboidError(
            f"the texts of --mix have {float(share):g} of all blocks; --data has the rest, of at least "
            f"{float(1 - LARGEST_SHARE):g}"
        )


def _exists(path: Path, option: str) -> bool:
    try:
        return path.exists()
    except OSError as error:  # a name that is too long, or a folder that can't be searched
        raise CuboidError(f"{option} {str(path)!r} can't be read: {error.strerror}") from None


def _new_bytes(options: TrainOptions, config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Size of a new model's weights."""
    trusted = options.trust_remote_code
    with without_own_code(options.architecture), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=trusted)
    return model.num_parameters() * dtype.itemsize


def _check_loss(config: PretrainedConfig) -> None:
    """Check that the model's own loss is that of next-token prediction: that it shifts the labels."""
    cls = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    # Models with the user's own code (auto_map) aren't checked: it isn't run before the model is made.
    if cls is not None and not getattr(config, "auto_map", None) and shifts_labels(cls, config) is False:
        raise CuboidError(
            f"cuboid train gives a model its input_ids as labels, and {cls.__name__}'s own loss compares each position "
            "with its own label, so that it would learn to copy; train it in a script of your own, with "
            "cuboid.from_pretrained and labels that are shifted by one token"
        )


def _check_model(options: TrainOptions, config: PretrainedConfig, tokenizer: Any) -> tuple[int, str]:
    """Check the model against tokenizer and sequence length; returns its vocabulary size and architecture's hash."""
    check_causal(config, "cuboid train")
    _check_loss(config)
    file = options.architecture
    with as_damage_of(file / CONFIG if file.is_dir() else file):
        text_config = config.get_text_config()
        vocabulary = int(text_config.vocab_size)
    if len(tokenizer) > vocabulary:
        raise CuboidError(
            f"the tokenizer in {str(options.tokenizer_folder)!r} has {len(tokenizer)} entries, but the model's "
            f"vocabulary only {vocabulary}; resize the model's embedding or use the tokenizer that it was "
            "trained with"
        )
    check_length(options.sequence_length, longest_sequence(config), "--sequence-length")
    architecture = {key: value for key, value in config.to_dict().items() if key not in _NOT_ARCHITECTURE}
    return vocabulary, hashlib.sha256(json.dumps(architecture, sort_keys=True, default=str).encode()).hexdigest()
