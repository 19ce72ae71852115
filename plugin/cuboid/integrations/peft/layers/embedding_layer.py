"""PEFT's LoRA layer around an embedding table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from peft.tuners import lora
from peft.tuners.lora import LoraConfig
from torch import nn

from cuboid.distributed.mesh import Mesh
from cuboid.integrations.peft.layers.adapted_layer import AdaptedLayer
from cuboid.integrations.peft.seeding import seeded_for
from cuboid.tensor3d.low_rank_embedding import TokenRows, factor_b_spec, low_rank_vectors, row_spec
from cuboid.tensor3d.sharding.full_params import whole_parameter
from cuboid.tensor3d.sharding.sharded_param import ShardedModule
from cuboid.tensor3d.sharding.sharded_parameters import ShardedParameters
from cuboid.tensor3d.sharding.sharding_spec import shard_boxes

#: The mesh of the model that an adapter is put into, for tables that no mesh has cut.
_mesh: ContextVar[Mesh] = ContextVar("cuboid_adapter_mesh")


@contextmanager
def on_mesh(mesh: Mesh) -> Iterator[None]:
    """In the ``with`` block, new adapters of embeddings are cut over a mesh."""
    token = _mesh.set(mesh)
    try:
        yield
    finally:
        _mesh.reset(token)


class EmbeddingLora(AdaptedLayer, lora.Embedding):
    """As PEFT's own class, with the factors of each adapter cut over the mesh; A is kept as rows of tokens.

    Tables of a stage with one rank have this class too, so that a checkpoint is resumed on any layout.
    """

    base_layer: nn.Embedding

    def resolve_lora_variant(self, **_: Any) -> None:
        """None computes an adapter but PEFT's own; DoRA is refused before."""

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        """Add an adapter. See PEFT's ``Embedding.update_layer``."""
        base: Any = self.get_base_layer()
        if not isinstance(self.lora_embedding_A, TokenRows):
            mesh = _mesh.get()
            self.lora_embedding_A, self.lora_embedding_B = TokenRows(mesh), ShardedParameters(mesh)
        rows: Any = self.lora_embedding_A
        factors: Any = self.lora_embedding_B
        # PEFT makes whole factors, the same on every rank and as in one process, of which each keeps its shards.
        self.lora_embedding_A, self.lora_embedding_B = nn.ParameterDict(), nn.ParameterDict()
        with seeded_for(base):
            super().update_layer(adapter_name, r, lora_alpha, config, **kwargs)
        a: Any = self.lora_embedding_A[adapter_name]
        b: Any = self.lora_embedding_B[adapter_name]
        self.lora_embedding_A, self.lora_embedding_B = rows, factors
        like = base.sharded_params["weight"] if isinstance(base, ShardedModule) else None
        kept = nn.Parameter(a.detach().t(), requires_grad=a.requires_grad)
        rows.take(adapter_name, kept, row_spec(base.num_embeddings, r), like)
        factors.take(adapter_name, b, factor_b_spec(base.embedding_dim, r), like)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Ids ``[B/b, S]`` to vectors ``[B/b, S/s, H/h]``, with the updates of the active adapters.

        Raises:
            UnsupportedModelError: ``adapter_names`` gives rows different adapters.
        """
        is_plain = self.is_plain(kwargs)
        result: torch.Tensor = self.base_layer(x, *args, **kwargs)
        if is_plain:
            return result
        total, scale = result, self._get_embed_scale()
        base: Any = self.get_base_layer()
        factors: tuple[Any, Any] = self.lora_embedding_A, self.lora_embedding_B
        for name in self.active_adapters:
            if name in self.lora_embedding_A:
                update = low_rank_vectors(x, *factors, name, base.padding_idx) * self.scaling[name]
                total = total + (update if scale is None else update * scale.to(update.dtype))
        return total.to(result.dtype)

    @torch.no_grad()
    def get_delta_weight(self, adapter: str) -> torch.Tensor:
        """This rank's shard of the adapter's update of the table; collective."""
        base: Any = self.get_base_layer()
        factors: tuple[Any, Any] = self.lora_embedding_A, self.lora_embedding_B
        # Adapters may be merged before anything else has connected the ranks.
        mesh: Mesh = factors[0].mesh
        mesh.connect()
        rows, b = (whole_parameter(parameters, adapter) for parameters in factors)
        assert rows is not None
        assert b is not None
        if not isinstance(base, ShardedModule):
            return rows @ b.t() * self.scaling[adapter]
        spec = base.spec("weight")
        delta = rows.new_zeros(spec.shard_shape(mesh.shape))
        for here, (tokens, features) in shard_boxes(spec, mesh.shape, mesh.coordinate):
            delta[here] = rows[tokens] @ b[features].t()
        return delta * self.scaling[adapter]
