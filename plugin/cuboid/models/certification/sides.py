"""Both sides of a comparison: a small model whole, and split over a mesh and into stages on ranks that are threads.

:mod:`cuboid.verify` makes its small models and runs their steps by the same functions, on ranks that are processes.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from cuboid.config.schema import CuboidConfig
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.thread_ranks import ThreadRanks
from cuboid.distributed.topology import MeshShape
from cuboid.models.architectures.certificate import Certificate, MeshVerdict, Mode, Verdict
from cuboid.models.batch.broadcast import MicroBatch
from cuboid.models.batch.length_cases import Case
from cuboid.models.batch.local_batch import IGNORE_INDEX, granule
from cuboid.models.certification.float64 import KeepFloat64, widen
from cuboid.models.certification.layer_kinds import NoSmallModel, small_with_all_kinds
from cuboid.models.certification.trials import ATTEMPTS, Attempt, ProbeOutcome, largest_error
from cuboid.models.kinds.language_models import with_shifted_labels
from cuboid.models.kinds.model_kind import ModelKind
from cuboid.models.kinds.probe_rows import CannotProbe, probe_rows, vocabulary_size
from cuboid.models.kinds.registry import kind_of_class
from cuboid.models.model_plan import ModelPlan
from cuboid.models.plain_construction import plain_construction
from cuboid.models.routers.router_loss import exact_router_loss
from cuboid.models.sharded.parallel_plan import ParallelPlan, make_parallel_plan
from cuboid.models.sharded.sharded_model import unwrap
from cuboid.models.stages.outline import Outline
from cuboid.models.stages.stage_cut import StageLayout
from cuboid.models.stages.stage_model import StagePlan
from cuboid.models.stages.stage_runner import make_runner
from cuboid.models.stages.units import SegmentedBatch
from cuboid.seq1f1b.attention.kv_cache import KVCache, KVCachePool
from cuboid.seq1f1b.schedule.partition import even_cut
from cuboid.tensor3d.layers.vocab_cross_entropy import shifted
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec, put_shard, take_shard

T = TypeVar("T")
#: A mesh that splits nothing.
_ONE_RANK = MeshShape()
#: Large enough for scores, gates and norms to leave the range where every function is almost linear.
_WEIGHT_STD, _VECTOR_STD = 0.15, 0.2
#: Tokens of a sequence whose length doesn't matter.
_SHORT = 12
_STAGES = 3
_SEGMENTS = 3
_FILLED = 4
#: For the routers' loss, which models' own code computes in float32 even if weights are in float64.
_FLOAT32_TOLERANCE = 1e-6

# --- the small model ------------------------------------------------------------------------------------------------


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
    """A small config's model with random weights; a classifier that looks for padding has a padding token."""
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
    if kind_of_class(cls).reads_last_token and getattr(model.config, "pad_token_id", None) is None:
        # Classifiers of decoders look for the last token that isn't padding. Users set it after loading, too.
        model.config.pad_token_id = 0
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


def first_that_runs(
    cls: type[PreTrainedModel],
    config: PretrainedConfig,
    attention: str | None,
    attempts: Iterable[Attempt],
    examine: Callable[[PreTrainedModel, Attempt], T],
) -> T:
    """What ``examine`` makes of a small config's random model, in the first precision in which that runs.

    Raises:
        CannotProbe: it runs in none; has the last reason.
    """
    obstacle = CannotProbe("")
    for attempt in attempts:
        try:
            with default_dtype(attempt.default):
                return examine(random_model(cls, config, attention, attempt), attempt)
        except CannotProbe as error:
            obstacle = error
    raise obstacle


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
                batch = probe_rows(Case("short", _SHORT), vocabulary_size(small))
                return run_plain(model, batch, attempt.tolerance).shifts_labels
    return None


# --- the whole model ------------------------------------------------------------------------------------------------


def run_backward(
    model: Any, kind: ModelKind, batch: MicroBatch, backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward
) -> torch.Tensor:
    """Forward and backward with the loss of a model's kind, which is returned; parameters keep the gradients.

    ``model`` may be an engine, with a ``backward`` of its own.
    """
    loss = kind.probe_loss(model(**batch, **kind.options_of(unwrap(model))), batch)
    backward(loss)
    return loss.detach()


def run_whole(model: PreTrainedModel, kind: ModelKind, batch: MicroBatch) -> ProbeOutcome:
    """:func:`run_backward` of an uncut model without gradients.

    Raises:
        ValueError: its loss isn't finite.
    """
    loss = run_backward(model, kind, batch)
    if not bool(loss.isfinite()):
        raise ValueError("its loss isn't finite")
    return ProbeOutcome(loss, gradients_of([model]))


def run_plain(model: PreTrainedModel, batch: MicroBatch, tolerance: float = ATTEMPTS[0].tolerance) -> ProbeOutcome:
    """Forward and backward of an uncut model, whose gradients are replaced, and how its own loss uses labels."""
    model.zero_grad()
    output = model(**batch, use_cache=False)
    if output.loss is None:
        raise ValueError("it computes no loss of labels")
    loss, own_loss = mean_loss(output.logits, probe_labels(batch)["shift_labels"]), output.loss
    routers = exact_router_loss(model, output, batch.get("attention_mask"))
    if routers is not None:
        loss, own_loss = loss + routers, own_loss - routers
        tolerance = max(tolerance, _FLOAT32_TOLERANCE)
    loss.backward()  # type: ignore[no-untyped-call]
    if not bool(loss.isfinite() & output.loss.isfinite()):
        raise ValueError("its loss isn't finite")
    shifts = _shift_of(model, batch, output.logits.detach(), float(own_loss), tolerance)
    return ProbeOutcome(loss.detach(), gradients_of([model]), shifts)


def probe_labels(batch: MicroBatch) -> MicroBatch:
    """The probe's micro-batch with ``shift_labels``; rows whose last token has a label predict one there, too."""
    rest = {name: x for name, x in batch.items() if name != "labels"}
    labels = shifted(batch["labels"], IGNORE_INDEX)
    labels[:, -1] = batch["input_ids"][:, 0].where(batch["labels"][:, -1] != IGNORE_INDEX, IGNORE_INDEX)
    return {**rest, "shift_labels": labels}


def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of logits ``[B, S, V]`` and labels ``[B, S]``."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)


def _shift_of(
    model: PreTrainedModel, batch: MicroBatch, logits: torch.Tensor, loss: float, tolerance: float
) -> bool | None:
    for shifts in (True, False) if kind_of_class(type(model)).is_causal else (False,):
        expected = float(mean_loss(logits, with_shifted_labels(batch, shifts=shifts)["shift_labels"]))
        if abs(loss - expected) <= tolerance * abs(expected):
            return shifts
    return None


# --- the model on all ranks -----------------------------------------------------------------------------------------


class SplitModel:
    """A copy of a small model on all ranks of a mesh and, if there is an outline, of a pipeline's stages.

    Args:
        model: the small model.
        attempt: the precision to compute in.
        shape: of the mesh.
        choice: how the mesh splits the model; None for a mesh of one rank, which splits nothing.
        outline: of the model, which is cut into stages.
        gives_cache: whether layers in stages get a stand-in for a cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        attempt: Attempt,
        shape: MeshShape = _ONE_RANK,
        choice: MeshVerdict | None = None,
        *,
        outline: Outline | None = None,
        gives_cache: bool = False,
    ) -> None:
        self._model, self._attempt, self._outline, self._gives_cache = model, attempt, outline, gives_cache
        self._parallel = None if choice is None else make_parallel_plan(model, shape, choice)
        self._ranks = ThreadRanks(shape, 1 if outline is None else len(stage_counts(outline)))
        self._models: list[Any] | None = None

    def make(self) -> SplitModel:
        """Make each rank's model now; else the first step does."""
        made: list[Any] = []
        for mesh in self._ranks.meshes:
            if self._outline is not None:
                counts, outline = stage_counts(self._outline), self._outline
                options: Any = {"gives_cache": self._gives_cache, "parallel": self._parallel}
                made.append(make_stage(self._model, outline, counts, mesh, **options))
            else:
                plan = ModelPlan(type(self._model), CuboidConfig(), mesh, self._parallel)
                made.append(plan.apply(copy.deepcopy(self._model), functools.partial(take_shard, mesh=mesh)))
        self._models = made
        return self

    def largest_error(self, batch: MicroBatch, expected: ProbeOutcome, mode: Mode = "whole") -> tuple[float, str]:
        """The largest relative error of a step's loss and gradients, over all ranks, and of which."""
        models = self._models or self.make()._models
        assert models is not None
        self._models = None  # made again after a step that raised
        size, multiple = self._ranks.meshes[0].shape.size, granule(self._ranks.meshes[0])

        def step(mesh: Mesh) -> torch.Tensor:
            stages = models[mesh.rank :: size]
            for stage in stages:
                stage.zero_grad()
            with self._attempt.precision():
                if self._outline is None:
                    return run_backward(stages[0], stages[0].cuboid.kind, batch)
                return run_stages(stages, batch, unit_lengths(batch["input_ids"].shape[1], mode, multiple))

        losses = self._ranks.run(step)
        gradients = gradients_of(models, None if self._parallel is None else self._parallel.by_parameter)
        self._models = models
        return max(largest_error(ProbeOutcome(loss, gradients), expected) for loss in losses)


def gradients_of(models: Iterable[Any], specs: Mapping[str, ShardingSpec] | None = None) -> dict[str, torch.Tensor]:
    """Gradients by name, summed over stages: a parameter that two of them share has a part of its gradient on each.

    Those of shards, of which there are ``specs``, are put together.
    """
    total: dict[str, torch.Tensor] = {}
    for model in models:
        for first, parameter in model.named_parameters():
            if parameter.grad is None:
                continue
            gradient = parameter.grad
            if specs is not None:
                mesh, spec = model.cuboid.mesh, specs[first]
                gradient = parameter.new_zeros(spec.shape)
                put_shard(gradient, parameter.grad, spec, mesh.shape, mesh.coordinate)
            # The first name of a tied weight isn't always that of its source: CamemBERT's head precedes its embeddings.
            name = model.all_tied_weights_keys.get(first, first)
            total[name] = total[name] + gradient if name in total else gradient
    return total


def stage_counts(outline: Outline) -> tuple[int, ...]:
    """The number of layers of each of the probe's stages."""
    count = min(_STAGES, outline.count)
    return even_cut(outline.count, count)


def run_stages(stages: Sequence[Any], batch: MicroBatch, lengths: tuple[int, ...]) -> torch.Tensor:
    """Forward and backward of all stages, unit by unit; gradients are left with the stages' parameters.

    Returns:
        The loss.
    """
    kind = stages[0].cuboid.kind
    labelled = batch if kind.runs_own_head else probe_labels(batch)
    items = max(int(kind.items(labelled)), 1)
    runners = []
    for stage in stages:
        store = KVCache(sum(lengths), KVCachePool())
        mesh, inputs = stage.cuboid.mesh, stage.cuboid.verdict.inputs
        cut = SegmentedBatch.of(labelled, lengths, stage.config, mesh, kind, inputs)
        (chunk,) = stage.staging.chunks
        runners.append(
            make_runner(stage, chunk, [cut], [store], scale=1.0 / items, micro_batch_scale=1.0, training=True)
        )
    for segment in range(len(lengths)):
        hidden = None
        for runner in runners:
            hidden = runner.forward(0, segment, hidden)
    for segment in reversed(range(len(lengths))):
        gradient = None
        for runner in reversed(runners):
            gradient = runner.backward(0, segment, gradient)
    loss = runners[-1].loss
    assert loss is not None
    return loss


def make_stage(
    model: PreTrainedModel,
    outline: Outline,
    counts: tuple[int, ...],
    mesh: Mesh,
    *,
    gives_cache: bool,
    parallel: ParallelPlan | None = None,
) -> Any:
    """A copy of a model, cut to the stage of ``mesh``'s rank, and sharded over the mesh if there is a plan for that."""
    segments = 2 if gives_cache else 1  # any number above 1
    pipeline = {"engine": "seq1f1b", "stages": len(counts), "segments": segments}
    config = CuboidConfig.model_validate({"pipeline": pipeline})
    certificate = Certificate(Verdict(gives_cache=gives_cache))
    layout = StageLayout(counts, mesh.placement)
    stages = StagePlan(outline, layout, layout.cuts(mesh.coordinate.pipe), config, certificate)
    plan = ModelPlan(type(model), config, mesh, parallel, stages)
    return plan.apply(copy.deepcopy(model), functools.partial(take_shard, mesh=mesh))


def unit_lengths(length: int, mode: Mode, multiple: int = 1) -> tuple[int, ...]:
    """Lengths of a micro-batch's segments, each a multiple of ``multiple``, which a mesh needs."""
    if multiple > 1:
        units = -(-length // multiple)
        counts = _lengths(units, "whole" if mode == "filled" else mode)
        return tuple(multiple * count for count in counts)
    return _lengths(length, mode)


def _lengths(length: int, mode: Mode) -> tuple[int, ...]:
    if mode == "whole":
        return (length,)
    if mode == "filled":
        return (length + _FILLED - length % _FILLED,)
    first = length // 2
    second = (length - first) // 2 + 1 if length > _SEGMENTS else 1
    return (first, second, max(length - first - second, 1))
