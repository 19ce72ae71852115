"""Mistakes like those that were made: found late in Cuboid, or reported of other trainers (:data:`PUBLISHED`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

import cuboid
from cuboid.checkpoint import rng_state
from cuboid.distributed import axis_collectives
from cuboid.distributed.async_result import AsyncResult
from cuboid.distributed.axis_collectives import own_slice
from cuboid.integrations.deepspeed import checkpoint as deepspeed_checkpoint
from cuboid.models.attention import interface
from cuboid.models.attention.whole_sequence import Replay
from cuboid.models.batch.broadcast import ReplicasInStep
from cuboid.models.cross_entropy import chunked, loss_forward
from cuboid.models.cross_entropy.chunked import ChunkedCrossEntropy
from cuboid.models.kinds import forward, model_kind
from cuboid.models.kinds.model_kind import ModelKind
from cuboid.models.pipeline import training_pipeline as pipeline
from cuboid.models.pipeline.training_pipeline import Pipeline
from cuboid.models.routers import router_logits
from cuboid.models.routers.router_loss import RouterSums
from cuboid.models.sharded import parallelize
from cuboid.models.stages import units
from cuboid.models.stages.stage_runner import StageRunner
from cuboid.models.stages.units import SegmentedBatch
from cuboid.seq1f1b.attention.kv_cache import KVCache
from cuboid.tensor3d.experts import grouped_linear
from cuboid.tensor3d.layers import dropout, fused_projections, norm
from cuboid.tensor3d.layers.linear import ShardedLinear
from cuboid.tensor3d.layers.norm import ShardedRMSNorm
from cuboid.tensor3d.layers.output_reduce import NoReduce, ScatterSequence
from cuboid.tensor3d.layers.vocab_embedding import ShardedEmbedding
from cuboid.tensor3d.sharding import param_group, sharded_param
from cuboid.tensor3d.sharding.fp8_blocks import BlockForm
from cuboid.tensor3d.sharding.sharded_param import ShardedParam, ShardedState, UnshardedCopy
from cuboid.verify import SmallModel, sharded
from cuboid.verify.compare import ComparedKind
from cuboid.weights import checkpointing, training_state
from mutations.mutation import (
    BATCH,
    HIDDEN,
    LLAMA,
    ROUTERS,
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

# --- embeddings, the head, and the loss --------------------------------------------------------------------------


def no_padding_idx(original: Any, *args: Any, padding_idx: Any, **kwargs: Any) -> None:
    original(*args, **kwargs, padding_idx=None)


def wrong_second_chunk(original: Any, self: ChunkedCrossEntropy, hidden: torch.Tensor) -> Iterator[Any]:
    for number, (positions, labels) in enumerate(original(self, hidden)):
        yield positions, labels.roll(1, dims=1) if number == 1 else labels


def longer_gradient(original: Any, ctx: Any, factor: torch.Tensor) -> Any:
    return original(ctx, factor * 1.02)


def longer_chunks(original: Any, self: ChunkedCrossEntropy, hidden: Any, held: Any, factor: Any = 1.0) -> Any:
    value, gradient = original(self, hidden, held, factor * 1.02)
    return value / 1.02, gradient


def own_divisor(original: Any, labels: Any, mesh: Any, items: Any, ignore_index: int, like: torch.Tensor) -> Any:
    count = (labels != ignore_index).sum().to(like.dtype) * mesh.size("batch")
    return count.clamp(min=1) if items is None else original(labels, mesh, items, ignore_index, like)


def mean_of_means(original: Any, labels: Any, mesh: Any, items: Any, ignore_index: int, like: torch.Tensor) -> Any:
    return original(labels, mesh, None, ignore_index, like) * 2


def own_items(original: Any, self: ReplicasInStep, status: int) -> list[int]:
    statuses: list[int] = original(self, status)
    assert self.items is not None
    self.total_items = int(self.items) * len(statuses)
    return statuses


def divided_twice(
    original: Any, self: StageRunner, model: Any, chunk: Any, batches: Any, stores: Any, *, scale: float, **options: Any
) -> None:
    original(self, model, chunk, batches, stores, scale=scale / len(batches), **options)


def ignored_labels_count(original: Any, logits: Any, labels: torch.Tensor, **options: Any) -> Any:
    return original(logits, labels.clamp(min=0), **options)


# --- norms and linear layers -------------------------------------------------------------------------------------


@contextmanager
def one_norm_alone() -> Iterator[None]:
    """The first norm of the model takes its own part of the hidden state for all of it."""
    all_reduce, forward = norm.all_reduce, ShardedRMSNorm.forward
    first: list[nn.Module] = []

    def mutated(self: ShardedRMSNorm, x: torch.Tensor) -> torch.Tensor:
        first[:] = first or [self]
        alone = self is first[0]
        with mock.patch.object(norm, "all_reduce", no_reduce if alone else all_reduce):
            return forward(self, x)

    with mock.patch.object(ShardedRMSNorm, "forward", mutated):
        yield


def no_reduce(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return tensor


@contextmanager
def norm_backward_alone() -> Iterator[None]:
    """The way back through norms forgets that the hidden state is split."""
    backward, all_reduce = norm._RMSNorm.backward, norm.all_reduce

    def mutated(ctx: Any, dy: torch.Tensor) -> Any:
        with mock.patch.object(norm, "all_reduce", no_reduce):
            return backward(ctx, dy)

    assert all_reduce is not no_reduce
    with mock.patch.object(norm._RMSNorm, "backward", staticmethod(mutated)):
        yield


def other_eps(original: Any, *args: Any, eps: float, **kwargs: Any) -> None:
    original(*args, **kwargs, eps=10 * eps)


def bias_twice(original: Any, self: ShardedLinear, dtype: torch.dtype) -> Any:
    operand = original(self, dtype)
    return operand if operand.bias is None else dataclasses.replace(operand, bias=2 * operand.bias)


def bias_on_every_rank(original: Any, self: ShardedLinear, dtype: torch.dtype) -> Any:
    operand = original(self, dtype)
    is_down = isinstance(self.product.output_reduce, ScatterSequence) and operand.bias is not None
    return dataclasses.replace(operand, bias=operand.bias * self.mesh.size("sequence")) if is_down else operand


def reversed_heads(original: Any, *args: Any) -> Any:
    plan = original(*args)
    return dataclasses.replace(plan, keep=plan.keep[::-1])


def own_share_of_small_gradients(ctx: Any, gradient: torch.Tensor) -> Any:
    param: ShardedParam = ctx.param
    return param.stacked(gradient)[param.mesh.index(*param.spec.fsdp_axes)], None


@contextmanager
def stale_weights() -> Iterator[None]:
    """Gathered weights are kept beyond the optimizer's step."""
    kept: list[Any] = []
    reshard_after_forward = ShardedParam.reshard_after_forward

    def keep(self: ShardedParam, *args: Any, **kwargs: Any) -> Any:
        block = reshard_after_forward(self, *args, **kwargs)
        kept.append(block)
        return block

    needs_unshard = ShardedParam.needs_unshard

    def reuse(self: ShardedParam, shard: Any, *form: Any) -> bool:
        copy = None if self._copy is None else self._copy()
        if copy is None or self.state is not ShardedState.SHARDED or copy.block.dtype != shard.dtype:
            return needs_unshard(self, shard, *form)
        self._block, self._dtype, self.state = copy.block, shard.dtype, ShardedState.UNSHARDED
        self._form = BlockForm.WIDE
        return False

    with (
        mock.patch.object(ShardedParam, "reshard_after_forward", keep),
        mock.patch.object(ShardedParam, "needs_unshard", reuse),
        mock.patch.object(UnshardedCopy, "is_of", return_value=True),
    ):
        yield


# --- masks, positions, segments ----------------------------------------------------------------------------------


def without_mask(original: Any, kind: Any, model: Any, batch: Any) -> Any:
    return {name: value for name, value in original(kind, model, batch).items() if name != "attention_mask"}


def counted_positions(original: Any, kind: Any, model: Any, batch: Any) -> Any:
    arguments = original(kind, model, batch)
    positions = arguments["position_ids"]
    return {**arguments, "position_ids": torch.arange(positions.shape[1]).expand_as(positions)}


def no_mask_in_segments(
    original: Any, mask: Any, positions: Any, length: int, labels: Any = None, **options: Any
) -> Any:
    return None, original(None, positions, length, labels, **options)[1] if mask is None else None


def nothing_packed(original: Any, mask: Any, positions: Any, length: int, labels: Any = None, **options: Any) -> Any:
    return original(mask, positions, length, labels, **options)[0], None


def window_off_by_one(original: Any, name: str, unit: Any, arguments: dict[str, Any]) -> Any:
    window = arguments.get("local_size")
    return original(name, unit, arguments if window is None else {**arguments, "local_size": window - 1})


def last_label_lost(original: Any, self: SegmentedBatch, tensor: torch.Tensor, segment: int) -> torch.Tensor:
    part = original(self, tensor, segment)
    if tensor is self.labels and segment + 2 < len(self.bounds):
        part = part.clone()
        part[:, -1] = -100
    return part


def wrong_offset(original: Any, self: Replay, x: torch.Tensor, dim: int, start: int | None = None) -> torch.Tensor:
    behind = min(self.start, 1)
    moved = dataclasses.replace(self, start=self.start - behind, stop=self.stop - behind)
    part: torch.Tensor = original(moved, x, dim, start)
    return part


def first_segment_forgets(original: Any, self: KVCache, layer: Any, start: int, key: Any, value: Any) -> Any:
    return (key, value) if start == 0 else original(self, layer, start, key, value)


def no_scaling(original: Any, call: Any, *others: Any) -> Any:
    options = {name: value for name, value in call.options.items() if name != "scaling"}
    return original(dataclasses.replace(call, options=options), *others)


# --- kinds of bugs that others shipped ---------------------------------------------------------------------------

#: Silent mistakes that trainers were released with, as their users reported them.
PUBLISHED = {
    1: "A replicated norm's gradient isn't summed over the axis that cuts its input",
    2: "The gradient norm counts a replicated parameter once per rank, or misses one",
    3: "A padding mask is cut by another group than its tokens",
    4: "A count is reduced in place and used as the rank's own afterwards",
    5: "An auxiliary loss is scaled by the layout",
    6: "A checkpoint's names fit the wrong layers, and load strictly",
    7: "Random states are restored on the first rank's terms, or one draw off",
    8: "A document's boundary is lost in a row that is cut",
    9: "A sliding window is ignored where rows are cut",
    10: "A chunked loss has another divisor",
    11: "An axis of one rank skips a synchronisation",
    12: "Partial sums in bf16 are rounded from rank to rank",
    13: "Gradients of experts are lost",
    14: "The factors of a low-rank pair on a layer that is cut miss their reduction",
}


@contextmanager
def norm_of_heads_alone() -> Iterator[None]:
    """Norms of each head's features get the gradient of the first rank's heads only."""
    reduce, alone = param_group.ParamGroupUnshard.start_reduce_scatter, sharded_param._Unshard.backward

    def of_heads(param: ShardedParam) -> bool:
        return len(param.block_shape) == 1 and param.mesh.index("hidden") > 0

    def mutated(self: param_group.ParamGroupUnshard, gradients: Any) -> Any:
        pairs = zip(self.params, gradients, strict=True)
        return reduce(self, [g if g is None or not of_heads(p) else torch.zeros_like(g) for p, g in pairs])

    def mutated_alone(ctx: Any, gradient: torch.Tensor) -> Any:
        return alone(ctx, torch.zeros_like(gradient) if of_heads(ctx.param) else gradient)

    with (
        mock.patch.object(param_group.ParamGroupUnshard, "start_reduce_scatter", mutated),
        mock.patch.object(sharded_param._Unshard, "backward", staticmethod(mutated_alone)),
    ):
        yield


def tie_counted_twice(original: Any, **kwargs: Any) -> Any:
    engine, *others = original(**kwargs)
    for parameter in engine.module.staging.repeated_parameters():
        parameter.ds_pipe_replicated, parameter.tensor_model_parallel = False, True
    return (engine, *others)


def vectors_not_counted(original: Any, **kwargs: Any) -> Any:
    engine, *others = original(**kwargs)
    for parameter in engine.module.parameters():
        parameter.tensor_model_parallel = parameter.dim() > 1
    return (engine, *others)


def mask_of_other_rows(original: Any, arguments: dict[str, Any], config: Any, mesh: Any, **options: Any) -> Any:
    batch = original(arguments, config, mesh, **options)
    mask = arguments.get("attention_mask")
    if mask is not None:
        rows = own_slice(mask, 0, mesh.along("sequence"))[: len(batch.tensors["attention_mask"])]
        missing = batch.padded - batch.length
        batch.tensors["attention_mask"] = nn.functional.pad(rows, (0, missing))
    return batch


def reduced_twice(original: Any, labels: Any, mesh: Any, items: Any, ignore_index: int, like: torch.Tensor) -> Any:
    count = original(labels, mesh, items, ignore_index, like)
    return count if items is not None else norm.all_reduce(count, mesh.along("batch"))


def own_items_of_all(original: Any, self: ReplicasInStep, status: int) -> list[int]:
    statuses: list[int] = original(self, status)
    self.total_items *= len(statuses)
    return statuses


def whole_router_gradient(original: Any, ctx: Any, gradient: torch.Tensor) -> Any:
    logits_gradient, *rest = original(ctx, gradient)
    return logits_gradient * ctx.mesh.size("hidden"), *rest


def router_gradient_of_each(original: Any, self: RouterSums, sums: torch.Tensor) -> torch.Tensor:
    return original(self, sums) * self._mesh.size("hidden")


def swap_layers(model: Any) -> None:
    """The weights of the first two layers trade places."""
    model = getattr(model, "module", model)
    named = dict(model.named_parameters())
    for name in [name for name in named if "layers.0." in name]:
        one, other = named[name], named.get(name.replace("layers.0.", "layers.1."))
        if other is not None:
            kept = one.data.clone()
            one.data.copy_(other.data)
            other.data.copy_(kept)


def file_of_other_layers(original: Any, model: Any, *args: Any) -> None:
    swap_layers(model)
    original(model, *args)
    swap_layers(model)


def loaded_into_other_layers(original: Any, model: Any, folder: Any) -> None:
    original(model, folder)
    swap_layers(model)


def names_of_other_layers(original: Any, model: nn.Module) -> dict[int, str]:
    other = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}
    swapped = {}
    for key, name in original(model).items():
        layer = next((layer for layer in other if layer in name), None)
        swapped[key] = name if layer is None else name.replace(layer, other[layer])
    return swapped


def random_states_of_the_first(model: Any, opened: Any) -> None:
    rng_state.restore(opened.document["random"][0]["state"], torch.device("cpu"))


def one_draw_off(original: Any, *args: Any) -> None:
    original(*args)
    torch.rand(1)


def boundary_lost_at_a_cut(original: Any, positions: torch.Tensor) -> torch.Tensor | None:
    """Where ranks have parts of the sequence, later ones begin with the sequence that the row began with."""
    packed: torch.Tensor | None = original(positions)
    if packed is not None:
        packed = packed.clone()
        packed[:, packed.shape[1] // 2 :] = packed[:, packed.shape[1] // 2 :][:, :1]
    return packed


def boundary_lost_in_a_segment(
    original: Any, mask: Any, positions: Any, length: int, labels: Any = None, **options: Any
) -> Any:
    mask, packed = original(mask, positions, length, labels, **options)
    if packed is not None:
        packed = packed.clone()
        packed[:, length // 2 :] = packed[:, length // 2 :][:, :1]
    return mask, packed


def without_window(model: Any) -> None:
    model.config.sliding_window = 10_000


def mean_of_chunks(
    original: Any, self: ChunkedCrossEntropy, hidden: torch.Tensor, labels: torch.Tensor, columns: slice
) -> Any:
    label_count = (labels != self.ignore_index).sum().clamp(min=1)
    return original(self, hidden, labels, columns) / label_count * self.labels.numel()


def axis_of_one_skips(original: Any, self: ShardedParam, block: torch.Tensor) -> Any:
    if self.mesh.size("batch") > 1:
        return original(self, block)
    return AsyncResult(self.stacked(block)[self.along.index].clone())


def rounded_at_each_rank(outs: Any, x: torch.Tensor, group: Any, **_: Any) -> Any:
    """Ranks add in their own precision, one after the other."""
    every = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(every, x, group=group)
    total = torch.zeros_like(x.view(group.size(), -1)[0])
    for one in every:
        total += one.view(group.size(), -1)[group.rank()]
    for out, part in zip(outs, total.split([out.numel() for out in outs]), strict=True):
        out.view(-1).copy_(part)
    return AsyncResult(outs)


def last_expert_lost(original: Any, a: torch.Tensor, b: torch.Tensor, dispatch: Any) -> torch.Tensor:
    products: torch.Tensor = original(a, b, dispatch)
    products[-1] = 0
    return products


def latents_of_own_features(original: Any, weight: ShardedParam) -> Any:
    return dataclasses.replace(original(weight), output_reduce=NoReduce())


def own_positions_of_latents(ctx: Any, gradient: torch.Tensor) -> Any:
    return own_slice(gradient, 1, ctx.along).contiguous(), None


@contextmanager
def same_mask_in_every_call() -> Iterator[None]:
    """Each rank has a mask of its own, which all calls, layers and micro-batches share."""

    def mutated(mesh: Any, device: Any, axes: Any = ("batch", "sequence", "hidden")) -> Any:
        stack = ExitStack()
        stack.enter_context(torch.random.fork_rng(devices=[]))
        torch.manual_seed(1 + mesh.index(*axes))
        return stack

    with mock.patch.object(dropout, "own_random_numbers", mutated):
        yield


# --- the optimizer, replicas and files ---------------------------------------------------------------------------


@contextmanager
def stale_gradients_on_one_stage() -> Iterator[None]:
    """The last stage's optimizer steps with the gradients of the step before."""
    step = torch.optim.AdamW.step
    before: dict[nn.Parameter, torch.Tensor] = {}

    def mutated(self: torch.optim.Optimizer, *args: Any) -> Any:
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            gradient = parameter.grad.clone()
            if rank() == 1 and parameter in before:
                parameter.grad = before[parameter]
            before[parameter] = gradient
        return step(self, *args)

    with mock.patch.object(torch.optim.AdamW, "step", mutated):
        yield


def everything_decays(original: Any, **kwargs: Any) -> Any:
    engine, *others = original(**kwargs)
    for group in engine.optimizer.param_groups:
        group["weight_decay"] = 0.1
    return (engine, *others)


def gradients_averaged(original: Any, self: Pipeline, *args: Any, gradient_scale: float = 1.0, **kwargs: Any) -> Any:
    return original(self, *args, **kwargs)


def longer_in_the_engine(original: Any, **kwargs: Any) -> Any:
    lengthen(1.01, "layers.0.mlp.up_proj.weight", kwargs["model"])
    return original(**kwargs)


def transposed_file(original: Any, model: Any, *args: Any) -> None:
    inner = getattr(model, "module", model)
    for weight in found(inner, "layers.1.self_attn.o_proj.weight"):
        weight.data = weight.data.t().contiguous()
    original(model, *args)


def lengthen(factor: float, ending: str, model: nn.Module) -> None:
    """Let a parameter's gradients be too long."""
    for parameter in found(model, ending):
        parameter.register_hook(cuboid.local_hook(lambda gradient: gradient * factor))


def transpose(ending: str, model: nn.Module) -> None:
    """As if a weight had been stored the other way round."""
    for parameter in found(model, ending):
        parameter.data = parameter.data.t().contiguous()


def without_soft_cap(model: Any) -> None:
    model.config.final_logit_softcapping = None


def one_expert(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "top_k"):
            module.top_k = 1


def wide_window(model: Any) -> None:
    model.config.sliding_window += 1


def all_of(*mutations: Mutate) -> Mutate:
    """Several at once."""

    @contextmanager
    def mutate() -> Iterator[None]:
        with ExitStack() as stack:
            for mutation in mutations:
                stack.enter_context(mutation())
            yield

    return mutate


CHUNKS = around(ChunkedCrossEntropy, "_chunks", wrong_second_chunk)
LONGER = all_of(
    lambda: mock.patch.object(
        loss_forward._DifferentiableLoss,
        "backward",
        staticmethod(partial(longer_gradient, loss_forward._DifferentiableLoss.backward)),
    ),
    around(StageRunner, "_run_head", lambda original, *args: longer(original(*args))),
)
LAST_LAYER = after_loading(lambda model: [lengthen(1.02, f"layers.1.{part}", model) for part in LAST_PARTS] and None)
LAST_PARTS = ("self_attn.q_proj.weight", "self_attn.o_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")


def longer(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """2 %."""
    return None if gradient is None else gradient * 1.02


REPORTED = (
    Mutation("padding_idx ignored", around(ShardedEmbedding, "__init__", no_padding_idx), SEQUENCE),
    Mutation("labels wrong in the second chunk", CHUNKS, HIDDEN, found_by=("loss",)),
    Mutation("labels wrong in the second chunk, in a pipeline", CHUNKS, STAGES, found_by=("loss",)),
    Mutation("all gradients × 1.02", LONGER, SEQUENCE, dtype="bfloat16", found_by=("scale", "norm")),
    Mutation("all gradients × 1.02, in a pipeline", LONGER, STAGES, dtype="bfloat16", found_by=("scale", "norm")),
    Mutation(
        "all gradients × 1.02, in the engine",
        LONGER,
        STAGES,
        dtype="bfloat16",
        name_of_pass="engine",
        found_by=("norm",),
    ),
    Mutation("the last layer's gradients × 1.02", LAST_LAYER, SEQUENCE, dtype="bfloat16", found_by=("scale",)),
    Mutation(
        "1 % in one gradient",
        after_loading(partial(lengthen, 1.01, "layers.0.mlp.up_proj.weight")),
        HIDDEN,
        dtype="float32",
    ),
    Mutation(
        "1 % in one gradient, in the engine",
        around(sharded.deepspeed, "initialize", longer_in_the_engine),
        HIDDEN,
        name_of_pass="engine",
        found_by=("moment",),
    ),
    Mutation("one norm's all-reduce left out", one_norm_alone, HIDDEN, found_by=("activation",)),
    Mutation("the norms' all-reduce left out in backward", norm_backward_alone, HIDDEN),
    Mutation(
        "dropout alike on all ranks",
        instead(dropout, "own_random_numbers", lambda *_: nullcontext()),
        SEQUENCE,
        SmallModel("gpt2"),
        ("dropout",),
    ),
    Mutation(
        "dropout alike in every call",
        same_mask_in_every_call,
        SEQUENCE,
        SmallModel("gpt2"),
        ("dropout",),
    ),
    Mutation(
        "dropout alike on all stages",
        instead(pipeline, "random_numbers_of_stages", lambda *_: nullcontext()),
        STAGES,
        SmallModel("gpt2"),
        ("dropout",),
    ),
    Mutation(
        "recomputation drops something else",
        instead(torch, "set_rng_state", lambda _: None),
        SEQUENCE,
        SmallModel("gpt2"),
        ("dropout",),
    ),
    Mutation("a norm's eps", around(ShardedRMSNorm, "__init__", other_eps), HIDDEN, found_by=("activation",)),
    Mutation(
        "small gradients not added up",
        instead(
            sharded_param._Unshard,
            "backward",
            staticmethod(own_share_of_small_gradients),
        ),
        SEQUENCE,
    ),
    Mutation(
        "divided by each micro-batch's labels",
        around(loss_forward, "divisor", mean_of_means),
        SEQUENCE,
    ),
    Mutation(
        "divided by the labels of own rows",
        around(loss_forward, "divisor", own_divisor),
        BATCH,
        name_of_pass="engine",
        found_by=("loss",),
    ),
    Mutation(
        "divided by the labels of the own replica",
        around(ReplicasInStep, "_exchange", own_items),
        Layout(stages=1, replicas=2),
        found_by=("loss",),
    ),
    Mutation("divided twice", around(StageRunner, "__init__", divided_twice), SEGMENTS, found_by=("loss",)),
    Mutation(
        "ignored labels count",
        around(chunked, "token_sum", ignored_labels_count),
        BATCH,
        found_by=("loss",),
    ),
    Mutation(
        "K/V heads permuted",
        around(parallelize, "plan_key_value_heads", reversed_heads),
        HIDDEN,
        SmallModel("llama", heads=12, kv_heads=3),
        found_by=("activation",),
    ),
    Mutation(
        "a bias added twice", around(ShardedLinear, "operand", bias_twice), HIDDEN, SmallModel("qwen2"), ("activation",)
    ),
    Mutation(
        "a row-parallel bias added on every rank",
        around(ShardedLinear, "operand", bias_on_every_rank),
        SEQUENCE,
        SmallModel("gpt2"),
        ("activation",),
    ),
    Mutation(
        "the mask ignored",
        around(ModelKind, "local_arguments", without_mask),
        BATCH,
        LLAMA,
        ("loss",),
    ),
    Mutation(
        "the mask ignored, in segments",
        around(units, "prepare_masks", no_mask_in_segments),
        SEGMENTS,
        LLAMA,
        ("loss",),
    ),
    Mutation(
        "packed positions ignored",
        around(ModelKind, "local_arguments", counted_positions),
        HIDDEN,
        LLAMA,
    ),
    Mutation(
        "packed positions ignored, in segments",
        around(units, "prepare_masks", nothing_packed),
        SEGMENTS,
    ),
    Mutation(
        "a window off by one",
        after_loading(wide_window),
        HIDDEN,
        SmallModel("mistral", sliding_window=64),
        ("activation",),
    ),
    Mutation(
        "a window off by one, in segments",
        around(interface, "segment_mask", window_off_by_one),
        SEGMENTS,
        SmallModel("gemma3"),
        ("activation",),
    ),
    Mutation(
        "attention's scaling ignored",
        around(interface, "attend_plain", no_scaling),
        SEGMENTS,
        SmallModel("gemma3"),
        ("loss",),
    ),
    Mutation("logits' soft-cap ignored", after_loading(without_soft_cap), STAGES, SmallModel("gemma2"), ("loss",)),
    Mutation("one expert of two", after_loading(one_expert), STAGES, SmallModel("mixtral"), ("activation",)),
    Mutation("a segment's last label lost", around(SegmentedBatch, "cut", last_label_lost), SEGMENTS, LLAMA, ("loss",)),
    Mutation("a segment's positions off", around(Replay, "cut", wrong_offset), STAGES, LLAMA, ("activation",)),
    Mutation(
        "the first segment's K/V gradients dropped",
        around(KVCache, "with_gradients", first_segment_forgets),
        STAGES,
    ),
    Mutation(
        "half of the tied embedding's gradient missing",
        instead(Pipeline, "add_shared_gradients", lambda _: None),
        STAGES,
        SmallModel("llama", tied=True),
        stops_with="copies of it have become different",
    ),
    Mutation("a stale gradient on one stage", stale_gradients_on_one_stage, STAGES, found_by=("weight",)),
    Mutation(
        "stale gathered weights", stale_weights, Layout("2x1x1", weight_gather="step"), found_by=("loss", "gradient")
    ),
    Mutation(
        "weight decay on norms",
        around(sharded.deepspeed, "initialize", everything_decays),
        HIDDEN,
        name_of_pass="engine",
        found_by=("weight",),
    ),
    Mutation(
        "clipping by a shard's own norm",
        instead(DeepSpeedZeroOptimizer, "_model_parallel_all_reduce", lambda *_, **__: None),
        HIDDEN,
        name_of_pass="engine",
        found_by=("norm",),
    ),
    Mutation(
        "gradients averaged over replicas",
        around(Pipeline, "train", gradients_averaged),
        Layout(stages=1, replicas=2),
        name_of_pass="engine",
        found_by=("norm", "moment"),
    ),
    Mutation(
        "a weight loaded transposed",
        after_loading(partial(transpose, "layers.0.self_attn.q_proj.weight")),
        STAGES,
        found_by=("activation",),
    ),
    Mutation(
        "a weight saved transposed",
        around(sharded.cuboid, "save_pretrained", transposed_file),
        STAGES,
        found_by=("weight",),
    ),
    Mutation("a norm of heads without its sum", norm_of_heads_alone, HIDDEN, SmallModel("qwen3"), published=1),
    Mutation(
        "the norm counts a tied weight on both stages",
        around(sharded.deepspeed, "initialize", tie_counted_twice),
        STAGES,
        SmallModel("llama", tied=True),
        ("norm",),
        "engine",
        published=2,
    ),
    Mutation(
        "the norm misses vectors of all ranks but one",
        around(sharded.deepspeed, "initialize", vectors_not_counted),
        HIDDEN,
        found_by=("norm",),
        name_of_pass="engine",
        published=2,
    ),
    Mutation(
        "a mask of other rows",
        around(model_kind, "take_local_batch", mask_of_other_rows),
        BATCH,
        found_by=("activation", "loss"),
        published=3,
    ),
    Mutation(
        "a mask of other rows, in a pipeline",
        around(units, "take_local_batch", mask_of_other_rows),
        Layout("2x1x1", stages=2),
        found_by=("activation", "loss"),
        published=3,
    ),
    Mutation(
        "labels counted twice",
        around(loss_forward, "divisor", reduced_twice),
        BATCH,
        name_of_pass="engine",
        found_by=("loss",),
        published=4,
    ),
    Mutation(
        "labels of all replicas counted twice",
        around(ReplicasInStep, "_exchange", own_items_of_all),
        Layout(stages=1, replicas=2),
        found_by=("loss",),
        published=4,
    ),
    Mutation(
        "the routers' loss on each rank along hidden",
        lambda: mock.patch.object(
            router_logits._GatherRouters,
            "backward",
            staticmethod(partial(whole_router_gradient, router_logits._GatherRouters.backward)),
        ),
        HIDDEN,
        ROUTERS,
        published=5,
    ),
    Mutation(
        "the routers' loss on each rank along hidden, in a pipeline",
        around(RouterSums, "gradient", router_gradient_of_each),
        Layout("1x1x2", stages=2),
        ROUTERS,
        published=5,
    ),
    Mutation(
        "layers in the wrong place",
        after_loading(swap_layers),
        HIDDEN,
        found_by=("activation",),
        published=6,
    ),
    Mutation(
        "layers in the wrong place of a file",
        around(sharded.cuboid, "save_pretrained", file_of_other_layers),
        HIDDEN,
        found_by=("weight",),
        published=6,
    ),
    Mutation(
        "layers in the wrong place of a checkpoint that is loaded",
        around(checkpointing, "load_model", loaded_into_other_layers),
        HIDDEN,
        name_of_pass="engine",
        found_by=("resume",),
        published=6,
    ),
    Mutation(
        "moments under the names of other layers, written and read",
        around(deepspeed_checkpoint, "stored_names", names_of_other_layers),
        HIDDEN,
        name_of_pass="engine",
        found_by=("resume",),
        published=6,
    ),
    Mutation(
        "random states of the first rank",
        instead(checkpointing, "restore_random", random_states_of_the_first),
        HIDDEN,
        name_of_pass="engine",
        found_by=("resume",),
        published=7,
    ),
    Mutation(
        "random states one draw off",
        around(training_state, "restore", one_draw_off),
        STAGES,
        name_of_pass="engine",
        found_by=("resume",),
        published=7,
    ),
    Mutation(
        "a packed sequence's end lost where the row is cut",
        around(forward, "find_packed_sequence_indices", boundary_lost_at_a_cut),
        SEQUENCE,
        published=8,
    ),
    Mutation(
        "a packed sequence's end lost where segments begin",
        around(units, "prepare_masks", boundary_lost_in_a_segment),
        SEGMENTS,
        published=8,
    ),
    Mutation(
        "no window on a mesh",
        after_loading(without_window),
        SEQUENCE,
        SmallModel("mistral", sliding_window=64),
        ("activation",),
        published=9,
    ),
    Mutation(
        "no window in segments",
        after_loading(without_window),
        SEGMENTS,
        SmallModel("gemma3"),
        ("activation",),
        published=9,
    ),
    Mutation(
        "a mean over chunks",
        around(ChunkedCrossEntropy, "_loss", mean_of_chunks),
        HIDDEN,
        found_by=("loss",),
        published=10,
    ),
    Mutation(
        "a mean over chunks, in a pipeline",
        around(ChunkedCrossEntropy, "_loss", mean_of_chunks),
        STAGES,
        found_by=("loss",),
        published=10,
    ),
    Mutation(
        "gradients stay where the batch axis has one rank",
        around(ShardedParam, "start_reduce_scatter", axis_of_one_skips),
        SEQUENCE,
        published=11,
    ),
    Mutation(
        "gradients in bf16 from rank to rank",
        lambda: mock.patch.object(axis_collectives, "start_reduce_scatter_into", rounded_at_each_rank),
        Layout("4x1x1"),
        found_by=("sum",),
        published=12,
    ),
    Mutation(
        "the last expert's gradient lost",
        around(grouped_linear, "multiply_transposed", last_expert_lost),
        HIDDEN,
        SmallModel("mixtral"),
        published=13,
    ),
    Mutation(
        "latents without their sum",
        around(parallelize, "latent_product", latents_of_own_features),
        HIDDEN,
        SmallModel("deepseek_v3"),
        ("activation",),
        published=14,
    ),
    Mutation(
        "latents' gradients without their sum",
        instead(fused_projections.GatherPositions, "backward", staticmethod(own_positions_of_latents)),
        SEQUENCE,
        SmallModel("deepseek_v3"),
        published=14,
    ),
)
#: Kinds of checks in the words of docs/silent_bugs.md.
SEEN_BY: dict[ComparedKind, str] = {
    "activation": "outputs",
    "loss": "loss",
    "gradient": "gradients",
    "norm": "norm",
    "weight": "weights",
    "sum": "sums",
    "resume": "resuming",
}


def published_table() -> list[str]:
    """How rows of docs/silent_bugs.md begin: a kind of bug that others shipped, as what it is planted, who sees it."""
    rows = []
    for number, kind in PUBLISHED.items():
        planted = [mutation for mutation in REPORTED if mutation.published == number]
        names = "; ".join(mutation.name for mutation in planted)
        seen = dict.fromkeys(
            f"{SEEN_BY[by]} ({mutation.name_of_pass})" for mutation in planted for by in mutation.found_by
        )
        rows.append(f"| {number} | {kind} | {names} | {', '.join(seen)} |")
    return rows
