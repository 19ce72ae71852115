"""One rank's part of the layer on each mesh: build, compare with float64, step."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaForCausalLM

import cuboid
from cuboid.distributed.axis_collectives import own_slice
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import AXES
from cuboid.tensor3d.sharding.sharding_spec import take_shard
from cuboid.weights.state_dict_map import sharded_layouts
from network.layer_workload import LayerWorkload, Reference, rotary_tables, run_layer
from network.networks import Network
from network.rate import Link, sleep_until


@dataclass(frozen=True)
class Step:
    """A forward and a backward of one rank.

    Args:
        duration_s: since the start that all ranks were told.
        computing_s: processor time of all of the rank's threads.
        counted_bytes: sent, by Cuboid's own counter.
        calls: collectives, by axes.
        interface_bytes: sent, by the interface; None where it isn't the rank's own.
        waited_s: for messages; None where that isn't measured.
    """

    duration_s: float
    computing_s: float
    counted_bytes: int
    calls: dict[str, int]
    interface_bytes: int | None
    waited_s: float | None = None


class Sharded:
    """The layer on one mesh."""

    def __init__(self, model: Any, workload: LayerWorkload, reference: Reference) -> None:
        self.model = model
        self.mesh: Mesh = cuboid.mesh_of(model)
        self.mesh.connect()
        self._tables = rotary_tables(model, workload.length)
        self._reference = reference
        self._given = self._part(reference.given).float().requires_grad_()
        self._gradient = self._part(reference.gradient).float()
        self.output: torch.Tensor | None = None

    def _part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's ``[B/b, S/s, H/h]`` of a ``[B, S, H]``."""
        for dim, axis in enumerate(AXES):
            whole = own_slice(whole, dim, self.mesh, (axis,))
        return whole.contiguous()

    def run(self) -> None:
        """Forward and backward."""
        output = run_layer(self.model, self._given, self._tables)
        output.backward(self._gradient)
        self.output = output.detach()

    def clear(self) -> None:
        """Forget the last run."""
        self.output = self._given.grad = None
        self.model.zero_grad(set_to_none=True)

    def error(self) -> float:
        """How far the last run is from float64: the largest difference of any tensor, as a part of its largest
        element."""
        assert self.output is not None
        assert self._given.grad is not None
        pairs = [
            (self.output, self._part(self._reference.output)),
            (self._given.grad, self._part(self._reference.given_gradient)),
        ]
        layouts = sharded_layouts(self.model)
        own = dict(self.model.named_parameters())
        for name, whole in self._reference.gradients.items():
            gradient = own[name].grad
            assert gradient is not None, f"{name} has no gradient"
            pairs.append((gradient, take_shard(whole, layouts[name], self.mesh)))
        # A shard of only padding has nothing to differ in.
        return max(((ours - right).abs().max() / right.abs().max().clamp_min(1e-300)).item() for ours, right in pairs)


class LayerRank(Link):
    """What a rank keeps: the layer on every mesh, made from one whole model that all ranks share."""

    def __init__(
        self, network: Network, workload: LayerWorkload, model: LlamaForCausalLM, reference: Reference
    ) -> None:
        super().__init__(network)
        self._workload, self._model, self._reference = workload, model, reference
        self._layers: dict[str, Sharded] = {}

    def prepare(self, mesh: str) -> tuple[str, float]:
        """Shard the model, make its process groups, and run it once. Collective.

        Returns:
            The mesh that it is on, and how far it is from float64 here.
        """
        model = cuboid.shard(copy.deepcopy(self._model), self._workload.config(mesh, self.network.ranks))
        layer = self._layers[mesh] = Sharded(model, self._workload, self._reference)
        layer.run()
        return str(layer.mesh.shape), layer.error()

    def step(self, mesh: str, start_s: float) -> Step:
        """One forward and backward, beginning at a time that all ranks are told. Collective."""
        layer = self._layers[mesh]
        layer.clear()
        layer.mesh.traffic.reset()
        before, computing_s = self.network.sent_bytes(), time.process_time()
        sleep_until(start_s)
        layer.run()
        duration_s = time.perf_counter() - start_s
        computing_s = time.process_time() - computing_s
        after = self.network.sent_bytes()
        carried = None if before is None or after is None else after - before
        traffic = layer.mesh.traffic
        return Step(duration_s, computing_s, sum(traffic.snapshot().values()), traffic.calls(), carried)
