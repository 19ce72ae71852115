"""Run an architecture's own class whole, and cut into stages and segments, and compare loss and every gradient."""

from __future__ import annotations

import copy
import functools

from transformers import PretrainedConfig, PreTrainedModel

from cuboid.models.architectures.certificate import LABELLED, MODES, BatchKind, Mode, Verdict
from cuboid.models.batch.broadcast import MicroBatch
from cuboid.models.batch.local_batch import TOKEN_TYPES
from cuboid.models.certification.sides import (
    SplitModel,
    first_that_runs,
    quiet_cpu,
    run_plain,
    run_whole,
    small_for_probe,
)
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
from cuboid.models.kinds.probe_rows import probe_rows, vocabulary_size
from cuboid.models.stages.outline import Outline
from cuboid.models.stages.stage_cut import draw_outline

#: Why a pipeline can't run a model with another loss.
OTHER_LOSS = (
    "its own loss isn't what a pipeline computes: the mean cross entropy of its logits and labels, and with "
    "output_router_logits the load balancing of all routers"
)


def check(cls: type[PreTrainedModel], config: PretrainedConfig) -> Verdict:
    """Compare a small model of a class with the same model cut, on all micro-batches that may matter to its config.

    Raises:
        CannotProbe: it runs in no precision; has the last reason.
        UnsupportedModelError: a pipeline can't cut it at all.
    """
    with quiet_cpu():
        small = small_for_probe(cls, config)
        outline = draw_outline(cls, small)
        compare = _compare_head if outline.kind.runs_own_head else _best

        def verdict_on(model: PreTrainedModel, attempt: Attempt) -> Verdict:
            return compare(model, outline, attempt)

        return first_that_runs(cls, small, config._attn_implementation, ATTEMPTS, verdict_on)


def _compare_head(model: PreTrainedModel, outline: Outline, attempt: Attempt) -> Verdict:
    """The verdict on a model that computes its loss in its own forward."""
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
        vocabulary = vocabulary_size(config)
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
