"""PEFT's layer that trains some tokens' rows of an embedding or a head (``trainable_token_indices``)."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import nn

from cuboid.distributed.axis_collectives import all_reduce
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import AXES
from cuboid.errors import MeshError
from cuboid.integrations.peft.layers.adapted_layer import check_finite
from cuboid.integrations.peft.seeding import is_loading
from cuboid.tensor3d.sharding.full_params import whole_parameter
from cuboid.tensor3d.sharding.sharded_parameters import ShardedParameters
from cuboid.tensor3d.sharding.sharding_spec import shard_boxes
from cuboid.tensor3d.token_rows import rows_spec, with_logits, with_vectors


class ShardedTokens(TrainableTokensLayer):
    """As PEFT's own class, around a table that is cut over the mesh; so are the trained rows."""

    trainable_tokens_delta: Any

    def __init__(self, base_layer: Any, adapter_name: str, token_indices: Any, tied_adapter: Any) -> None:
        super().__init__(base_layer, adapter_name, token_indices, tied_adapter)
        self.mesh: Mesh = base_layer.mesh
        #: By adapter: of each box of the base's shard that merged rows have replaced, the values before.
        self.replaced: dict[str, list[tuple[tuple[Any, ...], torch.Tensor]]] = {}
        if self.tied_adapter is None:
            self.trainable_tokens_delta = ShardedParameters(base_layer.mesh)

    def update_layer(
        self, adapter_name: str, config: Any = None, tied_adapter: nn.Module | None = None, **kwargs: Any
    ) -> None:
        """Add an adapter, whose rows begin as the base's. See PEFT's ``TrainableTokensLayer.update_layer``."""
        if tied_adapter is not None:
            return
        tokens = list(config.token_indices if config is not None else kwargs["token_indices"])
        self.token_indices[adapter_name] = tokens
        base: Any = self.get_base_layer()
        shape = len(tokens), base.spec("weight").shape[1]
        # Should the files have none, NaN shows.
        rows = base.weight.new_full(shape, torch.nan) if is_loading.get() else self._base_rows(tokens)
        spec, like = rows_spec(*shape), base.sharded_params["weight"]
        self.trainable_tokens_delta.take(adapter_name, nn.Parameter(rows), spec, like)

    def forward_adapters(self, x: torch.Tensor, active_adapters: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the base layer, with the rows of the active adapters."""
        is_plain = self.disable_adapters or not active_adapters or self.merged
        if self.disable_adapters and self.merged:
            self.unmerge()
        result: torch.Tensor = self.base_layer(x, *args, **kwargs)
        if is_plain:
            return result
        self._check_overlapping_tokens(active_adapters)
        base: Any = self.get_base_layer()
        for name in active_adapters:
            rows = self.trainable_tokens_delta.unsharded(name)
            if isinstance(base, nn.Embedding):
                scale = self._get_embed_scale()
                rows = rows if scale is None else rows * scale.to(rows.dtype)
                result = with_vectors(result, x, self.token_indices[name], rows, self.mesh, base.padding_idx)
            else:
                result = with_logits(result, x, self.token_indices[name], rows, self.mesh)
        return result

    def get_merged_weights(self, active_adapters: Any) -> torch.Tensor:  # noqa: ARG002
        """The base's shard, whose dtype and device models look up."""
        base: Any = self.get_base_layer()
        weight: torch.Tensor = base.weight
        return weight

    @torch.no_grad()
    def whole_update(self, x: torch.Tensor) -> torch.Tensor:
        """What the rows add to a head's logits ``[…, V]`` of whole inputs that every rank has alike; collective."""
        base: Any = self.get_base_layer()
        update = x.new_zeros((*x.shape[:-1], base.out_features))
        for name in () if self.disable_adapters or self.merged else self.active_adapters:
            rows = whole_parameter(self.trainable_tokens_delta, name)
            assert rows is not None
            tokens = self.token_indices[name]
            difference = rows.to(x.dtype) - self._base_rows(tokens).to(x.dtype)
            update[..., tokens] = nn.functional.linear(x, difference)
        return update

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Put the trained rows into the base's shard; collective. See PEFT's ``TrainableTokensLayer.merge``."""
        names = check_adapters_to_merge(self, adapter_names)
        if not names:
            return
        self._check_overlapping_tokens(names)
        self.mesh.connect()
        base: Any = self.get_base_layer()
        owner: Any = self.tied_adapter or self
        for name in names:
            rows = whole_parameter(self.trainable_tokens_delta, name)
            assert rows is not None
            if safe_merge:
                check_finite(rows, name)
            boxes = self._boxes(self.token_indices[name])
            # The other one of two tied layers may have merged the same rows into the same weight.
            owner.replaced.setdefault(name, [(here, base.weight[here].clone()) for here, *_ in boxes])
            for here, number, features in boxes:
                base.weight[here] = rows[number, features].to(base.weight.dtype)
            self.merged_adapters.append(name)

    @torch.no_grad()
    def unmerge(self) -> None:
        """Put the base's own rows back. See PEFT's ``TrainableTokensLayer.unmerge``."""
        base: Any = self.get_base_layer()
        owner: Any = self.tied_adapter or self
        while self.merged_adapters:
            for here, values in owner.replaced.pop(self.merged_adapters.pop(), ()):
                base.weight[here] = values

    @torch.no_grad()
    def _base_rows(self, tokens: list[int]) -> torch.Tensor:
        """Whole rows of the base's weight, on every rank; collective."""
        base: Any = self.get_base_layer()
        try:
            self.mesh.connect()
        except MeshError as error:
            raise MeshError(f"trainable_token_indices begin with the embedding's rows: {error}") from error
        rows = base.weight.new_zeros((len(tokens), base.spec("weight").shape[1]))
        for here, number, features in self._boxes(tokens):
            rows[number, features] = base.weight[here]
        return all_reduce(rows, self.mesh.along(*AXES))

    def _boxes(self, tokens: list[int]) -> list[tuple[tuple[Any, ...], int, slice]]:
        """Where the tokens' rows are in this rank's shard: its index, the number of the token, and the features."""
        base: Any = self.get_base_layer()
        boxes = []
        for (rows, columns), (held, features) in shard_boxes(
            base.spec("weight"), self.mesh.shape, self.mesh.coordinate
        ):
            for number, token in enumerate(tokens):
                if held.start <= token < held.stop:
                    boxes.append(((rows.start + token - held.start, columns), number, features))
        return boxes
