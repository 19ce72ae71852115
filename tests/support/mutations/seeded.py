"""Mistakes that nobody reported, in layers, schedules, optimizers and checkpoints, each in a place of its own."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import torch

from cuboid.checkpoint import exchange
from cuboid.checkpoint.exchange import Exchange
from cuboid.checkpoint.optimizer_state import OptimizerAdapter, Slot
from cuboid.distributed.async_result import AsyncResult
from cuboid.distributed.axis_collectives import start_reduce_scatter
from cuboid.integrations.deepspeed import optimizer_state
from cuboid.models.pipeline.training_pipeline import Pipeline
from cuboid.models.stages.stage_runner import StageRunner
from cuboid.models.stages.units import SegmentedBatch
from cuboid.tensor3d.experts import sharded_experts
from cuboid.tensor3d.experts.dispatch import Dispatch
from cuboid.tensor3d.layers import norm, vocab_cross_entropy
from cuboid.tensor3d.layers.input_gather import GatherSequence
from cuboid.tensor3d.sharding.gradient_sync import GradientSync
from cuboid.tensor3d.sharding.param_group import ParamGroup
from cuboid.tensor3d.sharding.sharded_param import ShardedParam
from cuboid.tensor3d.sharding.weight_gradients import WeightGradientStore
from cuboid.verify import SmallModel, sharded
from cuboid.verify.training import MOMENT
from cuboid.weights import checkpointing, training_state
from mutations.mutation import (
    BATCH,
    HIDDEN,
    LLAMA,
    SEGMENTS,
    SEQUENCE,
    STAGES,
    Layout,
    Mutate,
    Mutation,
    after_loading,
    around,
    found,
    instead,
    rank,
)

SPLIT = Layout(stages=2, schedule="zero_bubble")
MIXTRAL = SmallModel("mixtral")

# --- layers ------------------------------------------------------------------------------------------------------


def over_another_axis(original: Any, self: ShardedParam, block: torch.Tensor) -> Any:
    if self.along.axes != ("batch",):
        return original(self, block)
    return start_reduce_scatter(self.stacked(block), self.mesh.along("hidden"))


@contextmanager
def every_second_reduce_skipped() -> Iterator[None]:
    start = ShardedParam.start_reduce_scatter
    calls: Counter[ShardedParam] = Counter()

    def mutated(self: ShardedParam, block: torch.Tensor) -> Any:
        calls[self] += 1
        return start(self, block) if calls[self] % 2 else AsyncResult(self.stacked(block)[self.along.index].clone())

    with mock.patch.object(ShardedParam, "start_reduce_scatter", mutated):
        yield


@contextmanager
def values_of_the_first_prefetch() -> Iterator[None]:
    """A buffer that isn't filled again; gradients go the right way all the same."""
    put = ParamGroup.put
    first: dict[ParamGroup, list[torch.Tensor]] = {}

    def mutated(self: ParamGroup, blocks: Sequence[torch.Tensor]) -> None:
        old = first.setdefault(self, [block.detach().clone() for block in blocks])
        put(self, [block + (kept - block).detach() for block, kept in zip(blocks, old, strict=True)])

    with mock.patch.object(ParamGroup, "put", mutated):
        yield


def divided_by_own_features(
    original: Any, ctx: Any, x: Any, weight: Any, eps: float, offset: float, along: Any, hidden: int, copies: Any
) -> Any:
    return original(ctx, x, weight, eps, offset, along, hidden // along.size, copies)


def parts_reversed(original: Any, self: GatherSequence, x: torch.Tensor, **options: Any) -> Any:
    gathered = original(self, x, **options).wait()
    return AsyncResult(gathered.unflatten(2, (self.along.size, -1)).flip(2).flatten(2, 3))


def last_rows_one_off(model: Any) -> None:
    """The last rank's shard, which is padded, begins a row late."""
    for weight in found(model, "embed_tokens.weight") if rank() == 1 else ():
        weight.data.copy_(weight.data.roll(1, 0))


def columns_one_off(original: Any, labels: torch.Tensor, rows: int, vocabulary: int, mesh: Any) -> Any:
    local, elsewhere, beyond = original(labels, rows, vocabulary, mesh)
    return (local - mesh.index("sequence")).clamp(min=0), elsewhere, beyond


def padding_takes_part(original: Any, logits: torch.Tensor, _: int) -> torch.Tensor:
    return original(logits, logits.shape[-1])


def unweighted(original: Any, *args: Any) -> Any:
    chosen, weights = original(*args)
    return chosen, weights * 0 + 1


def rows_of_other_tokens(original: Any, self: Dispatch, rows: torch.Tensor) -> torch.Tensor:
    return original(self, rows.roll(1, 0))


# --- schedules ---------------------------------------------------------------------------------------------------


def begins_one_early(original: Any, self: SegmentedBatch, tensor: torch.Tensor, segment: int) -> torch.Tensor:
    if tensor is not self.ids or segment == 0:
        return original(self, tensor, segment)
    start, stop = self.bounds[segment : segment + 2]
    return tensor[:, start - 1 : stop - 1]


@contextmanager
def message_of_the_first_micro_batch(method: str) -> Iterator[None]:
    """Each segment gets what the step's first micro-batch got."""
    original = getattr(StageRunner, method)
    first: dict[tuple[StageRunner, int], torch.Tensor] = {}

    def mutated(self: StageRunner, micro_batch: int, segment: int, message: torch.Tensor | None) -> Any:
        if message is not None:
            kept = first.setdefault((self, segment), message.detach().clone())
            message = kept.clone() if kept.shape == message.shape else message
        return original(self, micro_batch, segment, message)

    with mock.patch.object(StageRunner, method, mutated):
        yield


def last_unit_dropped(original: Any, self: WeightGradientStore, units: Sequence[Any]) -> None:
    original(self, units[:-1])
    self._waiting.pop(units[-1])


def units_twice(original: Any, self: WeightGradientStore, units: Sequence[Any]) -> None:
    again = {unit: self._waiting[unit] for unit in units}
    original(self, units)
    self._waiting |= again
    original(self, units)


def sum_begins_again(original: Any, self: GradientSync, key: Any, gradient: torch.Tensor, *, is_own: bool) -> Any:
    self._sums.pop(key, None)
    return original(self, key, gradient, is_own=is_own)


def twice(original: Any, *args: Any) -> None:
    original(*args)
    original(*args)


def without_scale(original: Any, self: StageRunner, *args: Any) -> Any:
    gradient = original(self, *args)
    return None if gradient is None else gradient / self._scale


# --- the optimizer and files -------------------------------------------------------------------------------------


def after_loading_optimizer(change: Callable[[OptimizerAdapter], None]) -> Mutate:
    """Change the optimizer's state as soon as it has been loaded."""

    def load(original: Any, checkpoint: Any, adapter: OptimizerAdapter, *args: Any) -> None:
        original(checkpoint, adapter, *args)
        change(adapter)

    return around(training_state, "load_optimizer", load)


def exchange_values(one: torch.Tensor, other: torch.Tensor) -> None:
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def swap_parameters(adapter: OptimizerAdapter) -> None:
    moments = adapter.state().quantities[MOMENT]
    for name in (name for name in moments if name.endswith("self_attn.q_proj.weight")):
        exchange_values(moments[name].values, moments[name.replace("q_proj", "o_proj")].values)


def swap_moments(adapter: OptimizerAdapter) -> None:
    quantities = adapter.state().quantities
    for name, run in quantities[MOMENT].items():
        exchange_values(run.values, quantities["exp_avg_sq"][name].values)


def one_step_more(adapter: OptimizerAdapter) -> None:
    for state in adapter.optimizer.state.values():
        state["step"] += 1


def slots_of_neighbours(original: Any, *args: Any) -> list[Slot]:
    """Two of the same size, one behind the other, trade names."""
    slots = original(*args)
    for place, (one, other) in enumerate(pairwise(slots)):
        if one.numel == other.numel:
            slots[place : place + 2] = [
                dataclasses.replace(one, name=other.name),
                dataclasses.replace(other, name=one.name),
            ]
            break
    return slots


def moments_decay_alike(original: Any, **kwargs: Any) -> Any:
    engine, *others = original(**kwargs)
    for group in engine.optimizer.param_groups:
        group["betas"] = (group["betas"][0],) * 2
    return (engine, *others)


def parts_of_replicas_reversed(
    original: Any, self: Exchange, tensor: Any, sources: list[Any], received: list[torch.Tensor]
) -> torch.Tensor:
    return original(self, tensor, sources, received[::-1] if tensor.sharding is None else received)


def padded_shard_of_another(
    original: Any, full: torch.Tensor, shard: torch.Tensor, sharding: Any, shape: Any, at: Any
) -> None:
    if shard.numel() * shape.size != full.numel():
        at = dataclasses.replace(at, sequence=shape.sequence - 1 - at.sequence)
    original(full, shard, sharding, shape, at)


SEEDED = (
    Mutation(
        "gradients summed over another axis",
        around(ShardedParam, "start_reduce_scatter", over_another_axis),
        Layout("2x1x2"),
    ),
    Mutation("every second reduce-scatter skipped", every_second_reduce_skipped, BATCH),
    Mutation("a stale prefetch buffer", values_of_the_first_prefetch, BATCH, found_by=("loss", "gradient")),
    Mutation(
        "a norm divides by its own features",
        lambda: mock.patch.object(
            norm._RMSNorm, "forward", staticmethod(partial(divided_by_own_features, norm._RMSNorm.forward))
        ),
        HIDDEN,
        found_by=("activation",),
    ),
    Mutation(
        "parts of the sequence gathered in reverse",
        around(GatherSequence, "start", parts_reversed),
        SEQUENCE,
        found_by=("activation",),
    ),
    Mutation("a padded shard begins a row late", after_loading(last_rows_one_off), SEQUENCE, found_by=("activation",)),
    Mutation(
        "labels one column off on later ranks",
        around(vocab_cross_entropy, "_locate", columns_one_off),
        SEQUENCE,
        found_by=("loss",),
    ),
    Mutation(
        "the vocabulary's padding takes part",
        around(vocab_cross_entropy, "_masked", padding_takes_part),
        SEQUENCE,
        found_by=("loss",),
    ),
    Mutation(
        "experts not weighted",
        around(sharded_experts, "gather_routing", unweighted),
        HIDDEN,
        MIXTRAL,
        ("activation",),
    ),
    Mutation(
        "experts' rows go to other tokens",
        around(Dispatch, "token_sums", rows_of_other_tokens),
        HIDDEN,
        MIXTRAL,
        ("activation",),
    ),
    Mutation(
        "a segment begins a token early",
        around(SegmentedBatch, "cut", begins_one_early),
        SEGMENTS,
        found_by=("activation",),
    ),
    Mutation("another micro-batch's gradient", partial(message_of_the_first_micro_batch, "_backward"), STAGES),
    Mutation(
        "another micro-batch's hidden state",
        partial(message_of_the_first_micro_batch, "forward"),
        STAGES,
        found_by=("loss",),
    ),
    Mutation("a deferred weight gradient dropped", around(WeightGradientStore, "run", last_unit_dropped), SPLIT),
    Mutation("deferred weight gradients run twice", around(WeightGradientStore, "run", units_twice), SPLIT),
    Mutation(
        "a step's sum begins again with each unit",
        around(GradientSync, "add", sum_begins_again),
        Layout("2x1x1", stages=2, gradient_sync="step"),
    ),
    Mutation(
        "the tied embedding's gradient added twice",
        around(Pipeline, "add_shared_gradients", twice),
        STAGES,
        SmallModel("llama", tied=True),
    ),
    Mutation("the loss's scale missing in its gradient", around(StageRunner, "_run_head", without_scale), STAGES),
    Mutation(
        "moments restored to another parameter",
        after_loading_optimizer(swap_parameters),
        HIDDEN,
        name_of_pass="engine",
        found_by=("resume",),
    ),
    Mutation(
        "moments restored the other way round",
        after_loading_optimizer(swap_moments),
        HIDDEN,
        name_of_pass="engine",
        found_by=("resume",),
    ),
    Mutation(
        "one step too many after resuming",
        after_loading_optimizer(one_step_more),
        HIDDEN,
        name_of_pass="engine",
        found_by=("resume",),
    ),
    Mutation(
        "weights not restored",
        instead(checkpointing, "load_model", lambda *_: None),
        STAGES,
        name_of_pass="engine",
        found_by=("resume",),
    ),
    Mutation(
        "elements of neighbours in a flat optimizer",
        around(optimizer_state, "_partition_slots", slots_of_neighbours),
        HIDDEN,
        name_of_pass="engine",
        found_by=("moment",),
    ),
    Mutation(
        "both moments decay alike",
        around(sharded.deepspeed, "initialize", moments_decay_alike),
        HIDDEN,
        name_of_pass="engine",
        found_by=("weight",),
    ),
    Mutation(
        "replicas' parts of moments in reverse",
        around(Exchange, "_assemble", parts_of_replicas_reversed),
        Layout(stages=1, replicas=2),
        LLAMA,
        ("resume",),
        "engine",
    ),
    Mutation(
        "a padded shard saved as another rank's",
        around(exchange, "put_shard", padded_shard_of_another),
        SEQUENCE,
        found_by=("weight",),
    ),
)
