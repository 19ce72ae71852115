"""A causal language model by its Hugging Face config alone: what each layer multiplies, attends to and keeps.

Nothing is built, so that a ``config.json`` is enough. A test compares the parameters of every architecture in
:data:`ARCHITECTURES` with those of the real model; others are errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

from cuboid.distributed.axis_collectives import padded_length
from cuboid.errors import UnsupportedModelError
from cuboid.models.batch.length_cases import longest_sequence
from cuboid.seq1f1b.schedule.unit_costs import LayerSizes, ModelSizes, seen_keys


@dataclass(frozen=True)
class Projection:
    """A product of activations and a weight; projections that share their input count as one.

    Args:
        name: "qkv", "o", "gate_up", "down", …, by which formulas look it up.
        inputs, outputs: features of the full weight.
        kind: "up" is cut by outputs over `sequence` and by inputs over `hidden`, "down" the other way round; "router"
            and "latent" (to the latents of MLA) have each rank's own tokens, and are cut by inputs over `hidden`; "from
            latent" is cut by outputs over `sequence` × `hidden`; "whole" is the same on all ranks of the mesh.
        bias: whether it has one.
        parts: number of weights that it is in a checkpoint.
    """

    name: str
    inputs: int
    outputs: int
    kind: Literal["up", "down", "router", "latent", "from latent", "whole"]
    bias: bool = False
    parts: int = 1

    @property
    def weights(self) -> int:
        """Elements of the weight, without the bias."""
        return self.inputs * self.outputs

    @property
    def parameters(self) -> int:
        """Elements of weight and bias."""
        return self.weights + (self.outputs if self.bias else 0)


@dataclass(frozen=True)
class Experts:
    """Experts of one layer.

    Args:
        count: number of experts to which tokens are routed.
        per_token: number of these for each token.
        projections: the projections of one expert.
        router_kept: bytes of a token's copy in another precision that the router saves.
    """

    count: int
    per_token: int
    projections: tuple[Projection, ...]
    router_kept: int = 0

    @property
    def parameters(self) -> int:
        """Elements of all experts."""
        return self.count * sum(each.parameters for each in self.projections)

    @property
    def width(self) -> int:
        """Features inside one expert."""
        return self.projections[-1].inputs

    def padded(self, batch: int) -> int:
        """Elements of all experts, padded so that each rank of `batch` has the same number of whole experts."""
        return padded_length(self.count, batch) * self.parameters // self.count


@dataclass(frozen=True)
class Attention:
    """Attention between its projections.

    Args:
        heads: query heads.
        key_value_heads: key (or value) heads that are computed.
        query_dim: features of a head of the queries and keys.
        value_dim: features of a head of the values.
        window: keys that a token sees at most; None for all before it.
        rotary: features of a head that are rotated; 0 for none.
        head_norms: whether queries and keys have norms over each head.
    """

    heads: int
    key_value_heads: int
    query_dim: int
    value_dim: int
    window: int | None = None
    rotary: int = 0
    head_norms: bool = False

    @property
    def query(self) -> int:
        """Features of all query heads."""
        return self.heads * self.query_dim

    @property
    def key(self) -> int:
        """Features of all key heads."""
        return self.key_value_heads * self.query_dim

    @property
    def value(self) -> int:
        """Features of all value heads."""
        return self.key_value_heads * self.value_dim

    @property
    def output(self) -> int:
        """Features of what attention returns."""
        return self.heads * self.value_dim


@dataclass(frozen=True)
class Layer:
    """One decoder layer.

    Args:
        attention: between its projections.
        projections: those that each token passes, in order.
        norms: elements of all norms' weights and biases.
        intermediate: features inside the MLP that each token passes; with experts, of the shared ones.
        gated: whether the MLP has a gate.
        experts: of the layer, if it has any.
    """

    attention: Attention
    projections: tuple[Projection, ...]
    norms: int
    intermediate: int
    gated: bool
    experts: Experts | None = None

    @cached_property
    def dense_parameters(self) -> int:
        """Elements of everything but the experts."""
        return sum(each.parameters for each in self.projections) + self.norms

    @cached_property
    def parameters(self) -> int:
        """Elements of everything."""
        return self.dense_parameters + (self.experts.parameters if self.experts else 0)

    @cached_property
    def weights_of_token(self) -> int:
        """Elements of the weights that one token is multiplied by."""
        own = sum(each.weights for each in self.projections)
        if self.experts is None:
            return own
        return own + self.experts.per_token * sum(each.weights for each in self.experts.projections)

    @cached_property
    def latents(self) -> tuple[Projection, ...]:
        """The projections to latents of MLA."""
        return tuple(each for each in self.projections if each.kind == "latent")

    @cached_property
    def from_latents(self) -> tuple[Projection, ...]:
        """The projections of heads from latents. Each has a norm before it."""
        return tuple(each for each in self.projections if each.kind == "from latent")

    @cached_property
    def gathers_attention_input(self) -> bool:
        """Whether any of attention's projections needs the hidden states of the whole sequence, not only latents."""
        return not self.latents or any(each.name == "qkv" for each in self.projections)

    @property
    def kept_features(self) -> int:
        """Features that schedules count as saved by a token: inputs and outputs of each weight of a checkpoint."""
        own = sum(each.parts * each.inputs + each.outputs for each in self.projections)
        if self.experts is None:
            return own
        # Experts' weights are stacked in a checkpoint, with those that share their input in one.
        return own + self.experts.per_token * sum(each.inputs + each.outputs for each in self.experts.projections)


# Hashed by identity, as a key of caches: the config may be a dict.
@dataclass(frozen=True, eq=False)
class ModelDescription:
    """A causal language model.

    Args:
        name: the config's ``model_type``.
        hidden: H, the residual stream.
        vocabulary: V.
        layers: in order.
        tied: whether the head is the embedding.
        norm: kind of the norms.
        nonlinearity: tensors of the MLP's inner size that are kept for backward between its projections, by Hugging
            Face's own modules.
        positions: number of learned position embeddings; 0 for none.
        most_positions: the longest sequence that the config allows; None if it doesn't say.
        extra_parameters: elements of modules outside the layers besides embedding, positions and head.
        uncounted: work of its layers that time estimates leave out, in words; "" if none.
        config: the config that it was read from, of transformers or the mapping in a ``config.json``; None if there is
            none.
    """

    name: str
    hidden: int
    vocabulary: int
    layers: tuple[Layer, ...]
    tied: bool = False
    norm: Literal["rms", "layer"] = "rms"
    nonlinearity: int = 3
    positions: int = 0
    most_positions: int | None = None
    extra_parameters: int = 0
    uncounted: str = ""
    config: Any = None

    @property
    def embedding_parameters(self) -> int:
        """Elements of the token and position embeddings."""
        return (self.vocabulary + self.positions) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Elements of the head's own weight: none if it is the embedding's."""
        return 0 if self.tied else self.vocabulary * self.hidden

    @cached_property
    def parameters(self) -> int:
        """Elements of the whole model."""
        ends = self.embedding_parameters + self.head_parameters + self.extra_parameters
        return sum(layer.parameters for layer in self.layers) + ends

    @cached_property
    def active_parameters(self) -> int:
        """Elements that one token is multiplied by, the head included."""
        return sum(layer.weights_of_token for layer in self.layers) + self.vocabulary * self.hidden

    @cached_property
    def kinds(self) -> tuple[Layer, ...]:
        """The distinct layers, in order of their first use."""
        return tuple(dict.fromkeys(self.layers))

    @cached_property
    def kind_of_layers(self) -> tuple[int, ...]:
        """For each layer its index in :attr:`kinds`."""
        index = {layer: number for number, layer in enumerate(self.kinds)}
        return tuple(index[layer] for layer in self.layers)

    @cached_property
    def sizes(self) -> ModelSizes:
        """The sizes by which segments and stages are balanced."""
        layers = [
            LayerSizes(
                each.weights_of_token, each.attention.query, each.attention.output, each.attention.window,
                each.kept_features,
            )
            for each in self.layers
        ]  # fmt: skip
        return ModelSizes(tuple(layers), self.vocabulary * self.hidden)

    def step_flops(self, rows: int, length: int) -> int:
        """Operations of forward and backward without recomputation, as MFU counts them: causal pairs only."""
        from_weights = 6 * self.active_parameters * rows * length
        pairs = [
            (layer.attention.query + layer.attention.output) * seen_keys(0, length, layer.attention.window)
            for layer in self.layers
        ]
        return from_weights + 3 * 2 * rows * sum(pairs)

    def with_layers(self, count: int) -> ModelDescription:
        """The model with the first ``count`` layers only."""
        return replace(self, layers=self.layers[:count])


def describe(config: Any) -> ModelDescription:
    """Describe the model of a config.

    Args:
        config: a config of transformers, or the mapping in a ``config.json``.

    Raises:
        UnsupportedModelError: the architecture isn't in :data:`ARCHITECTURES`, or the config lacks a needed size.
    """
    given = _Config(config)
    rules = ARCHITECTURES.get(given.model_type)
    if rules is None:
        raise UnsupportedModelError(
            f"model_type {given.model_type!r}: the planner doesn't know this architecture's layers; it knows "
            f"{', '.join(sorted(ARCHITECTURES))}"
        )
    found = _mla_model(given, rules) if rules.latent_attention else _ordinary_model(given, rules)
    return replace(found, config=config)


@dataclass(frozen=True)
class Rules:
    """Properties of an architecture that its config doesn't contain.

    Args:
        query_key_value_bias, output_bias, mlp_bias: whether these projections have biases, or the config's key for it.
        norms_of_layer: norms of the hidden size in a layer.
        head_norms: norms over each head of queries and keys; "whole" if over all heads together.
        gated: whether the MLP has a gate.
        learned_positions: whether positions are learned embeddings, as in GPT-2.
        norm: kind of the norms.
        tied: whether the head is the embedding if the config doesn't set it.
        windowed: whether ``sliding_window`` applies to all layers of a config without ``layer_types``.
        latent_attention: whether attention is multi-latent (MLA), as in DeepSeek's models.
    """

    query_key_value_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    norms_of_layer: int = 2
    head_norms: bool | Literal["whole"] = False
    gated: bool = True
    learned_positions: bool = False
    norm: Literal["rms", "layer"] = "rms"
    tied: bool = False
    windowed: bool = False
    latent_attention: bool = False


_LLAMA = Rules(query_key_value_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias")
_QWEN3 = replace(_LLAMA, mlp_bias=False, head_norms=True)
_GPT = Rules(True, True, True, gated=False, learned_positions=True, norm="layer", tied=True)

#: By ``model_type``; each of them is compared with the real model in tests/commands/test_planner.py.
ARCHITECTURES: Mapping[str, Rules] = MappingProxyType(
    {
        "llama": _LLAMA,
        "mistral": Rules(windowed=True),
        "qwen2": Rules(query_key_value_bias=True),
        "qwen3": _QWEN3,
        "gemma": replace(_LLAMA, mlp_bias=False, tied=True),
        "gemma2": replace(_LLAMA, mlp_bias=False, tied=True, norms_of_layer=4),
        "phi3": Rules(windowed=True),
        "olmo2": replace(_LLAMA, mlp_bias=False, head_norms="whole"),
        "granite": _LLAMA,
        "gpt2": _GPT,
        "mixtral": Rules(windowed=True),
        "qwen3_moe": _QWEN3,
        "deepseek_v2": Rules(latent_attention=True),
        "deepseek_v3": Rules(latent_attention=True),
    }
)

#: Tensors of the MLP's inner size that Hugging Face's modules save, by the nonlinearity's name; a gate adds two.
_KEPT_BY_NONLINEARITY: Mapping[str, int] = MappingProxyType(
    {"silu": 1, "swish": 1, "gelu": 1, "gelu_pytorch_tanh": 1, "relu": 0, "gelu_new": 4}
)

#: See :attr:`ModelDescription.uncounted`.
SOFT_CAPPED = "the time that attention with a soft cap takes for scores that are written whole"

_ALIASES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "hidden_size": ("n_embd",),
        "num_hidden_layers": ("n_layer",),
        "num_attention_heads": ("n_head",),
        "intermediate_size": ("n_inner",),
        "max_position_embeddings": ("n_positions",),
        "hidden_act": ("activation_function", "hidden_activation"),
        "num_experts": ("num_local_experts", "n_routed_experts"),
    }
)


class _Config:
    """A config's values, each under one name for all architectures."""

    def __init__(self, config: Any) -> None:
        self._config = config
        kind = self.get("model_type")
        if not isinstance(kind, str):
            raise UnsupportedModelError("the config has no model_type, without which its keys mean nothing")
        self.model_type = kind

    def get(self, name: str, default: Any = None) -> Any:
        for each in (name, *_ALIASES.get(name, ())):
            found = self._config.get(each) if isinstance(self._config, Mapping) else getattr(self._config, each, None)
            if found is not None:
                return found
        return default

    @property
    def most_positions(self) -> int | None:
        """The longest allowed sequence: :func:`longest_sequence`, or of a mapping one key."""
        if isinstance(self._config, Mapping):
            return self.get("max_position_embeddings")
        return longest_sequence(self._config)

    def number(self, name: str, default: int | None = None) -> int:
        """A positive count.

        Raises:
            UnsupportedModelError: it is missing and has no default, or isn't a positive integer.
        """
        value = self.get(name, default)
        if value is None:
            raise UnsupportedModelError(f"the config of {self.model_type!r} has no {name}, which its size depends on")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UnsupportedModelError(f"{name} is {value!r} in the config of {self.model_type!r}, not a count")
        return value

    def says(self, rule: bool | str) -> bool:
        """Evaluate a rule: a fixed value, or the name of the config's key for it."""
        return rule if isinstance(rule, bool) else bool(self.get(rule, False))


def _ordinary_model(config: _Config, rules: Rules) -> ModelDescription:
    hidden, count = config.number("hidden_size"), config.number("num_hidden_layers")
    heads = config.number("num_attention_heads")
    attention = Attention(
        heads,
        config.number("num_key_value_heads", heads),
        head_dim := config.number("head_dim", hidden // heads),
        head_dim,
        rotary=0 if rules.learned_positions else head_dim,
        head_norms=rules.head_norms is not False,
    )
    layers = tuple(
        _ordinary_layer(config, rules, hidden, replace(attention, window=_window(config, rules, index)), index)
        for index in range(count)
    )
    positions = config.number("max_position_embeddings") if rules.learned_positions else 0
    vocabulary = config.number("vocab_size")
    return ModelDescription(
        name=config.model_type,
        hidden=hidden,
        vocabulary=vocabulary,
        layers=layers,
        tied=bool(config.get("tie_word_embeddings", rules.tied)),
        norm=rules.norm,
        nonlinearity=_nonlinearity(config, rules),
        positions=positions,
        uncounted=SOFT_CAPPED if config.get("attn_logit_softcapping") else "",
        most_positions=config.most_positions,
        extra_parameters=_norm_size(hidden, rules),
    )


def _ordinary_layer(config: _Config, rules: Rules, hidden: int, attention: Attention, index: int) -> Layer:
    qkv_bias, out_bias, mlp_bias = (
        config.says(rule) for rule in (rules.query_key_value_bias, rules.output_bias, rules.mlp_bias)
    )
    out = attention.query + attention.key + attention.value
    projections = [
        Projection("qkv", hidden, out, "up", qkv_bias, 3),
        Projection("o", attention.output, hidden, "down", out_bias),
    ]
    head_norms = {False: 0, True: 2 * attention.query_dim, "whole": attention.query + attention.key}[rules.head_norms]
    norms = rules.norms_of_layer * _norm_size(hidden, rules) + head_norms
    if _has_experts(config, index):
        inner = config.number("moe_intermediate_size", config.get("intermediate_size"))
        number = config.number("num_experts")
        experts = Experts(number, config.number("num_experts_per_tok"), _mlp(hidden, inner, gated=True))
        router = Projection("router", hidden, number, "router")
        return Layer(attention, (*projections, router), norms, 0, gated=True, experts=experts)
    inner = config.number("intermediate_size", 4 * hidden if rules.learned_positions else None)
    mlp = _mlp(hidden, inner, gated=rules.gated, bias=mlp_bias)
    return Layer(attention, (*projections, *mlp), norms, inner, rules.gated)


def _mlp(hidden: int, inner: int, *, gated: bool, bias: bool = False) -> tuple[Projection, ...]:
    ups = 2 if gated else 1
    return (
        Projection("gate_up" if gated else "up", hidden, ups * inner, "up", bias, ups),
        Projection("down", inner, hidden, "down", bias),
    )


def _norm_size(hidden: int, rules: Rules) -> int:
    return hidden if rules.norm == "rms" else 2 * hidden


def _has_experts(config: _Config, index: int) -> bool:
    if config.model_type == "mixtral":
        return True
    if config.model_type == "qwen3_moe":
        dense = config.get("mlp_only_layers") or []
        return index not in dense and (index + 1) % config.number("decoder_sparse_step", 1) == 0
    return False


def _window(config: _Config, rules: Rules, index: int) -> int | None:
    kinds = config.get("layer_types")
    window = config.get("sliding_window")
    if kinds:
        return window if "sliding" in kinds[index] else None
    if config.model_type == "gemma2":
        return window if index % 2 == 0 else None
    return window if rules.windowed else None


def _nonlinearity(config: _Config, rules: Rules) -> int:
    name = config.get("hidden_act", "gelu_new" if rules.learned_positions else "silu")
    if name not in _KEPT_BY_NONLINEARITY:
        raise UnsupportedModelError(
            f"the config of {config.model_type!r} has the nonlinearity {name!r}, of which the planner doesn't know "
            f"what it keeps; it knows {', '.join(sorted(_KEPT_BY_NONLINEARITY))}"
        )
    # With a gate, the nonlinearity's result and the factor that it is multiplied by are saved too.
    return _KEPT_BY_NONLINEARITY[name] + (2 if rules.gated else 0)


def _mla_model(config: _Config, rules: Rules) -> ModelDescription:
    hidden, count, heads = (config.number(n) for n in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    nope, rope, value = (config.number(n) for n in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    attention = Attention(heads, heads, nope + rope, value, rotary=rope)
    rank, query_rank = config.number("kv_lora_rank"), config.get("q_lora_rank")
    bias = config.says("attention_bias")
    query: tuple[Projection, ...] = (Projection("qkv", hidden, attention.query, "up"),)
    if query_rank:
        query = (
            Projection("q_a", hidden, query_rank, "latent", bias),
            Projection("q_b", query_rank, attention.query, "from latent"),
        )
    own = (
        *query,
        Projection("kv_a", hidden, rank + rope, "latent", bias),
        Projection("kv_b", rank, heads * (nope + value), "from latent"),
        Projection("o", attention.output, hidden, "down", bias),
    )
    norms = 2 * hidden + rank + (query_rank or 0)
    inner = config.number("moe_intermediate_size")
    number = config.number("num_experts")
    shared = inner * config.number("n_shared_experts")
    # The router's correction is a buffer in transformers, not a parameter.
    # The router multiplies in float32.
    experts = Experts(number, config.number("num_experts_per_tok"), _mlp(hidden, inner, gated=True), hidden * 4)
    dense_inner = config.number("intermediate_size")
    dense = Layer(attention, (*own, *_mlp(hidden, dense_inner, gated=True)), norms, dense_inner, gated=True)
    router = Projection("router", hidden, number, "router")
    sparse = Layer(attention, (*own, router, *_mlp(hidden, shared, gated=True)), norms, shared, True, experts)
    first: int = config.get("first_k_dense_replace", 0)
    layers = tuple(dense if index < first else sparse for index in range(count))
    return ModelDescription(
        name=config.model_type,
        hidden=hidden,
        vocabulary=config.number("vocab_size"),
        layers=layers,
        tied=bool(config.get("tie_word_embeddings", rules.tied)),
        nonlinearity=_nonlinearity(config, rules),
        most_positions=config.most_positions,
        extra_parameters=hidden,
    )
