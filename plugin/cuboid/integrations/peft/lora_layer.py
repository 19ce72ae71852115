"""PEFT's LoRA layer around a sharded linear layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from peft.tuners import lora
from peft.tuners.lora import LoraConfig
from torch import nn
from transformers.pytorch_utils import Conv1D

from cuboid.distributed.mesh import Mesh
from cuboid.errors import UnsupportedModelError
from cuboid.tensor3d.layers.dropout import ShardedDropout, seeded
from cuboid.tensor3d.layers.linear import ShardedLinear
from cuboid.tensor3d.low_rank import FactorA, FactorB, LowRankSplit
from cuboid.tensor3d.sharding.full_params import whole_parameter
from cuboid.tensor3d.sharding.sharding_spec import shard_boxes

#: Gives the seed of a layer's new adapter; None for whatever torch's generator draws next, as in plain PEFT.
_seeds: ContextVar[Callable[[nn.Module], int] | None] = ContextVar("cuboid_adapter_seeds", default=None)


class SeededLora(lora.Linear):
    """As PEFT's own class. In a pipeline, initial values don't depend on which layers a stage has."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: LoraConfig, **kwargs: Any) -> None:
        # As PEFT does for layers whose class tells.
        config.fan_in_fan_out = isinstance(base_layer, Conv1D)
        if isinstance(base_layer, ShardedLinear):
            config.fan_in_fan_out = base_layer.product.in_first
        super().__init__(base_layer, adapter_name, config, **kwargs)

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        """Add an adapter. See PEFT's ``LoraLayer.update_layer``."""
        seed_of = _seeds.get()
        seed = None if seed_of is None else seed_of(self.get_base_layer())
        with nullcontext() if seed is None else seeded(torch.device("cpu"), seed):
            super().update_layer(adapter_name, r, lora_alpha, config, **kwargs)


@contextmanager
def seeded_by(seed_of: Callable[[nn.Module], int] | None) -> Iterator[None]:
    """In the ``with`` block, new adapters get a seed for each layer that they are around; None for the generator's."""
    token = _seeds.set(seed_of)
    try:
        yield
    finally:
        _seeds.reset(token)


class ShardedLora(SeededLora):
    """As PEFT's own class, with the factors of each adapter cut over the mesh.

    PEFT makes and initializes whole factors, the same on every rank and as in one process: with r rows or columns they
    are small. Each rank then keeps its shards of them.
    """

    base_layer: ShardedLinear

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        """Add an adapter. See PEFT's ``LoraLayer.update_layer``."""
        super().update_layer(adapter_name, r, lora_alpha, config, **kwargs)
        base: Any = self.get_base_layer()
        mesh: Mesh = base.mesh
        split = LowRankSplit.of(base)
        assert split is not None, "checked before layers are put in"
        whole_a: Any = self.lora_A[adapter_name]
        whole_b: Any = self.lora_B[adapter_name]
        a, b = FactorA(whole_a, split, mesh), FactorB(whole_b, split, mesh, base.bias_rows)
        for param in (*a.sharded_params.values(), *b.sharded_params.values()):
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
        if kwargs.pop("adapter_names", None) is not None:
            raise UnsupportedModelError("adapter_names: on a mesh, all rows of a micro-batch have the same adapters")
        if self.disable_adapters and self.merged:
            self.unmerge()
        # First: it takes the result that the block's fused projections have attached to exactly this tensor.
        result = self.base_layer(x, *args)
        if self.disable_adapters or self.merged:
            return result
        source = self._input_of_factors(x)
        total = result
        for name in self.active_adapters:
            if name in self.lora_A:
                a: Any = self.lora_A[name]
                features = self._cast_input_dtype(source, a.weight.dtype)
                total = total + self.lora_B[name](a(self.lora_dropout[name](features))) * self.scaling[name]
        return total.to(result.dtype)

    def _input_of_factors(self, x: torch.Tensor) -> torch.Tensor:
        """The rank's own part of what the layer was given; it was gathered if the block's projections are fused.

        Raises:
            UnsupportedModelError: the model's own code has computed a tensor from the gathered one.
        """
        shard: torch.Tensor | None = getattr(x, "cuboid_shard", None)
        base: Any = self.get_base_layer()
        if shard is None and base.takes_gathered and base.mesh.size("sequence") > 1:
            raise UnsupportedModelError(
                "a layer with an adapter is given another tensor than its neighbours, for which there is no rule where "
                "the mesh cuts the sequence; leave it out of the adapter's target_modules"
            )
        return x if shard is None else shard

    @torch.no_grad()
    def get_delta_weight(self, adapter: str) -> torch.Tensor:
        """This rank's shard of the adapter's update of the weight; collective."""
        base: Any = self.get_base_layer()
        # Adapters may be merged before anything else has connected the ranks.
        base.mesh.connect()
        factors: Any = self.lora_A[adapter], self.lora_B[adapter]
        full: Any = [whole_parameter(factor, "weight") for factor in factors]
        # In 16 bits, the sum over r would be rounded on some devices.
        a, b = (x.float() if x.itemsize < 4 else x for x in full)
        delta = torch.zeros(base.weight.shape, dtype=a.dtype, device=a.device)
        for here, there in shard_boxes(base.spec("weight"), base.mesh.shape, base.mesh.coordinate):
            out, into = there[::-1] if self.fan_in_fan_out else there
            box = b[out] @ a[:, into]
            delta[here] = box.t() if self.fan_in_fan_out else box
        # Not in the weight's dtype: the sum of both is rounded once.
        scaled: torch.Tensor = (delta * self.scaling[adapter]).to(full[1].dtype)
        return scaled
