"""PEFT's LoRA layer around a sharded linear layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from peft.tuners import lora
from peft.tuners.lora import LoraConfig
from peft.tuners.lora.layer import LoraVariant
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import nn
from transformers.pytorch_utils import Conv1D

from cuboid.distributed.axis_collectives import all_reduce
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import AXES
from cuboid.errors import UnsupportedModelError
from cuboid.integrations.peft.layers.adapted_layer import AdaptedLayer, RowAdapters, row_adapters
from cuboid.integrations.peft.seeding import is_loading, seeded_for
from cuboid.tensor3d.layers.dropout import ShardedDropout
from cuboid.tensor3d.layers.linear import ShardedLinear
from cuboid.tensor3d.low_rank import FactorA, FactorB, LowRankSplit, Magnitudes
from cuboid.tensor3d.low_rank_inputs import attached_products
from cuboid.tensor3d.sharding.full_params import whole_parameter
from cuboid.tensor3d.sharding.sharding_spec import shard_boxes


class SeededLoraLinear(AdaptedLayer, lora.Linear):
    """As PEFT's own class. In a pipeline, initial values don't depend on which layers a stage has."""

    # To PEFT's "all-linear", layers that have adapters already are those with "Linear" in the name of their class.

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: LoraConfig, **kwargs: Any) -> None:
        # As PEFT does for layers whose class tells.
        config.fan_in_fan_out = isinstance(base_layer, Conv1D)
        if isinstance(base_layer, ShardedLinear):
            config.fan_in_fan_out = base_layer.product.in_first
        super().__init__(base_layer, adapter_name, config, **kwargs)

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        """Add an adapter. See PEFT's ``LoraLayer.update_layer``."""
        with seeded_for(self.get_base_layer()):
            super().update_layer(adapter_name, r, lora_alpha, config, **kwargs)


class LoraOfShards(SeededLoraLinear):
    """Around a linear layer of whose weight a rank has a shard: merging, and the norms of its rows; collective."""

    def keep_magnitudes(self, adapter_name: str, norms: torch.Tensor) -> None:
        """Make a new DoRA adapter's magnitudes ``[O]``, of which this rank keeps its shard."""
        raise NotImplementedError

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add adapters to the weight; collective. See PEFT's ``Linear.merge``.

        Raises:
            UnsupportedModelError: a DoRA adapter isn't the first one, to whose weight its norms belong.
        """
        merged = [*self.merged_adapters, *check_adapters_to_merge(self, adapter_names)]
        late = next((name for name in merged[1:] if name in self.lora_magnitude_vector), None)
        if late is not None:
            raise UnsupportedModelError(
                f"{late!r} is a DoRA adapter and can't be merged after {merged[0]!r}: its norms are those of the "
                "weight without that; merge it first or alone"
            )
        super().merge(safe_merge, adapter_names)

    @torch.no_grad()
    def get_delta_weight(self, adapter: str) -> torch.Tensor:
        """This rank's shard of the adapter's update of the weight; collective."""
        base: Any = self.get_base_layer()
        # Adapters may be merged before anything else has connected the ranks.
        base.mesh.connect()
        factors: Any = self.lora_A[adapter], self.lora_B[adapter]
        a, b = (whole_parameter(factor, "weight") for factor in factors)
        # Not in the weight's dtype: the sum of both is rounded once.
        return self.shard_of_update(a, b, self.scaling[adapter]).to(factors[1].weight.dtype)

    @torch.no_grad()
    def shard_of_update(self, a: Any, b: Any, scaling: float) -> torch.Tensor:
        """The shard of an update of the weight, with whole factors; in float32 at least."""
        base: Any = self.get_base_layer()
        # In 16 bits, the sum over r would be rounded on some devices.
        a, b = (x.float() if x.itemsize < 4 else x for x in (a, b))
        delta = torch.zeros(base.spec("weight").shard_shape(base.mesh.shape), dtype=a.dtype, device=a.device)
        with torch.autocast(a.device.type, enabled=False):
            for here, there in self._boxes():
                out, into = there[::-1] if self.fan_in_fan_out else there
                box = b[out] @ a[:, into]
                delta[here] = box.t() if self.fan_in_fan_out else box
        return delta * scaling

    @torch.no_grad()
    def row_norms(self, update: torch.Tensor) -> torch.Tensor:
        """Norms ``[O]`` of the rows of the weight with an update, on every rank; collective."""
        base: Any = self.get_base_layer()
        updated = base.shard_values("weight") + update
        squares = updated.new_zeros(base.out_features)
        for here, there in self._boxes():
            squares[there[self._out_dim]] += updated[here].square().sum(1 - self._out_dim)
        return all_reduce(squares, base.mesh.along(*AXES)).sqrt()

    @torch.no_grad()
    def rescaled(self, weight: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """A shard whose rows are multiplied with factors ``[O]``."""
        result = weight.to(factors.dtype, copy=True)
        for here, there in self._boxes():
            result[here] *= factors[there[self._out_dim]].unsqueeze(1 - self._out_dim)
        return result

    @property
    def _out_dim(self) -> int:
        return 1 if self.fan_in_fan_out else 0

    def _boxes(self) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        base: Any = self.get_base_layer()
        return shard_boxes(base.spec("weight"), base.mesh.shape, base.mesh.coordinate)


class ShardedLoraLinear(LoraOfShards):
    """As PEFT's own class, with the factors of each adapter cut over the mesh.

    PEFT makes and initializes whole factors, the same on every rank and as in one process: with r rows or columns they
    are small. Each rank then keeps its shards of them.

    Attributes:
        is_head: whether it is around the head.
        norms: while a graph runs that the layer is part of: by DoRA adapter, what its magnitudes are divided by.
    """

    base_layer: ShardedLinear
    is_head: bool
    norms: dict[str, torch.Tensor] | None = None

    @property
    def prepares_graph(self) -> bool:
        """Whether :meth:`begin_graph` has something to do."""
        return len(self.lora_magnitude_vector) > 0

    def begin_graph(self) -> None:
        """Compute the norms before a graph that the layer is part of runs: they follow from weights alone."""
        active = () if self.disable_adapters or self.merged else self.active_adapters
        self.norms = {name: self._norms(name) for name in active if name in self.lora_magnitude_vector}

    def end_graph(self) -> None:
        """After a graph."""
        self.norms = None

    def resolve_lora_variant(self, *, config: LoraConfig, **_: Any) -> LoraVariant | None:
        """What computes an adapter with this config's options; others than DoRA are refused before."""
        return ShardedDora() if config.use_dora else None

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        """Add an adapter. See PEFT's ``LoraLayer.update_layer``."""
        super().update_layer(adapter_name, r, lora_alpha, config, **kwargs)
        base: Any = self.get_base_layer()
        mesh: Mesh = base.mesh
        split = LowRankSplit.of(base)
        assert split is not None, "checked before layers are put in"
        # Not looked up in a forward, inside which a head is unsharded.
        self.is_head = split.ragged
        whole_a: Any = self.lora_A[adapter_name]
        whole_b: Any = self.lora_B[adapter_name]
        a, b = FactorA(whole_a, split, mesh), FactorB(whole_b, split, mesh, base.bias_rows)
        parts: list[Any] = [a, b]
        if adapter_name in self.lora_magnitude_vector:
            parts.append(self.lora_magnitude_vector[adapter_name])
        for part in parts:
            for param in part.sharded_params.values():
                param.follow(base.sharded_params["weight"])
        self.lora_A[adapter_name], self.lora_B[adapter_name] = a, b
        dropout = self.lora_dropout[adapter_name]
        if isinstance(dropout, nn.Dropout):
            self.lora_dropout[adapter_name] = ShardedDropout(dropout.p, mesh, split.input_axes)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The layer's output, with the updates of the active adapters; shapes as in :mod:`cuboid.tensor3d.low_rank`.

        Raises:
            UnsupportedModelError: ``adapter_names`` gives rows different adapters.
        """
        is_plain = self.is_plain(kwargs)
        # First: it takes the result that the block's fused projections have attached to exactly this tensor.
        result = self.base_layer(x, *args)
        if is_plain:
            return result
        # The head gathers what it is given itself.
        source = x if self.is_head else self.get_base_layer().input_of_updates(x)  # type: ignore[operator]
        attached, total, rows = attached_products(x), result, row_adapters()
        if rows is not None:
            return self._of_rows(result, source, attached, rows)
        for name in self.active_adapters:
            if name in self.lora_A:
                a: Any = self.lora_A[name]
                b: Any = self.lora_B[name]
                z = attached.pop(id(a), None)
                if z is None:
                    z = a(self.lora_dropout[name](self._cast_input_dtype(source, a.weight.dtype)))
                if name in self.lora_magnitude_vector:
                    total = total + self._decomposed(name, total, b(z) * self.scaling[name])
                else:
                    total = b.added(total, z, self.scaling[name])
        return total.to(result.dtype)

    def _of_rows(
        self, result: torch.Tensor, source: torch.Tensor, attached: dict[int, torch.Tensor], rows: RowAdapters
    ) -> torch.Tensor:
        """The output with each row's own adapter: the factors of all of them are stacked, and Z is masked."""
        names = [name for name in rows.names if name in self.lora_A]
        if not names:
            return result
        features = {name: attached.pop(id(self.lora_A[name]), None) for name in names}
        features |= self._features([name for name in names if features[name] is None], source)
        z: Any = [rows.masked(name, features[name]) * self.scaling[name] for name in names]  # type: ignore[arg-type]
        parts = [self.lora_B[name].own_rows() for name in names]  # type: ignore[operator]
        weights, biases = zip(*parts, strict=True)
        total = result + nn.functional.linear(torch.cat(z, -1), torch.cat(weights, 1)).to(result.dtype)
        for name, bias in zip(names, biases, strict=True):
            if bias is not None:
                total = total + rows.masks[name] * (bias * self.scaling[name]).to(total.dtype)
        return total

    def _features(self, names: Sequence[str], source: torch.Tensor) -> dict[str, torch.Tensor]:
        """Z of some adapters: by one product, and one message, for all whose input is the same."""
        features, same = dict[str, torch.Tensor](), dict[torch.dtype, list[str]]()
        for name in names:
            a: Any = self.lora_A[name]
            if self._drops(name):
                features[name] = a(self.lora_dropout[name](self._cast_input_dtype(source, a.weight.dtype)))
            else:
                same.setdefault(a.weight.dtype, []).append(name)
        for dtype, stacked in same.items():
            factors: list[Any] = [self.lora_A[name] for name in stacked]
            weight = torch.cat([a.unsharded("weight") for a in factors])
            z = factors[0].completed(nn.functional.linear(self._cast_input_dtype(source, dtype), weight))
            features |= zip(stacked, z.split([a.out_features for a in factors], -1), strict=True)
        return features

    def factors_of_input(self) -> Iterator[FactorA]:
        """A of the active adapters that the next forward multiplies the layer's input with, without dropout."""
        rows = row_adapters()
        names = self.active_adapters if rows is None else rows.names
        for name in () if self.disable_adapters or self.merged else names:
            if name in self.lora_A and not self._drops(name):
                a: Any = self.lora_A[name]
                yield a

    def _drops(self, adapter: str) -> bool:
        """Whether an adapter has dropout, which the layer's training mode turns on."""
        dropout = self.lora_dropout[adapter]
        return not isinstance(dropout, nn.Identity) and dropout.training

    def keep_magnitudes(self, adapter_name: str, norms: torch.Tensor) -> None:
        """Make a new DoRA adapter's magnitudes; see :class:`~cuboid.tensor3d.low_rank.Magnitudes`."""
        base: Any = self.get_base_layer()
        split = LowRankSplit.of(base)
        assert split is not None, "checked before layers are put in"
        original = nn.Module()
        original.register_parameter("weight", nn.Parameter(norms))
        self.lora_magnitude_vector[adapter_name] = Magnitudes(original, split, base.mesh, base.bias_rows)

    def whole_update(self, x: torch.Tensor) -> torch.Tensor:
        """The active adapters' updates ``[…, O]`` for whole inputs ``[…, I]`` that every rank has alike; collective."""
        total = x.new_zeros(())
        for name in () if self.disable_adapters or self.merged else self.active_adapters:
            if name in self.lora_A:
                factors: Any = self.lora_A[name], self.lora_B[name]
                a, b, bias = (
                    whole_parameter(factor, parameter)
                    for factor, parameter in zip((*factors, factors[1]), ("weight", "weight", "bias"), strict=True)
                )
                assert a is not None
                assert b is not None
                features = self.lora_dropout[name](x.to(a.dtype))
                update = nn.functional.linear(nn.functional.linear(features, a), b, bias)
                total = total + (update * self.scaling[name]).to(x.dtype)
        return total

    def _decomposed(self, adapter: str, total: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """What DoRA adds to the output so far: all of it but the bias becomes as long as the magnitudes say."""
        base: Any = self.get_base_layer()
        norms = self.norms[adapter] if torch.compiler.is_compiling() and self.norms else self._norms(adapter)
        scale = self.lora_magnitude_vector[adapter](norms)
        if base.bias is not None:
            total = total - base.output_bias()
        product: torch.Tensor = (scale - 1) * total + scale * update
        return product

    @torch.no_grad()
    def _norms(self, adapter: str) -> torch.Tensor:
        factors: Any = self.lora_A[adapter], self.lora_B[adapter]
        a, b = (whole_parameter(factor, "weight") for factor in factors)
        norms = self.row_norms(self.shard_of_update(a, b, self.scaling[adapter]))
        return norms.to(factors[0].weight.dtype)


class ShardedDora(LoraVariant):
    """Weight-decomposed adapters: initial magnitudes, and merging; the layers compute with them."""

    @staticmethod
    def init(module: Any, adapter_name: str, **_: Any) -> None:
        """Magnitudes of a new adapter, whose factors are whole yet: the norms of the updated weight's rows."""
        if "lora_magnitude_vector" not in module.adapter_layer_names:
            module.adapter_layer_names = (*module.adapter_layer_names, "lora_magnitude_vector")
        base: Any = module.get_base_layer()
        if is_loading.get():
            # Should the files have none, this shows.
            norms = base.shard_values("weight").new_full((base.out_features,), torch.nan)
        else:
            a, b = module.lora_A[adapter_name].weight, module.lora_B[adapter_name].weight
            norms = module.row_norms(module.shard_of_update(a, b, module.scaling[adapter_name]))
            norms = norms.to(base.shard_values("weight").dtype)
        module.keep_magnitudes(adapter_name, norms)

    @staticmethod
    def merge_safe(module: Any, active_adapter: str, orig_weight: torch.Tensor) -> torch.Tensor:
        """The weight's shard with the adapter in it; collective."""
        update = module.get_delta_weight(active_adapter)
        norms = module.row_norms(update)
        factors = _magnitudes(module, active_adapter) / norms
        # Unmerging needs them, and can't compute them of the merged weight.
        module._cache_store(f"{active_adapter}-weight_norm", norms)
        merged: torch.Tensor = module.rescaled(orig_weight + update, factors).to(orig_weight.dtype)
        return merged

    @staticmethod
    def merge_unsafe(module: Any, active_adapter: str, orig_weight: torch.Tensor) -> None:
        """As :meth:`merge_safe`, in place."""
        orig_weight.data = ShardedDora.merge_safe(module, active_adapter, orig_weight.data)

    @staticmethod
    def unmerge(module: Any, active_adapter: str, orig_weight: torch.Tensor) -> torch.Tensor:
        """The weight's shard without the adapter; collective."""
        factors = module._cache_pop(f"{active_adapter}-weight_norm") / _magnitudes(module, active_adapter)
        weight = module.rescaled(orig_weight.data, factors) - module.get_delta_weight(active_adapter)
        return weight.to(orig_weight.dtype)


@torch.no_grad()
def _magnitudes(module: Any, adapter: str) -> Any:
    """All of a layer's magnitudes, on every rank; collective."""
    return whole_parameter(module.lora_magnitude_vector[adapter], "weight")
