"""Run an architecture's own class whole, and split over small meshes, and compare loss and every gradient."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, get_args

import torch
from transformers import PretrainedConfig, PreTrainedModel

from cuboid.config.schema import CuboidConfig
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.thread_ranks import ThreadRanks
from cuboid.distributed.topology import MeshShape
from cuboid.errors import CuboidError, UnsupportedModelError
from cuboid.models.architectures.certificate import LABELLED, HeadPlan, Inputs, Kind, MeshVerdict, Mode
from cuboid.models.architectures.roles import blocks_computed_whole, layer_names, split_blocks
from cuboid.models.architectures.supported_tasks import WORDS, runs_own_head, takes_images, takes_token_types, task_of
from cuboid.models.batch.batch import granule
from cuboid.models.batch.broadcast import MicroBatch
from cuboid.models.batch.length_cases import Case
from cuboid.models.certification.certificates import certificate_of
from cuboid.models.certification.check import (
    ATTEMPTS,
    OTHER_LOSS,
    Attempt,
    CannotProbe,
    Outcome,
    default_dtype,
    largest_error,
    make_stage,
    name_padding,
    probe_cases,
    quiet_cpu,
    random_model,
    run_plain,
    run_stages,
    small_for_probe,
    stage_counts,
    unit_lengths,
)
from cuboid.models.certification.float64 import KeepFloat64
from cuboid.models.certification.task_batches import loss_of, run_whole, task_batch
from cuboid.models.sharded.parallel_plan import ParallelPlan, make_parallel_plan
from cuboid.models.sharded.sharded_model import shard_modules
from cuboid.models.stages.outline import Outline
from cuboid.models.stages.stages import draw_outline
from cuboid.tensor3d.sharding.sharding_spec import put_shard, take_shard

#: Each axis by itself, and all together. Grouped key/value heads divide by all of these meshes but the last.
MESHES = (MeshShape(1, 2, 1), MeshShape(1, 1, 2), MeshShape(2, 1, 1), MeshShape(2, 2, 2))
#: The attempts that keep float64, in which small differences can't hide.
_EXACT = tuple(replace(each, tolerance=1e-9) for each in ATTEMPTS if each.precision is KeepFloat64)
#: The mesh for other kinds of micro-batches, without `batch`: along it, they are only rows.
_OTHER_KINDS = MeshShape(1, 2, 2)
#: Edges of small images, which have 16 or 9 patches of 4 × 4.
_IMAGE_SIZES = (16, 12)


def check_meshes(cls: type[PreTrainedModel], config: PretrainedConfig) -> MeshVerdict:
    """Compare a small model of a class with itself on small meshes, on all micro-batches that may matter to its config.

    Blocks are split if that is right. If not, as few of them as possible are computed whole.

    Args:
        cls: the architecture's class.
        config: of the real model.

    Raises:
        CannotProbe: with the reason.
    """
    with quiet_cpu():
        small = small_for_probe(config)
        if takes_images(cls):
            small = _with_odd_positions(cls, small)
        for attempt in _EXACT:
            with default_dtype(attempt.default):
                try:
                    model = random_model(cls, small, config._attn_implementation, attempt.dtype)
                    name_padding(model)
                    probe = _Probe(model, attempt)
                except CannotProbe as error:
                    obstacle = error
                    continue
                return _best(probe, gives_cache=_gives_cache(cls, config))
        raise obstacle


def _gives_cache(cls: type[PreTrainedModel], config: PretrainedConfig) -> bool:
    """Whether a pipeline gives layers a cache, with or without a mesh; False if there is no pipeline for the class."""
    try:
        return certificate_of(cls, config).gives_cache
    except UnsupportedModelError:
        return False


def _with_odd_positions(cls: type[PreTrainedModel], small: PretrainedConfig) -> PretrainedConfig:
    """A small image model's config with which layers get an odd number of positions, so that meshes have to pad them.

    That number depends on how many tokens the model adds to the patches, so it is found by running the model.

    Raises:
        CannotProbe: there is no such config, a small model doesn't run, or it drops rows at random.
    """
    for name in ("drop_path_rate", "stochastic_depth_prob"):
        if getattr(small, name, 0):
            raise CannotProbe(
                f"{name} is {getattr(small, name)}: it drops rows in layers at random, for which there is no rule; "
                "set it to 0.0"
            )
    for size in _IMAGE_SIZES:
        own = copy.deepcopy(small)
        own.image_size = [size, size] if isinstance(small.image_size, list | tuple) else size
        model = random_model(cls, own, None, torch.float32)
        seen: list[int] = []

        def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], seen: list[int] = seen) -> None:
            seen += [x.shape[1] for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.dim() == 3]

        for name in layer_names(model):
            model.get_submodule(name).register_forward_pre_hook(note, with_kwargs=True)
        try:
            with torch.no_grad():
                model(**task_batch(Case("images", size), model))
        except CannotProbe:
            raise
        except Exception as error:
            raise CannotProbe(f"a small one doesn't run: {type(error).__name__}: {error}") from error
        if seen and seen[0] % 2:
            return own
    raise CannotProbe("its layers, if it has a list of them, aren't given activations [B, S, H] of an odd length")


class _Probe:
    """A small model, its micro-batches, and the expected result of each."""

    def __init__(self, model: PreTrainedModel, attempt: Attempt) -> None:
        self.model, self.attempt = model, attempt
        self.task = task_of(type(model))
        self.takes_types = takes_token_types(model)
        self.has_own_loss = False
        if self.task != "causal" and getattr(model.config, "attention_type", None) == "block_sparse":
            raise CannotProbe("its attention is another one beyond a length that small models don't reach")
        self.refused: dict[Kind, str] = {}
        self.cases: list[tuple[Kind, Case, MicroBatch, Outcome]] = []
        self.has_images = takes_images(type(model))
        images: list[tuple[Kind, Case]] = [("whole rows", Case("images", 0))]
        self.call = {} if self.has_images else {"use_cache": False}
        for number, (kind, case) in enumerate(images if self.has_images else probe_cases(model.config)):
            if self.task == "seq2seq" and kind == "packed sequences":
                # An encoder-decoder gets no positions, which would tell packed sequences apart.
                continue
            has_labels = kind in LABELLED.values()
            if has_labels and self.task not in ("causal", "masked", "seq2seq", "tokens"):
                continue
            has_types = self.takes_types and number % 2 == 1
            batch = task_batch(case, model, has_types=has_types, has_labels=has_labels)
            try:
                with attempt.precision():
                    self.cases.append((kind, case, batch, self._run_plain(batch)))
            except Exception as error:
                if not self.cases:
                    raise CannotProbe(f"a small one doesn't run: {type(error).__name__}: {error}") from error
                self.refused.setdefault(kind, f"the model itself fails there: {type(error).__name__}: {error}")

    def _run_plain(self, batch: MicroBatch) -> Outcome:
        own = copy.deepcopy(self.model)
        called: list[bool] = []
        if self.task in ("causal", "masked", "seq2seq"):
            loss_function = own.loss_function

            def note(*args: Any, **kwargs: Any) -> Any:
                called.append(True)
                return loss_function(*args, **kwargs)

            own.loss_function = note
        outcome = run_whole(own, batch, **self.call)
        self.has_own_loss = not called
        return outcome


def _best(probe: _Probe, *, gives_cache: bool) -> MeshVerdict:
    """The verdict that splits as much of the model as is right."""
    blocks = split_blocks(probe.model)
    some = [*((block,) for block in blocks), *([tuple(blocks)] if len(blocks) > 1 else [])]
    reason: str | None = None
    for choice in _choices(probe):
        reason = _reason_against(probe, choice)
        if reason is None:
            return _verdict(probe, choice, gives_cache=gives_cache)
        # A choice that is wrong even with whole layers can't be right with fewer whole blocks.
        layers = replace(choice, whole=("",))
        reason = _reason_against(probe, layers)
        if reason is None:
            fewer = (replace(choice, whole=whole) for whole in some)
            least = next((each for each in fewer if _reason_against(probe, each) is None), layers)
            return _verdict(probe, least, gives_cache=gives_cache)
    # The last choice assumes the least about the model, so its reason is the most informative.
    assert reason is not None
    return MeshVerdict({"whole rows": reason})


def _choices(probe: _Probe) -> Iterator[MeshVerdict]:
    """Candidates for how to run a model with its layers split, the best first."""
    ways: list[dict[str, Any]] = [
        *({"inputs": inputs} for inputs in get_args(Inputs) if inputs != "pixels"),
        {"splits_late": True},
    ]
    heads: list[dict[str, Any]] = [{"head": "labels"}, {"head": "whole"}]
    if probe.has_images:
        plan: HeadPlan = "split" if probe.task == "hidden" else "whole"
        yield MeshVerdict(inputs="pixels", splits_late=True, head=plan)
        return
    if probe.task == "causal":
        heads = [{"gathers_logits": probe.has_own_loss}]
    elif probe.task == "seq2seq":
        # Encoders and decoders may use ids for more than the lookup, and count positions by themselves.
        ways = [{"inputs": "only ids"}, {"inputs": "only ids", "splits_late": True}]
        heads = [{"counts_items": not probe.has_own_loss}]
    elif probe.task == "masked":
        heads = [{"counts_items": not probe.has_own_loss}, {"gathers_logits": True}]
    elif probe.task == "hidden":
        heads = [{}]
    for way in ways:
        for head in heads:
            yield MeshVerdict(**way, **head, token_types=probe.takes_types)


def _reason_against(probe: _Probe, choice: MeshVerdict) -> str | None:
    """What is wrong with the longest micro-batch on one of the meshes; None if nothing is."""
    kind, case, batch, expected = probe.cases[0]
    for shape in MESHES:
        try:
            error, name = _Split(probe, shape, choice).largest_error(batch, expected)
        except Exception as failure:
            return f"{_words(failure)} (mesh {shape}, {kind}, {case.name})"
        if error > probe.attempt.tolerance:
            return f"{name} differs by {error:.1e} (mesh {shape}, {kind}, {case.name})"
    return None


def _verdict(probe: _Probe, choice: MeshVerdict, *, gives_cache: bool) -> MeshVerdict:
    """The verdict over all micro-batches, for a choice that is right on the longest one."""
    refused, largest = dict(probe.refused), 0.0
    split = _Split(probe, _OTHER_KINDS, choice)
    for kind, case, batch, expected in probe.cases:
        place = f"({case.name}, {case.length} tokens)"
        try:
            error, name = split.largest_error(batch, expected)
        except Exception as failure:
            refused.setdefault(kind, f"{_words(failure)} {place}")
        else:
            if error > probe.attempt.tolerance:
                refused.setdefault(kind, f"{name} differs by {error:.1e} {place}")
            else:
                largest = max(largest, error)
    blocks = blocks_computed_whole(probe.model, choice.whole)
    found = replace(choice, refused=refused, error=largest, blocks=blocks)
    if "whole rows" in refused:
        return found
    return replace(found, with_stages=_reasons_against_stages(probe, found, gives_cache=gives_cache))


def _reasons_against_stages(probe: _Probe, choice: MeshVerdict, *, gives_cache: bool) -> dict[Mode, str]:
    """What is wrong with the longest micro-batch on a mesh with stages, by mode; right modes are left out."""
    modes: tuple[Mode, ...] = ("whole", "segments")
    if probe.task not in ("causal", "masked") and not runs_own_head(probe.task):
        return dict.fromkeys(modes, f"it is for {WORDS[probe.task]}, for which a pipeline has no rules")
    if probe.task != "causal":
        reason = _reason_against_whole_stages(probe, choice)
        found: dict[Mode, str] = {"segments": f"it is for {WORDS[probe.task]}, and needs whole sequences"}
        return found if reason is None else {"whole": reason, **found}
    try:
        outline = draw_outline(type(probe.model), probe.model.config)
        with probe.attempt.precision():
            expected = run_plain(probe.model, probe.cases[0][2], probe.attempt.tolerance)
    except Exception as error:
        return dict.fromkeys(modes, _words(error))
    if expected.shifts_labels is None:
        return dict.fromkeys(modes, OTHER_LOSS)
    gives = {"whole": False, "segments": gives_cache}
    reasons = {
        mode: _reason_against_stages(probe, choice, outline, expected, mode, gives_cache=gives[mode]) for mode in modes
    }
    return {mode: reason for mode, reason in reasons.items() if reason}


def _reason_against_stages(
    probe: _Probe, choice: MeshVerdict, outline: Outline, expected: Outcome, mode: Mode, *, gives_cache: bool
) -> str | None:
    _, case, batch, _ = probe.cases[0]
    try:
        split = _SplitStages(probe, choice, outline, gives_cache=gives_cache)
        error, name = split.largest_error(batch, expected, mode)
    except Exception as failure:
        return f"{_words(failure)} ({case.name})"
    return None if error <= probe.attempt.tolerance else f"{name} differs by {error:.1e} ({case.name})"


def _reason_against_whole_stages(probe: _Probe, choice: MeshVerdict) -> str | None:
    """What is wrong with a micro-batch on a mesh with stages, for a model that needs whole sequences."""
    # Reversed, so that the first case of each kind wins.
    first_of = {each[0]: each for each in reversed(probe.cases) if each[0] not in choice.refused}
    try:
        outline = draw_outline(type(probe.model), probe.model.config)
        split = _SplitStages(probe, choice, outline, gives_cache=False)
        for _, case, batch, own in first_of.values():
            with probe.attempt.precision():
                expected = own if runs_own_head(probe.task) else run_plain(probe.model, batch)
            if expected.shifts_labels is None and not runs_own_head(probe.task):
                return OTHER_LOSS
            error, name = split.largest_error(batch, expected, "whole")
            if error > probe.attempt.tolerance:
                return f"{name} differs by {error:.1e} ({case.name})"
    except Exception as failure:
        return _words(failure)
    return None


def _words(failure: Exception) -> str:
    return str(failure) if isinstance(failure, CuboidError) else f"{type(failure).__name__}: {failure}"


class _Split:
    """A probe's model on all ranks of a mesh."""

    def __init__(self, probe: _Probe, shape: MeshShape, choice: MeshVerdict) -> None:
        self._probe = probe
        self._plan = make_parallel_plan(probe.model, shape, choice)
        self._ranks = ThreadRanks(shape)
        self._models = [self._sharded(mesh) for mesh in self._ranks.meshes]

    def _sharded(self, mesh: Mesh) -> PreTrainedModel:
        own, shard_of = copy.deepcopy(self._probe.model), functools.partial(take_shard, mesh=mesh)
        return shard_modules(own, self._plan, mesh, CuboidConfig().tensor_parallel, shard_of)

    def largest_error(self, batch: MicroBatch, expected: Outcome) -> tuple[float, str]:
        """The largest relative error of a step's loss and gradients, over all ranks, and of which."""
        losses = self._ranks.run(lambda mesh: self._step(mesh, batch))
        gradients = _put_together(self._plan, zip(self._ranks.meshes, self._models, strict=True))
        return max(largest_error(Outcome(loss, gradients), expected) for loss in losses)

    def _step(self, mesh: Mesh, batch: MicroBatch) -> torch.Tensor:
        model = self._models[mesh.rank]
        model.zero_grad()
        with self._probe.attempt.precision():
            loss = loss_of(model(**batch, **self._probe.call), batch)
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


class _SplitStages:
    """A probe's model in stages, each on all ranks of a mesh."""

    def __init__(self, probe: _Probe, choice: MeshVerdict, outline: Outline, *, gives_cache: bool) -> None:
        self._probe = probe
        counts = stage_counts(outline)
        self._plan = make_parallel_plan(probe.model, _OTHER_KINDS, choice)
        self._ranks = ThreadRanks(_OTHER_KINDS, len(counts))
        self._stages = [
            make_stage(probe.model, outline, counts, mesh, gives_cache=gives_cache, verdict=choice)
            for mesh in self._ranks.meshes
        ]

    def largest_error(self, batch: MicroBatch, expected: Outcome, mode: Mode) -> tuple[float, str]:
        """As :meth:`_Split.largest_error`."""
        lengths = unit_lengths(batch["input_ids"].shape[1], mode, granule(self._ranks.meshes[0]))
        losses = self._ranks.run(lambda mesh: self._step(mesh.rank, batch, lengths))
        gradients: dict[str, torch.Tensor] = {}
        for stage in range(self._ranks.meshes[0].topology.pipe):
            own = slice(stage * _OTHER_KINDS.size, (stage + 1) * _OTHER_KINDS.size)
            ranks = zip(self._ranks.meshes[own], self._stages[own], strict=True)
            for name, gradient in _put_together(self._plan, ranks).items():
                # A parameter that two stages share has a part of its gradient on each.
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
        return max(largest_error(Outcome(loss, gradients), expected) for loss in losses)

    def _step(self, place: int, batch: MicroBatch, lengths: tuple[int, ...]) -> torch.Tensor:
        stages = self._stages[place :: _OTHER_KINDS.size]
        for stage in stages:
            stage.zero_grad()
        with self._probe.attempt.precision():
            return run_stages(stages, batch, lengths)


def _put_together(plan: ParallelPlan, ranks: Iterable[tuple[Mesh, PreTrainedModel]]) -> dict[str, torch.Tensor]:
    """Full gradients by name, from all ranks' shards."""
    layouts = plan.by_parameter
    wholes: dict[str, torch.Tensor] = {}
    for mesh, model in ranks:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                own = model.all_tied_weights_keys.get(name, name)
                whole = wholes.setdefault(own, parameter.new_zeros(layouts[name].shape))
                put_shard(whole, parameter.grad, layouts[name], mesh.shape, mesh.coordinate)
    return wholes
