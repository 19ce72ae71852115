"""Replace the modules of a Hugging Face model by their sharded counterparts, in place."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from cuboid.config.schema import TensorParallelConfig
from cuboid.distributed.mesh import Mesh
from cuboid.models.architectures.attention_heads import (
    KeyValuePlan,
    copies_of_key_value_heads,
    plan_key_value_heads,
)
from cuboid.models.architectures.roles import Role, layer_names, output_embeddings, token_embeddings
from cuboid.models.kinds.label_heads import without_padding
from cuboid.models.kinds.registry import kind_of
from cuboid.models.sharded.customizations import carry_over
from cuboid.models.sharded.fp8 import fp8_products
from cuboid.models.sharded.parallel_plan import ParallelPlan
from cuboid.models.sharded.quantization import QuantizedLayers
from cuboid.models.sharded.random_modules import ModelDraws, seed_random_modules
from cuboid.tensor3d.experts.router import ShardedRouter
from cuboid.tensor3d.experts.sharded_experts import ShardedExperts, ShardedScaledExperts
from cuboid.tensor3d.layers.fused_projections import CrossProjections, FusedProjections, LatentProjections
from cuboid.tensor3d.layers.head_bias import HeadBias, PerHeadParameters
from cuboid.tensor3d.layers.labels_head import LabelsHead
from cuboid.tensor3d.layers.linear import ShardedLinear, head_product, latent_product
from cuboid.tensor3d.layers.linear_op import Product
from cuboid.tensor3d.layers.norm import HeadsRMSNorm, ShardedLayerNorm, ShardedRMSNorm
from cuboid.tensor3d.layers.output_reduce import NoReduce, ScatterFeatures, ScatterSequence, SelectHeads
from cuboid.tensor3d.layers.unsharded_module import UnshardedModule
from cuboid.tensor3d.layers.vocab_embedding import shard_embedding
from cuboid.tensor3d.layers.whole_block import ImageSplit, LateSplit, compute_whole, keep_whole
from cuboid.tensor3d.prefetch import ModelPrefetcher
from cuboid.tensor3d.sharding.sharded_param import (
    disable_reshard_after_forward,
    set_gradient_reduce,
    shard_in_place,
)
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec

#: Attributes of attention modules for numbers of heads, and for features of all heads.
_QUERY_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads")
_FEATURES = ("split_size", "embed_dim", "hidden_size", "all_head_size", "attn_hidden_size", "hidden_dim")
#: Attributes of blocks with experts, and of their routers, for the features of a token.
_WIDTHS = ("hidden_dim", "hidden_size", "input_size")
#: Argument names of cross-attention's forward for the sequence that keys and values are computed from.
_SOURCES = ("key_value_states", "encoder_hidden_states")
#: Returns the shard of a parameter: cut from the whole tensor, or already read as a slice.
ShardOf = Callable[[nn.Parameter, ShardingSpec], torch.Tensor]


def parallelize_modules(
    model: PreTrainedModel,
    parallel_plan: ParallelPlan,
    mesh: Mesh,
    config: TensorParallelConfig,
    shard_of: ShardOf,
    stages: Sequence[Collection[str]] = (),
    quantized: QuantizedLayers | None = None,
) -> tuple[LateSplit | ImageSplit | None, ModelDraws]:
    """Replace every module of the parallel plan and all dropouts, and adapt the sizes that attention modules read.

    Tied parameters stay one parameter. The whole tensors are freed one by one as their modules are replaced.

    Args:
        model: the whole model, or a pipeline rank's part of it.
        parallel_plan: the plan for these modules.
        mesh: this rank's mesh.
        config: when to gather weights, and how to reduce gradients.
        shard_of: see :data:`ShardOf`.
        stages: on a pipeline rank, the layers' names of each of its stages; the stages run separately.
        quantized: the layers whose weights are stored in 4 bits.

    Returns:
        The hooks that split activations at the first layer, None if the embedding splits them; and what the model's own
        code draws.
    """
    _set_local_sizes(model, parallel_plan, mesh)
    uses = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    shared: dict[int, nn.Parameter | None] = {key: None for key, count in uses.items() if count > 1}
    in_fp8 = fp8_products(model, parallel_plan, config.fp8) if config.fp8 is not None else ()
    for name, role in parallel_plan.roles.items():
        old = model.get_submodule(name)
        specs = parallel_plan.specs[name]
        parameters = {key: _take_shard(old, key, spec, shard_of, shared) for key, spec in specs.items()}
        four_bits = None
        if quantized is not None and name in quantized.names:
            spec = specs["weight"]
            parameters["weight"], four_bits = quantized.finish(name, parameters["weight"], spec, mesh)
        if role.kind in ("whole", "inside", "beside tower", "tied"):
            keep_whole(old, parameters, mesh=mesh, specs=specs, four_bits=four_bits)
            continue
        if role.kind in ("experts", "router"):
            _shard_mixture(old, role, parameters, specs, mesh)
            continue
        if role.kind == "per head":
            shard_in_place(old, PerHeadParameters, parameters, mesh=mesh, specs=specs)
            continue
        new: nn.Module
        if role.norm is not None and role.heads is not None:
            new = _norm_over_heads(role, parameters["weight"], parallel_plan, name, mesh)
        else:
            new = _build(old, role, parameters, specs, mesh)
        if isinstance(new, ShardedLinear):
            if four_bits is not None:
                new.sharded_params["weight"].store_in(four_bits)
            product, bias_rows = _product(new, role, parallel_plan, isinstance(old, Conv1D))
            product = replace(product, is_fp8=name in in_fp8)
            new.configure(product, bias_rows, gathers_sequence=role.kind == "up" and role.alone)
        new.train(old.training)
        carry_over(old, new)
        if isinstance(new, LabelsHead):
            # All ranks have its logits whole, and of padding too.
            new.register_forward_hook(without_padding)
        model.set_submodule(name, new)
    blocks = whole_blocks(parallel_plan)
    late = kind_of(type(model), model.config).split_of_activations(mesh, parallel_plan.verdict)
    images = late if isinstance(late, ImageSplit) else None
    for name in blocks:
        role = parallel_plan.roles[name]
        split = late if role.late else None
        block = model.get_submodule(name)
        compute_whole(block, mesh, split, everywhere=role.everywhere, images=images, tower=role.tower)
    if images is not None:
        _split_images(model, images)
    elif isinstance(late, LateSplit):
        _split_late(model, late)
    if mesh.shape.size > 1:
        _fuse_projections(model, parallel_plan)
        layers = layer_names(model)
        runs = [[model.get_submodule(name) for name in layers if name in stage] for stage in stages or [layers]]
        if layers:
            runner = model.get_submodule(layers[0].rpartition(".")[0].rpartition(".")[0])
            runner.register_forward_pre_hook(ModelPrefetcher(runs))
    draws = seed_random_modules(model, parallel_plan, mesh, late)
    if config.gradient_reduce != "auto":
        set_gradient_reduce(model, config.gradient_reduce)
    if config.weight_gather == "step":
        disable_reshard_after_forward(model)
    return late, draws


def _take_shard(
    module: nn.Module, name: str, spec: ShardingSpec, shard_of: ShardOf, shared: dict[int, nn.Parameter | None]
) -> nn.Parameter:
    """The shard of a module's parameter. The module's own parameter is replaced by one on the meta device.

    ``shared`` has the shards of tied parameters by the parameters' ids, and None for those that are still to be cut.
    """
    parameter = getattr(module, name)
    known = shared.get(id(parameter))
    if known is not None:
        return known
    with torch.no_grad():
        shard = nn.Parameter(shard_of(parameter, spec), requires_grad=parameter.requires_grad)
    for hook in (parameter._backward_hooks or {}).values():
        shard.register_hook(hook)
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        shard.register_post_accumulate_grad_hook(hook)
    if id(parameter) in shared:
        # The other modules keep the whole tensor alive, so no other tensor gets its id until all are replaced.
        shared[id(parameter)] = shard
    blank = torch.empty_like(parameter, device="meta")
    module.register_parameter(name, nn.Parameter(blank, requires_grad=parameter.requires_grad))
    return shard


def _shard_mixture(
    module: nn.Module, role: Role, parameters: dict[str, nn.Parameter], specs: dict[str, ShardingSpec], mesh: Mesh
) -> None:
    """Shard experts or a router in place; their own code keeps running."""
    if role.experts is None:
        shard_in_place(module, ShardedRouter, parameters, mesh=mesh, specs=specs)
        assert isinstance(module, ShardedRouter)
        module.configure()
    else:
        experts = ShardedExperts if role.experts.given_all is None else ShardedScaledExperts
        shard_in_place(module, experts, parameters, mesh=mesh, specs=specs)
        assert isinstance(module, ShardedExperts)
        module.configure(role.experts)


def _forget_values(module: nn.Module) -> None:
    """Move a module to the meta device. ``module.to("meta")`` can't swap tensors that have weak references."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and not parameter.is_meta:
                empty = torch.empty_like(parameter, device="meta")
                part._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None and not buffer.is_meta:
                part._buffers[name] = torch.empty_like(buffer, device="meta")


def _build(
    old: nn.Module, role: Role, parameters: dict[str, nn.Parameter], specs: dict[str, ShardingSpec], mesh: Mesh
) -> nn.Module:
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if role.kind == "gathered" and role.norm is not None and role.norm.kind == "rms":
        # All ranks have the whole latents, so what autograd saves of them isn't split. This class saves less than the
        # model's own code.
        return ShardedRMSNorm(weight, bias, mesh=mesh, specs=specs, eps=role.norm.eps, offset=role.norm.offset, axes=())
    if role.kind == "gathered":
        _forget_values(old)
        return UnshardedModule(old, parameters, mesh=mesh, specs=specs)
    if role.kind == "norm":
        assert role.norm is not None
        norm = ShardedLayerNorm if role.norm.kind == "layer" else ShardedRMSNorm
        return norm(weight, bias, mesh=mesh, specs=specs, eps=role.norm.eps, offset=role.norm.offset)
    assert weight is not None
    if role.kind == "bias of heads":
        assert isinstance(old, nn.Embedding)
        return HeadBias(old, weight, mesh=mesh, specs=specs)
    if role.kind == "labels":
        return LabelsHead(weight, bias, mesh=mesh, specs=specs)
    if role.kind == "embedding":
        assert isinstance(old, nn.Embedding)
        return shard_embedding(old, weight, mesh=mesh, spec=specs["weight"])
    out_features, in_features = specs["weight"].shape
    if isinstance(old, Conv1D):
        in_features, out_features = out_features, in_features
    return ShardedLinear(weight, bias, mesh=mesh, specs=specs, in_features=in_features, out_features=out_features)


def _norm_over_heads(
    role: Role, weight: nn.Parameter, parallel_plan: ParallelPlan, name: str, mesh: Mesh
) -> HeadsRMSNorm:
    heads, rows, copies = parallel_plan.heads, None, None
    features = (heads.query if role.heads == "query" else heads.key_value) * heads.dim
    if role.heads == "key_value":
        plan = plan_key_value_heads(heads, mesh.shape, mesh.coordinate)
        rows = None if plan.scattered else _bias_rows(plan, heads.dim)
        # The norm sums squares over all ranks, in which a KV head that several ranks keep must count once.
        copy_counts = copies_of_key_value_heads(heads, mesh.shape, mesh.coordinate)
        copies = torch.tensor(copy_counts).repeat_interleave(heads.dim) if max(copy_counts) > 1 else None
    assert role.norm is not None
    options = {"eps": role.norm.eps, "offset": role.norm.offset, "specs": parallel_plan.specs[name]}
    return HeadsRMSNorm(weight, None, rows=rows, copies=copies, features=features, mesh=mesh, **options)


def _product(
    linear: ShardedLinear, role: Role, parallel_plan: ParallelPlan, in_first: bool
) -> tuple[Product, torch.Tensor | None]:
    """A linear layer's product on the mesh, and the indices of the bias elements to add; None for all of them."""
    weight, mesh = linear.sharded_params["weight"], linear.mesh
    if role.kind == "down":
        # Partial sums over `sequence`, reduce-scattered along the sequence.
        return Product(weight, ScatterSequence(mesh.along("sequence")), in_first), None
    if role.kind == "head":
        return head_product(weight), None
    if role.kind == "latent":
        return latent_product(weight), None
    if role.kind == "from latent":
        return Product(weight, NoReduce()), None
    if role.heads == "key_value":
        plan = plan_key_value_heads(parallel_plan.heads, mesh.shape, mesh.coordinate)
        if not plan.scattered:
            dim = parallel_plan.heads.dim
            output_reduce = SelectHeads(mesh.along("hidden"), dim, plan.heads, plan.keep)
            rows = (plan.first * dim, (plan.first + plan.heads) * dim)
            return Product(weight, output_reduce, in_first, rows=rows), _bias_rows(plan, dim)
    # Of "up", partial sums over `hidden`, reduce-scattered along the features.
    return Product(weight, ScatterFeatures(mesh.along("hidden"), (role.parts,)), in_first), None


def _bias_rows(plan: KeyValuePlan, head_dim: int) -> torch.Tensor:
    heads = torch.tensor([plan.first + head for head in plan.keep])
    return (heads[:, None] * head_dim + torch.arange(head_dim)).flatten()


def _fuse_projections(model: PreTrainedModel, parallel_plan: ParallelPlan) -> None:
    """Fuse each block's "up" projections, so that the sequence is gathered once for all of them; the head alike."""
    key_value_projections: dict[str, list[ShardedLinear]] = {}
    latents: dict[str, list[ShardedLinear]] = {}
    up_projections: dict[str, list[ShardedLinear]] = {}
    down_projections: dict[str, list[ShardedLinear]] = {}
    for name, role in parallel_plan.roles.items():
        if role.alone or role.kind not in ("latent", "up", "down", "head"):
            continue
        linear, place = model.get_submodule(name), name if role.kind == "head" else name.rpartition(".")[0]
        assert isinstance(linear, ShardedLinear)
        if role.kind == "latent":
            latents.setdefault(place, []).append(linear)
        else:
            (down_projections if role.kind == "down" else up_projections).setdefault(place, []).append(linear)
            if role.heads == "key_value":
                key_value_projections.setdefault(place, []).append(linear)
    mixtures = {name.rpartition(".")[0] for name, role in parallel_plan.roles.items() if role.experts is not None}
    for place, projections in latents.items():
        queries = up_projections.pop(place, [])
        fused = FusedProjections(queries, down_projections.get(place, [])) if queries else None
        hook = LatentProjections(projections, fused)
        model.get_submodule(place).register_forward_pre_hook(hook, with_kwargs=True)
    for place, projections in up_projections.items():
        block, down = model.get_submodule(place), down_projections.get(place, [])
        # Cross-attention has queries of another sequence than its keys.
        parameters = inspect.signature(block.forward).parameters
        source = next((name for name in _SOURCES if name in parameters), None)
        keys_and_values = key_value_projections.get(place, [])
        queries = [projection for projection in projections if projection not in keys_and_values]
        if source is not None and keys_and_values and queries:
            cross = CrossProjections(queries, keys_and_values, down, source)
            block.register_forward_pre_hook(cross, with_kwargs=True)
            continue
        block_hook = FusedProjections(projections, down)
        block.register_forward_pre_hook(block_hook, with_kwargs=True)
        if place.rpartition(".")[0] in mixtures:
            block.register_forward_hook(block_hook.restore)


def _set_local_sizes(model: PreTrainedModel, parallel_plan: ParallelPlan, mesh: Mesh) -> None:
    """Set numbers of heads and features to this rank's in attention modules, routers and the blocks around these, since
    some of them read these in forward.
    """
    heads, ranks, attention = parallel_plan.heads, mesh.size("sequence", "hidden"), attention_modules(parallel_plan)
    for name in attention:
        # In here, because without attention heads needn't divide.
        plan = plan_key_value_heads(heads, mesh.shape, mesh.coordinate)
        module = model.get_submodule(name)
        for names, count, local_count in (
            (_QUERY_HEADS, heads.query, heads.query // ranks),
            (_KEY_VALUE_HEADS, heads.key_value, len(plan.keep)),
            (_FEATURES, heads.query * heads.dim, heads.query * heads.dim // ranks),
        ):
            for attribute in names:
                if getattr(module, attribute, None) == count:
                    setattr(module, attribute, local_count)
        if hasattr(module, "num_key_value_groups"):
            module.num_key_value_groups = plan.groups
    layers = layer_names(model)
    for name, role in parallel_plan.roles.items():
        while role.kind == "router" and name and name not in layers:
            module = model.get_submodule(name)
            for attribute in _WIDTHS:
                if getattr(module, attribute, None) == role.width:
                    setattr(module, attribute, role.width // mesh.size("hidden"))
            name = name.rpartition(".")[0]


def attention_modules(parallel_plan: ParallelPlan) -> list[str]:
    """Names of the modules that compute attention: the parents of the query projections."""
    kinds = ("up", "from latent")
    projections = {name: role.heads for name, role in parallel_plan.roles.items() if role.kind in kinds}
    with_queries = (name for name, heads in projections.items() if heads in ("query", "query_key_value"))
    return [name.rpartition(".")[0] for name in with_queries]


def whole_blocks(parallel_plan: ParallelPlan) -> list[str]:
    """Names of the blocks that every rank of sequence × hidden computes whole."""
    return [name for name, role in parallel_plan.roles.items() if role.kind == "whole"]


def _split_late(model: PreTrainedModel, late: LateSplit) -> None:
    """Register hooks that split activations before the first layer and, if they rejoin, gather them after the last."""
    head = output_embeddings(model)
    for embedding in token_embeddings(model):
        embedding.register_forward_hook(late.begin)
    layers = layer_names(model)
    for name in layers:
        layer = model.get_submodule(name)
        layer.register_forward_pre_hook(late.enter, with_kwargs=True)
        group, _, number = name.rpartition(".")
        if late.rejoins and f"{group}.{int(number) + 1}" not in layers:
            layer.register_forward_hook(late.leave)
    if not late.rejoins:
        return
    if model.base_model is not model:
        model.base_model.register_forward_hook(late.end)
    if head is not None:
        head.register_forward_pre_hook(late.enter, with_kwargs=True, prepend=True)


def _split_images(model: PreTrainedModel, images: ImageSplit) -> None:
    """Register hooks that split activations before each list of layers and gather them after it."""
    layers = layer_names(model)
    for name in layers:
        group, _, number = name.rpartition(".")
        if number == "0":
            model.get_submodule(name).register_forward_pre_hook(images.enter, with_kwargs=True)
        if f"{group}.{int(number) + 1}" not in layers:
            model.get_submodule(name).register_forward_hook(images.leave)
