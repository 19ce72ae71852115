"""Run a classifier's own class whole, and cut into stages, and compare loss and every gradient."""

from __future__ import annotations

import copy

from transformers import PretrainedConfig, PreTrainedModel

from cuboid.models.architectures.certificate import LABELLED, BatchKind, Verdict
from cuboid.models.certification.check import (
    Attempt,
    CutModel,
    first_verdict,
    largest_error,
    name_padding,
    probe_cases,
    run_whole,
    words_of,
)
from cuboid.models.kinds.model_kind import takes_token_types
from cuboid.models.kinds.probe_rows import CannotProbe
from cuboid.models.stages.outline import Outline


def check_head(cls: type[PreTrainedModel], config: PretrainedConfig) -> Verdict:
    """Compare a small model that computes its loss in its own forward with the same model cut into stages.

    Args:
        cls: the architecture's class.
        config: of the real model.

    Raises:
        CannotProbe: with the reason.
        UnsupportedModelError: a pipeline can't cut it at all.
    """
    return first_verdict(cls, config, _compare)


def _compare(model: PreTrainedModel, outline: Outline, attempt: Attempt) -> Verdict:
    name_padding(model)
    refused: dict[BatchKind, str] = {}
    largest, runs = 0.0, False
    cut = CutModel(model, outline, gives_cache=False)
    head = outline.kind
    for number, (kind, case) in enumerate(probe_cases(model.config)):
        has_labels = kind in LABELLED.values()
        if kind in refused or "whole rows" in refused or (has_labels and not head.labels_each_token):
            continue
        has_types = takes_token_types(model) and number % 2 == 1
        batch = head.probe_batch(case, model, has_types=has_types, has_labels=has_labels)
        try:
            with attempt.precision():
                expected = run_whole(copy.deepcopy(model), head, batch)
        except Exception as error:
            if not runs:
                raise CannotProbe(f"a small one doesn't run: {type(error).__name__}: {error}") from error
            refused[kind] = f"the model itself fails there: {type(error).__name__}: {error}"
            continue
        runs = True
        try:
            with attempt.precision():
                error_of, name = largest_error(cut.run(batch, "whole"), expected)
        except Exception as error:
            refused[kind] = f"{words_of(error)} ({case.name})"
            continue
        if error_of > attempt.tolerance:
            refused[kind] = f"{name} differs by {error_of:.1e} ({case.name}, {case.length} tokens)"
        else:
            largest = max(largest, error_of)
    return Verdict(
        {
            "whole": refused,
            "segments": {"whole rows": f"it is for {head.words}, whose loss is one of whole sequences"},
        },
        largest,
    )
