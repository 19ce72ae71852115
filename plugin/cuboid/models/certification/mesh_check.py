"""Run an architecture's own class whole, and split over small meshes, and compare loss and every gradient."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from cuboid.distributed.topology import MeshShape
from cuboid.errors import UnsupportedModelError
from cuboid.models.architectures.certificate import LABELLED, BatchKind, MeshVerdict, Mode
from cuboid.models.architectures.roles import blocks_computed_whole, split_blocks
from cuboid.models.batch.broadcast import MicroBatch
from cuboid.models.certification.certificates import certificate_of
from cuboid.models.certification.check import OTHER_LOSS
from cuboid.models.certification.float64 import KeepFloat64
from cuboid.models.certification.layer_kinds import on_meta
from cuboid.models.certification.sides import (
    SplitModel,
    first_that_runs,
    quiet_cpu,
    random_model,
    run_plain,
    run_whole,
    small_for_probe,
)
from cuboid.models.certification.trials import (
    ATTEMPTS,
    Attempt,
    Cases,
    ProbeOutcome,
    Trial,
    Trials,
    batch_of_kind,
    probe_groups,
    words_of,
    words_of_error,
)
from cuboid.models.kinds.model_kind import takes_token_types
from cuboid.models.kinds.probe_rows import CannotProbe
from cuboid.models.kinds.registry import kind_of, kind_of_class
from cuboid.models.stages.outline import Outline
from cuboid.models.stages.stage_cut import draw_outline

#: Each axis by itself, and all together. Grouped key/value heads divide by all of these meshes but the last.
MESHES = (MeshShape(1, 2, 1), MeshShape(1, 1, 2), MeshShape(2, 1, 1), MeshShape(2, 2, 2))
#: The attempts that keep float64, in which small differences can't hide.
_EXACT = tuple(replace(attempt, tolerance=1e-9) for attempt in ATTEMPTS if attempt.precision is KeepFloat64)
#: The mesh for other kinds of micro-batches, without `batch`: along it, they are only rows.
_OTHER_KINDS = MeshShape(1, 2, 2)
#: Of a small model.
_MOST_ELEMENTS = 20_000_000


def check_meshes(cls: type[PreTrainedModel], config: PretrainedConfig) -> MeshVerdict:
    """Compare a small model of a class with itself on small meshes, on all micro-batches that may matter to its config.

    Blocks are split if that is right. If not, as few of them as possible are computed whole.

    Raises:
        CannotProbe: with the reason.
    """
    with quiet_cpu():
        small = small_for_probe(cls, config)
        _check_size(cls, small)
        small = kind_of_class(cls).probe_config(small, lambda one: random_model(cls, one, None, ATTEMPTS[-1]))

        def verdict_on(model: PreTrainedModel, attempt: Attempt) -> MeshVerdict:
            return _best(_Probe(model, attempt), gives_cache=_gives_cache(cls, config))

        return first_that_runs(cls, small, config._attn_implementation, _EXACT, verdict_on)


def _check_size(cls: type[PreTrainedModel], small: PretrainedConfig) -> None:
    """Check that a small model is one: of towers, configs have sizes by many names.

    Raises:
        CannotProbe: it isn't, and all ranks' copies of it would be in this process.
    """
    try:
        elements = on_meta(cls, small).num_parameters()
    except Exception as error:
        raise CannotProbe(f"a small one can't be made: {type(error).__name__}: {error}") from error
    if elements > _MOST_ELEMENTS:
        raise CannotProbe(f"its small model has {elements:,} parameters: a size in its config has an unknown key")


def _gives_cache(cls: type[PreTrainedModel], config: PretrainedConfig) -> bool:
    """Whether a pipeline gives layers a cache, with or without a mesh; False if there is no pipeline for the class."""
    try:
        return certificate_of(cls, config).gives_cache
    except UnsupportedModelError:
        return False


class _Probe:
    """A small model, its micro-batches, and the expected result of each."""

    def __init__(self, model: PreTrainedModel, attempt: Attempt) -> None:
        self.model, self.attempt = model, attempt
        self.kind = kind_of(type(model), model.config)
        self.takes_types = takes_token_types(model)
        self.has_own_loss = False
        # Not the config's: decoders taken from encoder-decoders by themselves ignore it.
        if any(getattr(module, "attention_type", None) == "block_sparse" for module in model.modules()):
            raise CannotProbe(
                "its attention is another one, block_sparse, beyond a length that small models don't reach; set "
                'attention_type to "original_full"'
            )
        # As in real runs, one copy gets all micro-batches: dynamic rotary embeddings remember the longest one.
        self._own = copy.deepcopy(model)
        self._called: list[bool] = []
        if self.kind.is_language_model:
            loss_function = self._own.loss_function

            def note(*args: Any, **kwargs: Any) -> Any:
                self._called.append(True)
                return loss_function(*args, **kwargs)

            self._own.loss_function = note
        groups: list[Cases] = [(("whole rows", case),) for case in self.kind.whole_cases]
        groups = groups or [self._comparable(group) for group in probe_groups(model.config)]
        self.trials = Trials(groups, self._batch_of, self._run_plain, attempt.tolerance)

    def _comparable(self, group: Cases) -> Cases:
        """Those of some cases that make sense for the kind."""
        left_out: set[BatchKind] = set()
        if not self.kind.takes_positions:
            left_out.add("packed sequences")
        if not self.kind.labels_each_token:
            left_out.update(LABELLED.values())
        return tuple((kind, case) for kind, case in group if kind not in left_out)

    def _batch_of(self, group: Cases, number: int) -> MicroBatch:
        # Where features of images are counted, which models compute.
        with self.attempt.precision():
            return batch_of_kind(self.kind, self.model, group, has_types=self.takes_types and number % 2 == 1)

    def _run_plain(self, batch: MicroBatch) -> ProbeOutcome:
        self._own.zero_grad()
        self._called.clear()
        with self.attempt.precision():
            outcome = run_whole(self._own, self.kind, batch)
        self.has_own_loss = not self._called
        return outcome


def _best(probe: _Probe, *, gives_cache: bool) -> MeshVerdict:
    """The verdict that splits as much of the model as is right."""
    blocks = split_blocks(probe.model)
    some = [*((block,) for block in blocks), *([tuple(blocks)] if len(blocks) > 1 else [])]
    reason: str | None = None
    for way in probe.kind.mesh_choices(has_own_loss=probe.has_own_loss):
        candidate = replace(way, token_types=probe.takes_types)
        choice, reason = _checked(probe, candidate)
        if reason is None:
            return _verdict(probe, choice, gives_cache=gives_cache)
        # A choice that is wrong even with whole layers can't be right with fewer whole blocks.
        layers, reason = _checked(probe, replace(candidate, whole_blocks=("",)))
        if reason is None:
            fewer = (replace(layers, whole_blocks=names) for names in some)
            least = next((verdict for verdict in fewer if _reason_against(probe, verdict) is None), layers)
            return _verdict(probe, least, gives_cache=gives_cache)
    # The last choice assumes the least about the model, so its reason is the most informative.
    assert reason is not None
    return MeshVerdict({"whole rows": reason})


def _checked(probe: _Probe, choice: MeshVerdict) -> tuple[MeshVerdict, str | None]:
    """A choice, or the same with activations split late if only that is right with padding; and what is wrong with it.

    Recurrent layers multiply their input by the mask, which the model's own code cuts to the length of the embeddings.
    """
    first, others = MESHES[:1], MESHES[1:]
    reason = _reason_against(probe, choice, first)
    if reason is None and choice.inputs == "embeddings" and not choice.splits_late:
        padded = next(iter(_padded(probe, choice)), None)
        if padded is not None and _reason_against(probe, choice, first, padded) is not None:
            late = replace(choice, splits_late=True)
            if all(_reason_against(probe, late, first, trial) is None for trial in (padded, probe.trials.all[0])):
                choice = late
    return choice, reason or _reason_against(probe, choice, others)


def _reason_against(
    probe: _Probe, choice: MeshVerdict, meshes: Iterable[MeshShape] = MESHES, trial: Trial | None = None
) -> str | None:
    """What is wrong with a micro-batch, by default the longest, on one of some meshes; None if nothing is."""
    trial = trial or probe.trials.all[0]
    for shape in meshes:

        def compare(batch: MicroBatch, expected: ProbeOutcome, shape: MeshShape = shape) -> tuple[float, str]:
            return SplitModel(probe.model, probe.attempt, shape, choice).largest_error(batch, expected)

        _, reason = probe.trials.difference(compare, trial)
        if reason is not None:
            kind, case = trial.cases[0]
            return f"{reason} (mesh {shape}, {kind}, {case.name})"
    return None


def _verdict(probe: _Probe, choice: MeshVerdict, *, gives_cache: bool) -> MeshVerdict:
    """The verdict over all micro-batches, for a choice that is right on the longest one."""
    split = SplitModel(probe.model, probe.attempt, _OTHER_KINDS, choice)
    refused, error = probe.trials.refusals(split.largest_error)
    blocks = blocks_computed_whole(probe.model, choice.whole_blocks)
    verdict = replace(choice, refused=refused, error=error, blocks=blocks)
    if "whole rows" in refused:
        return verdict
    return replace(verdict, with_stages=_reasons_against_stages(probe, verdict, gives_cache=gives_cache))


def _reasons_against_stages(probe: _Probe, choice: MeshVerdict, *, gives_cache: bool) -> dict[Mode, str]:
    """What is wrong with the longest micro-batch on a mesh with stages, by mode; right modes are left out."""
    modes: tuple[Mode, ...] = ("whole", "segments")
    if not probe.kind.in_pipeline:
        return dict.fromkeys(modes, f"it is for {probe.kind.words}, for which a pipeline has no rules")
    if not probe.kind.is_causal:
        reason = _reason_against_whole_stages(probe, choice)
        against_segments: dict[Mode, str] = {"segments": f"it is for {probe.kind.words}, and needs whole sequences"}
        return against_segments if reason is None else {"whole": reason, **against_segments}
    trials = [probe.trials.all[0], *(_padded(probe, choice) if choice.splits_late else ())]
    try:
        outline, reference = draw_outline(type(probe.model), probe.model.config), copy.deepcopy(probe.model)
        with probe.attempt.precision():
            expected = [run_plain(reference, trial.batch, probe.attempt.tolerance) for trial in trials]
    except Exception as error:
        return dict.fromkeys(modes, words_of(error))
    if expected[0].shifts_labels is None:
        return dict.fromkeys(modes, OTHER_LOSS)
    pairs = list(zip(trials, expected, strict=True))
    reasons = {
        "whole": _reason_against_stages(probe, choice, outline, "whole", pairs, gives_cache=False),
        # Segments get the same masks, in more time.
        "segments": _reason_against_stages(probe, choice, outline, "segments", pairs[:1], gives_cache=gives_cache),
    }
    return {mode: reason for mode in modes if (reason := reasons[mode])}


def _padded(probe: _Probe, choice: MeshVerdict) -> list[Trial]:
    """A padded micro-batch that is right on a mesh without stages, if there is one."""
    padded = (trial for trial in probe.trials.all if trial.cases[0][0] == "padding on the right")
    right = (trial for trial in padded if isinstance(trial.expected, ProbeOutcome))
    return [trial for trial in right if all(kind not in choice.refused for kind, _ in trial.cases)]


def _reason_against_stages(
    probe: _Probe,
    choice: MeshVerdict,
    outline: Outline,
    mode: Mode,
    pairs: Sequence[tuple[Trial, ProbeOutcome]],
    *,
    gives_cache: bool,
) -> str | None:
    try:
        split = _in_stages(probe, choice, outline, gives_cache=gives_cache)
    except Exception as failure:
        return words_of(failure)
    for trial, expected in pairs:
        _, reason = probe.trials.difference(functools.partial(split.largest_error, mode=mode), trial, expected)
        if reason is not None:
            return f"{reason} ({trial.cases[0][1].name})"
    return None


def _reason_against_whole_stages(probe: _Probe, choice: MeshVerdict) -> str | None:
    """What is wrong with a micro-batch on a mesh with stages, for a model that needs whole sequences."""
    try:
        outline = draw_outline(type(probe.model), probe.model.config)
        split, reference = _in_stages(probe, choice, outline, gives_cache=False), copy.deepcopy(probe.model)
        for trial in _accepted(probe, choice):
            assert isinstance(trial.expected, ProbeOutcome)
            with probe.attempt.precision():
                expected = trial.expected if probe.kind.runs_own_head else run_plain(reference, trial.batch)
            if expected.shifts_labels is None and not probe.kind.runs_own_head:
                return OTHER_LOSS
            error, name = split.largest_error(trial.batch, expected, "whole")
            if error > probe.attempt.tolerance:
                return f"{words_of_error(name, error)} ({trial.cases[0][1].name})"
    except Exception as failure:
        return words_of(failure)
    return None


def _accepted(probe: _Probe, choice: MeshVerdict) -> Iterator[Trial]:
    """The first micro-batch of each kind that is right on a mesh without stages."""
    seen: set[BatchKind] = set()
    for trial in probe.trials.all:
        kinds = {kind for kind, _ in trial.cases}
        if kinds.isdisjoint(choice.refused):
            yield from () if kinds <= seen else (trial,)
        else:
            yield from (probe.trials.one_case(case) for case in trial.cases if case[0] not in {*choice.refused, *seen})
        seen |= kinds


def _in_stages(probe: _Probe, choice: MeshVerdict, outline: Outline, *, gives_cache: bool) -> SplitModel:
    options: Any = {"outline": outline, "gives_cache": gives_cache}
    return SplitModel(probe.model, probe.attempt, _OTHER_KINDS, choice, **options).make()
