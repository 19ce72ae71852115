"""Time of collectives and messages, by how the ranks of each group are placed on the nodes."""

from __future__ import annotations

from dataclasses import dataclass

from cuboid.distributed.topology import RANK_ORDER
from cuboid.planner.cost.layout import Layout
from cuboid.planner.description.cluster import Cluster


@dataclass(frozen=True)
class Group:
    """Ranks that communicate.

    Args:
        size: number of ranks.
        rate: bytes a second that each rank can send.
        latency_s: latency of each step of a ring.
        overlap: fraction of the concurrent computation that hides communication.
    """

    size: int
    rate: float
    latency_s: float
    overlap: float = 1.0

    def moving_s(self, whole_bytes: float) -> float:
        """An all-gather's time without its latency."""
        return whole_bytes * (self.size - 1) / self.size / self.rate

    def gather_s(self, whole_bytes: float, count: float = 1) -> float:
        """``count`` all-gathers to, or reduce-scatters from, tensors of ``whole_bytes``."""
        if self.size == 1:
            return 0.0
        return count * (self.moving_s(whole_bytes) + self._latency_s())

    def reduce_s(self, whole_bytes: float, count: float = 1) -> float:
        """``count`` all-reduces."""
        return 2 * self.gather_s(whole_bytes, count)

    def exchange_s(self, own_bytes: float, count: float = 1) -> float:
        """``count`` all-to-alls of ``own_bytes`` on each rank."""
        return self.gather_s(own_bytes, count)

    def send_s(self, moved_bytes: float) -> float:
        """A message to one other rank."""
        return moved_bytes / self.rate + self.latency_s if self.size > 1 else 0.0

    def _latency_s(self) -> float:
        return self.latency_s * ring_steps(self.size)


def ring_steps(ranks: int) -> int:
    """Number of latencies in a collective: of a ring, or of a tree, to which libraries switch if ranks are many."""
    return min(ranks - 1, 2 * (ranks - 1).bit_length() + 4)


class Links:
    """Groups of a layout on a cluster. Rank order, outermost first: pipe, data, batch, hidden, context, sequence."""

    def __init__(self, cluster: Cluster, layout: Layout) -> None:
        self._cluster = cluster
        mesh = layout.mesh
        self.sequence = self._group(mesh.sequence, 1)
        self.context = self._group(layout.context, mesh.sequence)
        inner = mesh.sequence * layout.context
        assert RANK_ORDER == ("batch", "hidden", "sequence")
        self.hidden = self._group(mesh.hidden, inner)
        self.batch = self._group(mesh.batch, inner * mesh.hidden)
        replica = inner * mesh.hidden * mesh.batch
        #: Ranks among which whole experts are divided: neighbours among those with different rows.
        self.experts = self._group(layout.expert_ranks, inner)
        #: Ranks with the same weights: replicas, and the ranks that share sequences.
        shared, stride = layout.replicas * layout.context, replica if layout.context == 1 else mesh.sequence
        self.replicas = self._group(shared, stride)
        #: Those of them that have the same experts too.
        self.expert_replicas = self._group(max(1, shared // layout.expert_ranks), stride * layout.expert_ranks)
        self.stages = self._group(layout.stages, replica * layout.replicas)

    def _group(self, size: int, stride: int) -> Group:
        """The group of ``size`` ranks whose numbers are ``stride`` apart."""
        cluster, gpu = self._cluster, self._cluster.gpu
        link = gpu.link_bytes_per_s * gpu.link_efficiency
        per_node = max(1, min(size, cluster.gpus_per_node // stride)) if stride <= cluster.gpus_per_node else 1
        if size <= per_node:
            return Group(size, link, gpu.link_latency_s, gpu.link_overlap)
        # Every byte crosses each boundary between nodes once, over all network cards of the group's ranks on a node.
        network = gpu.network_bytes_per_s * gpu.network_efficiency * per_node
        return Group(size, min(link, network), gpu.network_latency_s)
