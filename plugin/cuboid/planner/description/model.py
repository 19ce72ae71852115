"""A model as the planner sees it: what each layer multiplies, attends to and keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from transformers import PretrainedConfig

from cuboid.distributed.axis_collectives import padded_length
from cuboid.models.architectures.certificate import MeshVerdict
from cuboid.planner.description.limits import LayoutLimits
from cuboid.planner.description.trunk import QUANTIZED_BYTES, Factors, Trunk
from cuboid.seq1f1b.schedule.unit_costs import ModelSizes, seen_keys


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
        factors: of its adapters, if it has any.
    """

    name: str
    inputs: int
    outputs: int
    kind: Literal["up", "down", "router", "latent", "from latent", "whole"]
    bias: bool = False
    factors: Factors | None = None

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
        factors: of the adapters of their weights, if these have any.
    """

    count: int
    per_token: int
    projections: tuple[Projection, ...]
    router_kept: int = 0
    factors: Factors | None = None

    @property
    def parameters(self) -> int:
        """Elements of all experts."""
        return self.count * sum(projection.parameters for projection in self.projections)

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
        head_norms: whether queries and keys have norms, over each head or over all.
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
        others: elements of all other parameters, such as norms; less than 0 if its weights are an earlier layer's.
        intermediate: features inside the MLP that each token passes; with experts, of the shared ones.
        gated: whether the MLP has a gate.
        experts: of the layer, if it has any.
    """

    attention: Attention
    projections: tuple[Projection, ...]
    others: int
    intermediate: int
    gated: bool
    experts: Experts | None = None

    @cached_property
    def dense_parameters(self) -> int:
        """Elements of everything but the experts."""
        return sum(projection.parameters for projection in self.projections) + self.others

    @cached_property
    def parameters(self) -> int:
        """Elements of everything."""
        return self.dense_parameters + (self.experts.parameters if self.experts else 0)

    @property
    def _factors(self) -> Iterator[Factors]:
        holders = (*self.projections, *((self.experts,) if self.experts else ()))
        return (holder.factors for holder in holders if holder.factors is not None)

    @cached_property
    def factor_parameters(self) -> int:
        """Elements of all adapters' factors."""
        return sum(factors.parameters for factors in self._factors)

    @cached_property
    def updates(self) -> int:
        """Number of weights with adapters."""
        return sum(factors.updates for factors in self._factors)

    @cached_property
    def quantized(self) -> int:
        """Elements that may be in 4 bits: weights of the linear layers that each token passes."""
        return sum(projection.weights for projection in self.projections if projection.kind != "router")

    @cached_property
    def weights_of_token(self) -> int:
        """Elements of the weights that one token is multiplied by."""
        weights = sum(projection.weights for projection in self.projections)
        if self.experts is None:
            return weights
        return weights + self.experts.per_token * sum(projection.weights for projection in self.experts.projections)

    @cached_property
    def latents(self) -> tuple[Projection, ...]:
        """The projections to latents of MLA."""
        return tuple(projection for projection in self.projections if projection.kind == "latent")

    @cached_property
    def from_latents(self) -> tuple[Projection, ...]:
        """The projections of heads from latents. Each has a norm before it."""
        return tuple(projection for projection in self.projections if projection.kind == "from latent")

    @cached_property
    def splits_heads(self) -> bool:
        """Whether a mesh splits attention's heads; else every rank computes attention whole, if the layer has any."""
        return bool(self.from_latents) or any(projection.name == "qkv" for projection in self.projections)

    @cached_property
    def gathers_attention_input(self) -> bool:
        """Whether any of attention's projections needs the hidden states of the whole sequence, not only latents."""
        return not self.latents or any(projection.name == "qkv" for projection in self.projections)


# Hashed by identity, as a key of caches.
@dataclass(frozen=True, eq=False)
class ModelDescription:
    """A model.

    Args:
        name: the config's ``model_type``.
        hidden: H, the residual stream.
        vocabulary: V.
        layers: in order.
        sizes: by which segments and stages are balanced, as training balances them.
        outputs: features of the head: the vocabulary for a language model, 0 for a model without a head.
        embedding_parameters: elements of the token and position embeddings.
        head_weights: elements of what a token is multiplied by behind the layers.
        config: its config.
        limits: the layouts that training accepts.
        verdict: how a mesh splits it.
        tied: whether the head is the embedding.
        norm: kind of the norms.
        nonlinearity: tensors of the MLP's inner size that are kept for backward between its projections, by Hugging
            Face's own modules.
        positions: number of learned position embeddings; 0 for none.
        most_positions: the longest sequence that the config allows; None if it doesn't say.
        extra_parameters: elements of modules outside the layers besides embedding, positions and head.
        uncounted: work of its layers that time estimates leave out, in words; "" if none.
        uncounted_by_formulas: what formulas for kept bytes leave out, in words; "" if nothing.
        trunk: how it is trained if it is frozen itself; None if all of it is trained.
        extra_factors: elements of adapters' factors outside the layers.
    """

    name: str
    hidden: int
    vocabulary: int
    layers: tuple[Layer, ...]
    sizes: ModelSizes
    outputs: int
    embedding_parameters: int
    head_weights: int
    config: PretrainedConfig
    limits: LayoutLimits
    verdict: MeshVerdict
    tied: bool = False
    norm: Literal["rms", "layer"] = "rms"
    nonlinearity: int = 3
    positions: int = 0
    most_positions: int | None = None
    extra_parameters: int = 0
    uncounted: str = ""
    uncounted_by_formulas: str = ""
    trunk: Trunk | None = None
    extra_factors: int = 0

    @property
    def head_parameters(self) -> int:
        """Elements of the head's own weight: none if it is the embedding's."""
        return 0 if self.tied else self.head_weights

    @cached_property
    def parameters(self) -> int:
        """Elements of the whole model."""
        ends = self.embedding_parameters + self.head_parameters + self.extra_parameters
        return sum(layer.parameters for layer in self.layers) + ends

    @cached_property
    def trained_parameters(self) -> int:
        """Elements that are trained."""
        if not self.is_frozen:
            return self.parameters
        return sum(layer.factor_parameters for layer in self.layers) + self.extra_factors

    @property
    def is_frozen(self) -> bool:
        """Whether adapters are all that is trained, so that the model's own weights have no gradients."""
        return self.trunk is not None

    @property
    def four_bits(self) -> bool:
        """Whether the layers' linear layers are in 4 bits."""
        return self.trunk is not None and self.trunk.four_bits

    def spared_bytes(self, elements: float) -> float:
        """Bytes that so many elements which may be in 4 bits take less than in 16."""
        return elements * (2 - QUANTIZED_BYTES) if self.four_bits else 0.0

    @cached_property
    def active_parameters(self) -> int:
        """Elements that one token is multiplied by, the head included."""
        return sum(layer.weights_of_token for layer in self.layers) + self.head_weights

    @cached_property
    def _factors_of_token(self) -> int:
        """Elements of the factors of linear layers, that one token is multiplied by."""
        of_linear = (projection.factors for layer in self.layers for projection in layer.projections)
        return sum(factors.parameters for factors in of_linear if factors is not None)

    @cached_property
    def kinds(self) -> tuple[Layer, ...]:
        """The distinct layers, in order of their first use."""
        return tuple(dict.fromkeys(self.layers))

    @cached_property
    def kind_of_layers(self) -> tuple[int, ...]:
        """For each layer its index in :attr:`kinds`."""
        index = {layer: number for number, layer in enumerate(self.kinds)}
        return tuple(index[layer] for layer in self.layers)

    def step_flops(self, rows: int, length: int) -> int:
        """Operations of forward and backward without recomputation, as MFU counts them: causal pairs only."""
        # Of frozen weights there are no gradients.
        frozen = self.active_parameters if self.is_frozen else 0
        from_weights = (6 * self.active_parameters - 2 * frozen + 6 * self._factors_of_token) * rows * length
        pairs = [
            (layer.attention.query + layer.attention.output) * seen_keys(0, length, layer.attention.window)
            for layer in self.layers
        ]
        return from_weights + 3 * 2 * rows * sum(pairs)

    def with_layers(self, count: int) -> ModelDescription:
        """The model with the first ``count`` layers only."""
        sizes = replace(self.sizes, layers=self.sizes.layers[:count])
        return replace(self, layers=self.layers[:count], sizes=sizes)
