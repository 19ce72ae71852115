"""Describe a model of any architecture by its modules."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from cuboid.errors import UnsupportedModelError
from cuboid.models.architectures.attention_heads import HeadCounts
from cuboid.models.architectures.certificate import MeshVerdict
from cuboid.models.architectures.roles import Role, find_roles, takes_pixels, tower_names
from cuboid.models.batch.length_cases import longest_sequence
from cuboid.models.sharded.parallel_plan import out_features
from cuboid.models.sharded.sharded_model import learned_positions
from cuboid.models.stages.model_costs import decoder_layers, expert_counts, sizes_of
from cuboid.planner.description.limits import LayoutLimits, Stages
from cuboid.planner.description.model import Attention, Experts, Layer, ModelDescription, Projection
from cuboid.planner.description.trunk import Factors, Trunk
from cuboid.seq1f1b.schedule.unit_costs import LayerSizes
from cuboid.tensor3d.experts.sharded_experts import ExpertForm

#: The verdict without a self-test: everything that has a rule is split.
_SPLIT = MeshVerdict()
#: Keys of models' configs for dropout probabilities, and for the name of the nonlinearity.
_DROPOUTS = ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop")
_NONLINEARITIES = ("hidden_act", "activation_function", "hidden_activation")
#: Number of weights of hidden × inner elements in an MLP with a gate.
_MLP_WEIGHTS = 3


def describe_modules(
    model: PreTrainedModel,
    verdict: MeshVerdict = _SPLIT,
    stages: Stages | None = None,
    trunk: Trunk | None = None,
) -> ModelDescription:
    """Describe a full model. The description doesn't keep it.

    Products and parameters are exact. All weights of a layer that aren't sharded over a mesh count as one product, with
    the hidden size as inputs.

    Args:
        model: on any device, meta included.
        verdict: of the architecture's certification on meshes; by default all that has a rule is split.
        stages: how it can be cut into stages, if known.
        trunk: how it is trained if it is frozen itself.

    Raises:
        UnsupportedModelError: its layers or the number of experts of a token can't be found, it takes images, or its
            linear layers can't be in 4 bits.
        ConfigError: its adapters can't be counted.
    """
    if takes_pixels(model) or tower_names(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} is given images, and the planner counts the work of tokens; give the axes of the "
            'mesh in place of "mesh": "auto"'
        )
    config = model.config.get_text_config()
    for name in ("hidden_size", "vocab_size"):
        if not isinstance(getattr(config, name, None), int):
            raise UnsupportedModelError(
                f"{type(model).__name__} has no {name} in its config, so the planner can't describe it; name the axes "
                "of the mesh yourself"
            )
    sizes, roles = sizes_of(model), _roles(model, verdict.whole_blocks)
    modules = {name: (model.get_submodule(name), role) for name, role in roles.items()}
    learned = sum(role.kind == "embedding" for role in roles.values()) > 1
    counts = HeadCounts.of(config)
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        counts = replace(counts, key_value=1)  # Falcon's config has the number of query heads here.
    # Whole norms in attention are of each head, or of latents; split ones in it are over all heads.
    kinds = {role.kind for role in roles.values()}
    head_norms = "gathered" in kinds and "latent" not in kinds
    head_norms |= any(role.kind == "norm" and role.heads is not None for role in roles.values())
    # One of each class stands for those of all layers.
    routers = {type(module): module for module, role in modules.values() if role.kind == "router"}.values()
    kept_by = {type(router).__name__: _router_kept(router, config.hidden_size) for router in routers}
    router_kept = max((kept for kept in kept_by.values() if kept is not None), default=0)
    factors = _FactorsOf(model, trunk)
    layers, owned = [], set[int]()
    for (name, layer), layer_sizes in zip(decoder_layers(model).items(), sizes.layers, strict=True):
        # Layers may share weights: the first of them has them.
        parameters = sum(parameter.numel() for parameter in layer.parameters() if id(parameter) not in owned)
        owned.update(map(id, layer.parameters()))
        layers.append(
            _layer(
                parameters, layer_sizes, _inside(modules, name), counts, config, learned=learned, head_norms=head_norms,
                router_kept=router_kept, factors=factors.inside(name),
            )
        )  # fmt: skip
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    positions = learned_positions(model) or 0
    description = ModelDescription(
        name=config.model_type,
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        layers=tuple(layers),
        sizes=replace(sizes, is_frozen=trunk is not None),
        # What is behind a base model may be several matrices.
        outputs=sizes.head // config.hidden_size if head is None else head.weight.shape[0],
        embedding_parameters=embedding.weight.numel() + positions * config.hidden_size,
        head_weights=sizes.head,
        tied=head is not None and head.weight is embedding.weight,
        norm="layer" if any(role.norm is not None and role.norm.kind == "layer" for role in roles.values()) else "rms",
        nonlinearity=_kept_by_nonlinearity(config, gated=layers[0].gated),
        positions=positions,
        most_positions=longest_sequence(model.config),
        uncounted=_uncounted(config, layers, roles.values()),
        uncounted_by_formulas=_uncounted_routers([name for name, kept in kept_by.items() if kept is None]),
        config=model.config,
        limits=LayoutLimits.of(model, verdict, stages, four_bits=trunk is not None and trunk.four_bits),
        verdict=verdict,
        trunk=trunk,
        extra_factors=factors.outside,
    )
    more = sum(parameter.numel() for parameter in model.parameters()) - description.parameters
    return replace(description, extra_parameters=more)


def _uncounted(config: PretrainedConfig, layers: Sequence[Layer], roles: Collection[Role]) -> str:
    parts = []
    if getattr(config, "attn_logit_softcapping", None):
        parts.append("the time that attention with a soft cap takes for scores that are written whole")
    if any(layer.attention.query == 0 for layer in layers):
        parts.append("the time of recurrent states and convolutions of layers without attention")
    if any(role.kind == "norm" and role.heads is not None for role in roles):
        parts.append("the sums that norms over all heads exchange")
    if any(projection.kind == "whole" for layer in layers for projection in layer.projections):
        parts.append("what ranks of a mesh exchange around blocks that each of them computes whole")
    return "; ".join(parts)


def _uncounted_routers(names: Sequence[str]) -> str:
    if not names:
        return ""
    return f"what {', '.join(names)} saves in another precision, which can't be run without values"


def check_countable(model: PreTrainedModel) -> None:
    """Check that there are formulas for what a model saves for backward.

    Raises:
        UnsupportedModelError: it has experts or latents, or saves attention scores or dropout masks, of which there is
            no formula.
    """
    for role in _roles(model, ()).values():
        if role.experts is not None or role.kind == "latent":
            raise UnsupportedModelError(
                f"{type(model).__name__} has {'experts' if role.experts else 'latents'}, which the count of kept "
                "activations has no rule for"
            )
    if model.config._attn_implementation == "eager":
        raise UnsupportedModelError(
            'attn_implementation "eager" keeps scores of every pair of positions, which the count of kept activations '
            'has no rule for; use "sdpa"'
        )
    dropouts = [name for name in _DROPOUTS if getattr(model.config, name, 0)]
    if dropouts and model.training:
        raise UnsupportedModelError(
            f"{dropouts[0]} is {getattr(model.config, dropouts[0])}: the count of kept activations has no rule for "
            "dropout, whose masks are kept too; set it to 0"
        )


_Modules = Mapping[str, tuple[nn.Module, Role]]


def _roles(model: PreTrainedModel, whole_blocks: Collection[str]) -> dict[str, Role]:
    try:
        return find_roles(model, whole_blocks)
    except UnsupportedModelError:
        # Models that can't be sharded can still be cut into stages of one rank each, which need no roles.
        return {}


def _inside(modules: _Modules, layer: str) -> list[tuple[nn.Module, Role]]:
    return [entry for name, entry in modules.items() if name.startswith(f"{layer}.")]


class _FactorsOf:
    """The factors of a model's adapters, which are handed out layer by layer."""

    def __init__(self, model: PreTrainedModel, trunk: Trunk | None) -> None:
        self._by_name = {} if trunk is None else dict(trunk.adapters.factors_of(model))
        self._model = model

    def inside(self, layer: str) -> dict[int, Factors]:
        """Those in a layer, by the ids of the modules that they are for."""
        names = [name for name in self._by_name if name.startswith(f"{layer}.")]
        return {id(self._model.get_submodule(name)): self._by_name.pop(name) for name in names}

    @property
    def outside(self) -> int:
        """Elements of those that no layer has taken."""
        return sum(factors.parameters for factors in self._by_name.values())


def _taken(factors: dict[int, Factors], modules: Iterable[nn.Module]) -> Factors | None:
    """The sum of the factors of some modules, which are removed from ``factors``."""
    taken = [factors.pop(id(module)) for module in modules if id(module) in factors]
    return functools.reduce(operator.add, taken) if taken else None


def _layer(
    parameters: int,
    sizes: LayerSizes,
    modules: list[tuple[nn.Module, Role]],
    counts: HeadCounts,
    config: PretrainedConfig,
    *,
    learned: bool,
    head_norms: bool,
    router_kept: int,
    factors: dict[int, Factors],
) -> Layer:
    heads = [(module, role) for module, role in modules if role.kind == "up" and role.heads is not None]
    ups = [(module, role) for module, role in modules if role.kind == "up" and role.heads is None]
    downs = [module for module, role in modules if role.kind == "down"]
    gated = sum(role.parts for _, role in ups) == 2
    cut = [_joined("qkv", heads, factors)] if heads and downs else []
    cut += [
        Projection(
            role.kind, _in_features(module), out_features(module), role.kind, _has_bias(module),
            _taken(factors, [module]),
        )
        for module, role in modules
        if role.kind in ("latent", "from latent")
    ]  # fmt: skip
    cut += [_projection("o", downs.pop(0), factors)] if cut and downs else []
    cut += [_joined("gate_up" if gated else "up", ups, factors)] if ups else []
    cut += [_projection("down", module, factors) for module in downs]
    mixtures = (
        _experts(module, role.experts, config, router_kept, factors) for module, role in modules if role.experts
    )
    experts = next(mixtures, None)
    routers = [module for module, role in modules if role.kind == "router"]
    rows = [
        (parameter.shape[0], router) for router in routers for parameter in router.parameters() if parameter.dim() == 2
    ]
    hidden: int = config.hidden_size
    cut += [
        Projection("router", hidden, outputs, "router", factors=_taken(factors, [router])) for outputs, router in rows
    ]
    of_experts = (
        0 if experts is None else experts.per_token * sum(projection.weights for projection in experts.projections)
    )
    rest = max(0, sizes.weights - sum(projection.weights for projection in cut) - of_experts) // hidden
    if rest:
        of_whole = functools.reduce(operator.add, factors.values()) if factors else None
        cut.append(Projection("whole", hidden, rest, "whole", factors=of_whole))
    if experts is not None:
        parameters -= experts.parameters
    attention = Attention(
        counts.query,
        # Latents become keys and values of every query head.
        counts.query if any(role.kind == "latent" for _, role in modules) else counts.key_value,
        sizes.query // counts.query,
        sizes.value // counts.query,
        window=sizes.window,
        rotary=0 if learned else counts.dim,
        head_norms=head_norms,
    )
    return Layer(
        attention,
        tuple(cut),
        others=parameters - sum(projection.parameters for projection in cut),
        intermediate=_intermediate(ups, 0 if experts else max(1, rest // _MLP_WEIGHTS)),
        gated=gated or not ups,
        experts=experts,
    )


def _intermediate(ups: list[tuple[nn.Module, Role]], otherwise: int) -> int:
    return out_features(ups[0][0]) // ups[0][1].parts if ups else otherwise


def _experts(
    module: nn.Module, form: ExpertForm, config: PretrainedConfig, router_kept: int, factors: dict[int, Factors]
) -> Experts:
    count, *shape = module.get_parameter(form.down).shape
    outputs, inputs = (shape[1], shape[0]) if form.in_first else (shape[0], shape[1])
    up = Projection("gate_up", outputs, (2 if form.gated else 1) * inputs, "up", form.up_bias is not None)
    down = Projection("down", inputs, outputs, "down", form.down_bias is not None)
    per_token, _ = expert_counts(config, form.down)
    return Experts(count, per_token, (up, down), router_kept, _taken(factors, [module]))


def _router_kept(router: nn.Module, hidden: int) -> int | None:
    """Bytes of a token's copy in another precision that a router saves; None if it can't be run without values."""
    copied = copy.deepcopy(router).to(device="meta", dtype=torch.bfloat16)
    tokens = torch.empty((2, hidden), device="meta", dtype=torch.bfloat16, requires_grad=True)
    kept: dict[torch.dtype, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.numel() == tokens.numel() and x.dtype != tokens.dtype:
            kept[x.dtype] = hidden * x.element_size()
        return x

    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            copied(tokens)
    except (RuntimeError, TypeError, ValueError, IndexError):
        # It takes something else, or needs values.
        return None
    return sum(kept.values())


def _joined(name: str, modules: list[tuple[nn.Module, Role]], factors: dict[int, Factors]) -> Projection:
    """One projection for modules that share their input."""
    first = modules[0][0]
    outputs = sum(out_features(module) for module, _ in modules)
    taken = _taken(factors, [module for module, _ in modules])
    return Projection(name, _in_features(first), outputs, "up", _has_bias(first), taken)


def _projection(name: str, module: nn.Module, factors: dict[int, Factors]) -> Projection:
    return Projection(
        name, _in_features(module), out_features(module), "down", _has_bias(module), _taken(factors, [module])
    )


def _in_features(module: Any) -> int:
    return module.weight.shape[0] if isinstance(module, Conv1D) else module.in_features  # type: ignore[no-any-return]


def _has_bias(module: Any) -> bool:
    return module.bias is not None


def _kept_by_nonlinearity(config: Any, *, gated: bool) -> int:
    """Number of tensors that the MLP saves between its projections, found by running the nonlinearity."""
    name = next((value for key in _NONLINEARITIES if (value := getattr(config, key, None)) is not None), "silu")
    features, up = (torch.ones(8, device="cpu", requires_grad=True).clone() for _ in range(2))
    kept: set[int] = set()
    alive = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.numel() == features.numel():
            # Kept alive, so that no other tensor is allocated at its address.
            alive.append(x.detach())
            kept.add(_address(x))
        return x

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result: Any = ACT2FN[name if name in ACT2FN else "silu"](features)
        result = result * up if gated else result
    # Without the result, which counts as the input of "down".
    return len(kept - {_address(result)})


def _address(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()
