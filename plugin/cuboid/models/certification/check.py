"""Run an architecture's own class whole, and cut into stages and segments, and compare loss and every gradient."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from cuboid.models.architectures.certificate import LABELLED, MODES, BatchKind, Mode, Verdict
from cuboid.models.batch.broadcast import MicroBatch
from cuboid.models.batch.length_cases import Case
from cuboid.models.batch.local_batch import TOKEN_TYPES
from cuboid.models.certification.float64 import KeepFloat64, widen
from cuboid.models.certification.layer_kinds import NoSmallModel, small_with_all_kinds
from cuboid.models.certification.sides import SplitModel, run_plain, run_whole
from cuboid.models.certification.trials import (
    ATTEMPTS,
    Attempt,
    Cases,
    ProbeOutcome,
    Trials,
    batch_of_kind,
    joined,
    probe_cases,
    probe_groups,
)
from cuboid.models.kinds.model_kind import takes_token_types
from cuboid.models.kinds.probe_rows import CannotProbe, probe_rows
from cuboid.models.kinds.registry import kind_of_class
from cuboid.models.plain_construction import plain_construction
from cuboid.models.stages.outline import Outline
from cuboid.models.stages.stage_cut import draw_outline

#: Tokens of a sequence whose length doesn't matter.
_SHORT = 12
#: Large enough for scores, gates and norms to leave the range where every function is almost linear.
_WEIGHT_STD, _VECTOR_STD = 0.15, 0.2
#: Why a pipeline can't run a model with another loss.
OTHER_LOSS = (
    "its own loss isn't what a pipeline computes: the mean cross entropy of its logits and labels, and with "
    "output_router_logits the load balancing of all routers"
)


def check(cls: type[PreTrainedModel], config: PretrainedConfig) -> Verdict:
    """Compare a small model of a class with the same model cut, on all micro-batches that may matter to its config.

    Raises:
        CannotProbe: with the reason.
        UnsupportedModelError: a pipeline can't cut it at all.
    """
    return first_verdict(cls, config, _best)


def first_verdict(
    cls: type[PreTrainedModel],
    config: PretrainedConfig,
    compare: Callable[[PreTrainedModel, Outline, Attempt], Verdict],
) -> Verdict:
    """The verdict of ``compare`` on a small model and its outline, from the first attempt in which the model runs.

    Raises:
        CannotProbe: it runs in none; has the last reason.
        UnsupportedModelError: a pipeline can't cut it at all.
    """
    with quiet_cpu():
        small = small_for_probe(cls, config)
        outline = draw_outline(cls, small)
        for attempt in ATTEMPTS:
            try:
                with default_dtype(attempt.default):
                    model = random_model(cls, small, config._attn_implementation, attempt)
                    return compare(model, outline, attempt)
            except CannotProbe as error:
                obstacle = error
        raise obstacle


def check_head(cls: type[PreTrainedModel], config: PretrainedConfig) -> Verdict:
    """Compare a small model that computes its loss in its own forward with the same model cut into stages.

    Raises:
        CannotProbe: with the reason.
        UnsupportedModelError: a pipeline can't cut it at all.
    """
    return first_verdict(cls, config, _compare_head)


def _compare_head(model: PreTrainedModel, outline: Outline, attempt: Attempt) -> Verdict:
    name_padding(model)
    head, takes_types, cut = outline.kind, takes_token_types(model), SplitModel(model, attempt, outline=outline)

    def batch_of(group: Cases, number: int) -> MicroBatch:
        return batch_of_kind(head, model, group, has_types=takes_types and number % 2 == 1)

    def run(batch: MicroBatch) -> ProbeOutcome:
        with attempt.precision():
            return run_whole(copy.deepcopy(model), head, batch)

    left_out: set[BatchKind] = set() if head.labels_each_token else set(LABELLED.values())
    groups: list[Cases] = [() if kind in left_out else ((kind, case),) for kind, case in probe_cases(model.config)]
    refused, error = Trials(groups, batch_of, run, attempt.tolerance).refusals(cut.largest_error, says_length=False)
    segments: dict[BatchKind, str] = {"whole rows": f"it is for {head.words}, whose loss is one of whole sequences"}
    return Verdict({"whole": refused, "segments": segments}, error)


def small_for_probe(cls: type[PreTrainedModel], config: PretrainedConfig) -> PretrainedConfig:
    """A config with tiny sizes, of a model with all kinds of layers.

    Raises:
        CannotProbe: it can't be made small, with the reason.
    """
    try:
        return small_with_all_kinds(cls, config)
    except NoSmallModel as error:
        raise CannotProbe(str(error)) from error
    except Exception as error:
        raise CannotProbe(f"its config can't be made small: {type(error).__name__}: {error}") from error


def shifts_labels(cls: type[PreTrainedModel], config: PretrainedConfig) -> bool | None:
    """Whether a causal model's own loss compares each position with the next label, found with a small model.

    Returns:
        False if it compares a position with its own label; None if neither is so, or no small model runs.
    """
    with quiet_cpu(), suppress(Exception):
        small = small_for_probe(cls, config)
        for attempt in ATTEMPTS:
            with suppress(Exception), default_dtype(attempt.default), attempt.precision():
                model = random_model(cls, small, config._attn_implementation, attempt)
                batch = probe_rows(Case("short", _SHORT), small.get_text_config().vocab_size)
                return run_plain(model, batch, attempt.tolerance).shifts_labels
    return None


@contextmanager
def quiet_cpu() -> Iterator[None]:
    """Context of a probe: CPU, float32 default, random numbers of its own, no warnings about tiny models."""
    own_numbers = torch.random.fork_rng(devices=[])
    # As a context, a device slows down every function of torch.
    on_cpu = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    with default_dtype(torch.float32), own_numbers, on_cpu, torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        yield


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Context with another default dtype of torch; it is global, so only one thread may enter it at a time."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def random_model(
    cls: type[PreTrainedModel], config: PretrainedConfig, attention: str | None, attempt: Attempt, seed: int = 1
) -> PreTrainedModel:
    try:
        copied = copy.deepcopy(config)
        # The default, "sdpa", is probed in place of flash attention, which has no float64.
        wanted = "eager" if attention == "eager" else None
        with plain_construction():
            model: PreTrainedModel = cls._from_config(copied, dtype=attempt.dtype, attn_implementation=wanted)
    except Exception as error:
        raise CannotProbe(f"a small one can't be made: {type(error).__name__}: {error}") from error
    for module in model.modules():
        # Some classifiers have a dropout of their own that no config turns off.
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if attempt.precision is KeepFloat64:
        widen(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() == 1:
                is_bias = name.endswith("bias")
                parameter.copy_((0 if is_bias else 1) + _VECTOR_STD * noise)
            else:
                parameter.copy_(_WEIGHT_STD * noise)
    # In training mode, as in real runs. Nothing is random, since small configs have no dropout.
    return model.train()


def name_padding(model: PreTrainedModel) -> None:
    """Give a classifier's config a padding token, if it has none."""
    if kind_of_class(type(model)).reads_last_token and getattr(model.config, "pad_token_id", None) is None:
        # Classifiers of decoders look for the last token that isn't padding. Users set it after loading, too.
        model.config.pad_token_id = 0


def _best(model: PreTrainedModel, outline: Outline, attempt: Attempt) -> Verdict:
    """The verdict for layers without a cache if segments are right, as with the attention interface; else with one."""
    reference = _Reference(model, outline, attempt)
    verdict = _compare(model, outline, attempt, reference, gives_cache=False)
    if verdict.reason_against("segments") is None:
        return verdict
    with_cache = _compare(model, outline, attempt, reference, gives_cache=True)
    if any(with_cache.reason_against(mode) for mode in ("whole", "segments")):
        return verdict
    # A model that is set up for segments gets a cache also for a short sequence that is a single segment.
    segments = {**with_cache.refused["whole"], **with_cache.refused["segments"]}
    filled = {**with_cache.refused["filled"], **verdict.refused["filled"]}
    refused: dict[Mode, dict[BatchKind, str]] = {
        "whole": verdict.refused["whole"],
        "segments": segments,
        "filled": filled,
    }
    return Verdict(refused, max(verdict.error, with_cache.error), gives_cache=True, shifts_labels=verdict.shifts_labels)


class _Reference:
    """The uncut model, which tells what is right.

    As in real runs, the same copy gets all micro-batches: dynamic rotary embeddings remember the longest one.
    """

    def __init__(self, model: PreTrainedModel, outline: Outline, attempt: Attempt) -> None:
        self._model, self._attempt = copy.deepcopy(model), attempt
        self._has_types = takes_token_types(model) and not outline.is_causal
        self.trials = Trials(probe_groups(model.config), self._batch_of, self._run, attempt.tolerance)

    def _batch_of(self, group: Cases, number: int) -> MicroBatch:
        config = self._model.config
        vocabulary = config.get_text_config().vocab_size
        batch = joined(probe_rows(case, vocabulary, has_labels=kind in LABELLED.values()) for kind, case in group)
        if self._has_types and number % 2 == 1:
            batch[TOKEN_TYPES] = batch["input_ids"] % config.type_vocab_size
        return batch

    def _run(self, batch: MicroBatch) -> ProbeOutcome | str:
        with self._attempt.precision():
            outcome = run_plain(self._model, batch, self._attempt.tolerance)
        return OTHER_LOSS if outcome.shifts_labels is None else outcome


def _compare(
    model: PreTrainedModel, outline: Outline, attempt: Attempt, reference: _Reference, *, gives_cache: bool
) -> Verdict:
    cut = SplitModel(model, attempt, outline=outline, gives_cache=gives_cache)
    refused: dict[Mode, dict[BatchKind, str]] = {}
    largest = 0.0
    for mode in MODES:
        refused[mode], error = reference.trials.refusals(functools.partial(cut.largest_error, mode=mode))
        largest = max(largest, error)
    first = reference.trials.all[0].expected
    return Verdict(refused, largest, gives_cache, isinstance(first, str) or first.shifts_labels is not False)
