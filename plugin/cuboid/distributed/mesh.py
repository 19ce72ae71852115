"""One rank's view of its mesh: coordinate, process groups, and the counter of bytes."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import socket
import warnings
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from itertools import chain, combinations, pairwise

import torch
import torch.distributed as dist

from cuboid.distributed.collectives import exchanges_directly
from cuboid.distributed.comm_counter import CommCounter, Operation, axes_label
from cuboid.distributed.host_identity import host_identity
from cuboid.distributed.process_groups import Purpose, make_groups, make_host_groups, make_lone_group
from cuboid.distributed.step_progress import StepProgress, progress_of
from cuboid.distributed.topology import AXES, Axis, MeshShape, Topology
from cuboid.errors import MeshError


@dataclasses.dataclass(frozen=True)
class WeightSeed:
    """What a rank made the model's new weights from: a number drawn from torch's CPU generator.

    The generator's own seed is for messages only.
    """

    drawn: int
    of_generator: int = dataclasses.field(compare=False)

    @classmethod
    def of_state(cls) -> WeightSeed:
        """Of all that the generator draws from now on, without drawing."""
        return cls(zlib.crc32(torch.get_rng_state().numpy().tobytes()), torch.initial_seed())


class AxisGroup:
    """The ranks that differ from this one only along some axes, and what is constant about them.

    :meth:`Mesh.along` makes one object for each tuple of axes. Layers keep it, so that steps compute none of this
    again. Groups compare by identity.

    Attributes:
        mesh: the mesh that the ranks belong to.
        axes: the axes that have several ranks.
        size: number of ranks.
        index: this rank's position among them, the first axis varying slowest.
        counted: counts the group's collectives, in the mesh's communication counter.
        process_group: None before the mesh is connected, and for a single rank.
        exchanges: whether its short messages are faster as an exchange than as a collective.
    """

    def __init__(self, mesh: Mesh, axes: Sequence[Axis]) -> None:
        self.mesh = mesh
        self.size = mesh.shape.of(*axes)
        self.index = mesh.coordinate.index(axes, mesh.shape)
        self.axes = mesh.split_axes(axes)
        self.counted = mesh.comm_counter.collectives(axes_label(self.axes), self.size)
        self.process_group: dist.ProcessGroup | None = None
        self.exchanges = False
        if mesh._groups:
            self.connect(mesh._groups)

    def connect(self, groups: Mapping[frozenset[str], dist.ProcessGroup]) -> None:
        """Find the process group among those of the mesh, by their axes."""
        self.process_group = groups.get(frozenset(self.axes))
        self.exchanges = self.process_group is not None and exchanges_directly(self.process_group)

    def __deepcopy__(self, memo: dict[int, object]) -> AxisGroup:
        # As for the mesh: a copied module is on the same mesh.
        return self

    def __repr__(self) -> str:
        return f"AxisGroup({axes_label(self.axes) or 'one rank'}, {self.mesh.shape})"


class Mesh:
    """The mesh that this rank belongs to.

    It takes its coordinate from the launcher's RANK and WORLD_SIZE (or from an existing process group), so that weights
    can be read before there are process groups. :meth:`connect` makes the groups.

    Args:
        shape: sizes of the axes.
        pipe: pipeline ranks, each of which is a mesh of that shape.
        rank: this rank in the world; by default the process group's or the launcher's.
        world_size: likewise.
        placement: the pipe coordinate of each pipeline stage; by default one stage per coordinate.

    Raises:
        MeshError: the mesh doesn't divide the world.
    """

    def __init__(
        self,
        shape: MeshShape,
        *,
        pipe: int = 1,
        rank: int | None = None,
        world_size: int | None = None,
        placement: Sequence[int] | None = None,
    ) -> None:
        self.shape = shape
        self.placement = tuple(range(pipe) if placement is None else placement)
        self.rank = current_rank() if rank is None else rank
        self.topology = Topology(shape, current_world_size() if world_size is None else world_size, pipe)
        self.coordinate = self.topology.coordinate(self.rank)
        self.comm_counter = CommCounter()
        self._groups: dict[frozenset[str], dist.ProcessGroup] = {}
        self._along: dict[tuple[Axis, ...], AxisGroup] = {}
        self._channels: dict[tuple[int, int], dist.ProcessGroup] = {}
        self._host_groups: dict[str, dist.ProcessGroup] = {}
        self._connected = False
        #: Of the models on this mesh. Once connected, that of all models on the ranks of a copy.
        self.progress = StepProgress()
        #: For :meth:`connect`, which checks that all ranks have the same; None for weights that weren't made.
        self.weight_seed: WeightSeed | None = None
        #: Likewise: the number of layers of each pipeline stage, which every rank computes; empty without stages.
        self.stage_layers: tuple[float, ...] = ()
        #: Likewise: a checksum of each tensor, by name, of a model that every rank had in memory; of others empty.
        self.weight_checksums: Mapping[str, int] = {}
        #: Whether the ranks are threads of this process instead of processes of torch.distributed.
        self.in_threads = False
        #: The node of each rank of the world. Known once connected.
        self.nodes: tuple[str, ...] = ()
        #: Whether gloo connects ranks on several machines or in several network namespaces: then collectives are direct
        #: messages. Always False with other backends. Known once connected.
        self.spans_networks = False
        #: Whether the ranks of this mesh are on several nodes, with a network between them. Known once connected.
        self.spans_nodes = False

    def size(self, *axes: Axis) -> int:
        """Number of ranks along the axes together."""
        axis_group = self._along.get(axes)
        return self.along(*axes).size if axis_group is None else axis_group.size

    def along(self, *axes: Axis) -> AxisGroup:
        """The ranks along the axes together; the same object for the same axes."""
        axis_group = self._along.get(axes)
        if axis_group is None:
            axis_group = self._along[axes] = AxisGroup(self, axes)
        return axis_group

    def counters_by_group(self) -> dict[str, Counter[tuple[Operation, int]]]:
        """What counts the collectives of each process group that is in use, by the group's name."""
        axis_groups = self._along.values()
        return {x.process_group.group_name: x.counted for x in axis_groups if x.process_group is not None}

    def index(self, *axes: Axis) -> int:
        """This rank's position along the axes together, the first varying slowest."""
        return self.along(*axes).index

    @property
    def traffic(self) -> CommCounter:
        """Deprecated name of :attr:`comm_counter`."""
        warnings.warn("Mesh.traffic is called Mesh.comm_counter now", DeprecationWarning, stacklevel=2)
        return self.comm_counter

    def connect(self) -> None:
        """Make the process groups; every rank of the world must call it. Later calls do nothing.

        Raises:
            MeshError: the mesh has several ranks and ``torch.distributed`` isn't initialised, or its world is
                not the one that the mesh was laid out for; or the ranks' meshes, or the seeds or values of their
                weights, differ.
        """
        if self._connected:
            return
        if self.topology.world_size > 1:
            self._check_world()
            self._find_nodes()
            timeout = group_timeout()
            by_partition: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None] = {}
            for names, axes in self._group_axes().items():
                ranks = self.topology.groups(axes)
                key = tuple(map(tuple, ranks))
                # Two names may have the same partition, such as "mesh" and all axes that are split.
                if key not in by_partition:
                    purpose: Purpose = "axis" if set(axes) <= set(AXES) else "other"
                    by_partition[key] = make_groups(ranks, purpose=purpose, timeout=timeout)
                group = by_partition[key]
                if group is not None:
                    self._groups[names] = group
            for channels in self._disjoint_channels():
                places = {ends: {self.placement[stage] for stage in ends} for ends in channels}
                columns = [column for ends in channels for column in self.topology.columns(sorted(places[ends]))]
                group = make_groups(columns, purpose="channel", timeout=timeout)
                self._channels.update(
                    {ends: group for ends in channels if group is not None and self.coordinate.pipe in places[ends]}
                )
        for along in self._along.values():
            along.connect(self._groups)
        self.progress = progress_of(self.copy_ranks)
        self._connected = True

    def connect_threads(self, groups: Mapping[frozenset[str], dist.ProcessGroup]) -> None:
        """Set groups of threads, by their axes, instead of :meth:`connect`; see :mod:`.thread_ranks`."""
        self._groups = dict(groups)
        for along in self._along.values():
            along.connect(self._groups)
        self._connected = self.in_threads = True

    def connect_host(self) -> None:
        """Make the process groups for tensors in host memory, which checkpoints use.

        They use gloo whatever the backend is, so that a thread may use them while training computes. Every rank of the
        world must call it. Later calls do nothing.
        """
        if self._host_groups or self.topology.world_size == 1:
            return
        self._check_world()
        timeout = group_timeout()
        everyone = [list(range(self.topology.world_size))]
        for name, partition in {"world": everyone, "stage": self.topology.groups(("data", *AXES))}.items():
            group = make_host_groups(partition, timeout)
            if group is not None:
                self._host_groups[name] = group

    def connect_replicas(self) -> dist.ProcessGroup | None:
        """The ranks of this pipeline stage in all replicas; None for one rank.

        The first call makes the group; every rank of the world must call it.
        """
        name = frozenset({"stage"})
        if name not in self._groups and self.topology.world_size > 1:
            self._check_world()
            group = make_groups(self.topology.groups(("data", *AXES)), timeout=group_timeout())
            if group is not None:
                self._groups[name] = group
        return self._groups.get(name)

    @property
    def host_group(self) -> dist.ProcessGroup | None:
        """All ranks of the world, over gloo; None in a world of one. See :meth:`connect_host`."""
        return self._host_groups.get("world")

    @property
    def stage_host_group(self) -> dist.ProcessGroup | None:
        """All ranks of this pipeline stage, replicas included, over gloo; None for a stage of one rank."""
        return self._host_groups.get("stage")

    def split_axes(self, axes: Sequence[Axis]) -> tuple[Axis, ...]:
        """Those of ``axes`` that have more than one rank."""
        return tuple(axis for axis in axes if self.shape.of(axis) > 1)

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that own the same shards and work on other data."""
        return self._group("data")

    @property
    def mesh_group(self) -> dist.ProcessGroup:
        """All ranks of this mesh: of one pipeline stage."""
        return self._group("mesh")

    @property
    def pipe_group(self) -> dist.ProcessGroup:
        """The ranks at this rank's position in every stage."""
        return self._group("pipe")

    @property
    def model_parallel_group(self) -> dist.ProcessGroup:
        """All ranks that hold one copy of the model together: the meshes of all stages."""
        return self._group("model")

    @cached_property
    def copy_ranks(self) -> list[int]:
        """World ranks of :attr:`model_parallel_group`, ascending; the first of them is at the first stage."""
        return self._own(self.topology.groups(("pipe", *AXES)))

    @cached_property
    def mesh_ranks(self) -> list[int]:
        """World ranks of :attr:`mesh_group`, ascending."""
        return self._own(self.topology.groups(AXES))

    @cached_property
    def stage_ranks(self) -> list[list[int]]:
        """World ranks of this pipeline stage: for each place in the mesh, those of all replicas."""
        return [
            ranks
            for ranks in self.topology.groups(("data",))
            if self.topology.coordinate(ranks[0]).pipe == self.coordinate.pipe
        ]

    def meet(self, device: torch.device) -> None:
        """Run one small collective on each group, so that the backend has set up its communicators.

        NCCL does so in the first collective, in which the host waits for the other ranks. That must not happen while a
        message is in flight. Collective over the world.
        """
        for group in dict.fromkeys((*self._groups.values(), *self._channels.values())):
            dist.all_reduce(torch.zeros(1, device=device), group=group)

    def channel(self, source: int, target: int) -> dist.ProcessGroup:
        """Process group of the ranks at this rank's position in two stages, for messages from ``source`` to ``target``.

        Each direction has a group of its own, so that with NCCL the order of one doesn't restrict the other. There are
        channels between neighbouring stages on different ranks, and between the first and the last one, which may share
        tied weights.
        """
        return self._channels[source, target]

    def peer(self, pipe: int) -> int:
        """World rank at this rank's position in another mesh of the pipeline."""
        return self.topology.rank(dataclasses.replace(self.coordinate, pipe=pipe))

    @property
    def has_first_stage(self) -> bool:
        """Whether the pipeline's first stage is on this rank, with the embedding."""
        return self.placement[0] == self.coordinate.pipe

    @property
    def has_last_stage(self) -> bool:
        """Whether the pipeline's last stage is on this rank, with the head and the loss."""
        return self.placement[-1] == self.coordinate.pipe

    def _group(self, name: str) -> dist.ProcessGroup:
        group = self._groups.get(frozenset({name}))
        return self._lone_group if group is None else group

    @cached_property
    def _lone_group(self) -> dist.ProcessGroup:
        # Frameworks need a process group even for a single replica.
        return make_lone_group()

    def _own(self, sets: list[list[int]]) -> list[int]:
        return next(ranks for ranks in sets if self.rank in ranks)

    def _check_world(self) -> None:
        if not dist.is_initialized():
            raise MeshError(
                f"mesh {self.shape} in a world of {self.topology.world_size} ranks needs torch.distributed: call "
                "deepspeed.initialize, deepspeed.init_distributed or torch.distributed.init_process_group first"
            )
        if dist.get_world_size() != self.topology.world_size or dist.get_rank() != self.rank:
            raise MeshError(
                f"the mesh was laid out for rank {self.rank} of {self.topology.world_size}, but torch.distributed "
                f"has this process as rank {dist.get_rank()} of {dist.get_world_size()}"
            )

    def _find_nodes(self) -> None:
        """Find out which ranks share a node, and check that all ranks have the same mesh and weights."""
        node = host_identity("net") if dist.get_backend() == "gloo" else socket.gethostname()
        # One digest of all tensors' checksums. The checksums themselves are many, and gathered only for the error.
        digest = hashlib.sha256(repr(sorted(self.weight_checksums.items())).encode()).hexdigest()
        stages = self.placement, self.stage_layers
        gathered = [("", "", *stages, self.weight_seed, digest)] * self.topology.world_size
        dist.all_gather_object(gathered, (node, str(self.shape), *stages, self.weight_seed, digest))
        nodes, shapes, placements, layers, seeds, digests = zip(*gathered, strict=True)
        if len(set(shapes)) > 1:
            raise MeshError(
                f"ranks have different meshes, {', '.join(sorted(set(shapes)))}; rank {self.rank} has {self.shape}: "
                'with "mesh": "auto" that is so where their GPUs differ: name the "cluster", or the mesh'
            )
        if len(set(placements)) > 1:
            raise MeshError(
                f"ranks have the pipeline's stages in different places, {', '.join(map(str, sorted(set(placements))))};"
                f" rank {self.rank} has {self.placement}: give all ranks the same config, and the same versions"
            )
        if len(set(layers)) > 1:
            raise MeshError(
                f"ranks have cut the model's layers into different stages, {', '.join(map(str, sorted(set(layers))))}; "
                f"rank {self.rank} has {self.stage_layers}: give all ranks the same config, and the same versions"
            )
        if len(set(digests)) > 1:
            checksums: list[Mapping[str, int]] = [{}] * self.topology.world_size
            dist.all_gather_object(checksums, self.weight_checksums)
            raise MeshError(_weight_difference(checksums))
        # Last: beside a rank that made its slices, one with a model in memory has no seed, but that is not the cause.
        _check_seeds(seeds)
        self.nodes = nodes
        # Only for gloo: other backends choose routes themselves, and unbatched sends and receives would wait for one
        # another on NCCL's single stream.
        self.spans_networks = dist.get_backend() == "gloo" and len(set(nodes)) > 1
        self.spans_nodes = len({nodes[rank] for rank in self.mesh_ranks}) > 1

    def compare_seed(self, seed: WeightSeed) -> None:
        """Check that all ranks make new weights from the same number; at once, or when the ranks are connected.

        Raises:
            MeshError: they don't; on all ranks.
        """
        if not self._connected:
            before = self.weight_seed
            drawn = seed.drawn if before is None else hash((before.drawn, seed.drawn))
            self.weight_seed = WeightSeed(drawn, seed.of_generator)
        elif self.topology.world_size > 1 and not self.in_threads:
            seeds: list[WeightSeed | None] = [None] * self.topology.world_size
            dist.all_gather_object(seeds, seed)
            _check_seeds(seeds)

    def _group_axes(self) -> dict[frozenset[str], tuple[str, ...]]:
        split_axes = self.split_axes(AXES)
        subsets = chain.from_iterable(combinations(split_axes, count) for count in range(1, len(split_axes) + 1))
        named: dict[frozenset[str], tuple[str, ...]] = {frozenset(subset): subset for subset in subsets}
        copy = ("pipe", *AXES)
        sets: dict[str, tuple[str, ...]] = {"data": ("data",), "mesh": AXES, "pipe": ("pipe",), "model": copy}
        return {**named, **{frozenset({name}): axes for name, axes in sets.items()}}

    def _disjoint_channels(self) -> list[list[tuple[int, int]]]:
        """The (source, target) stages of all channels, in lists that use no rank twice: each can be one partition."""
        last = len(self.placement) - 1
        forward: list[list[tuple[int, int]]] = []
        used_places: list[set[int]] = []
        for ends in pairwise(range(last + 1)):
            places = {self.placement[stage] for stage in ends}
            if len(places) == 1:
                continue
            number = next((n for n, used in enumerate(used_places) if not places & used), len(used_places))
            if number == len(used_places):
                forward.append([])
                used_places.append(set())
            forward[number].append(ends)
            used_places[number] |= places
        backward = [[(target, source) for source, target in channels] for channels in forward]
        around = [[(0, last)]] if last > 1 and self.placement[0] != self.placement[last] else []
        return [*forward, *backward, *around]

    def __deepcopy__(self, memo: dict[int, object]) -> Mesh:
        # A copied module is on the same mesh; process groups can't be copied.
        return self

    def __repr__(self) -> str:
        return f"Mesh({self.shape}, pipe={self.topology.pipe}, {self.coordinate})"


def current_rank() -> int:
    """This process's rank in the world: torch.distributed's, else the launcher's RANK, else 0."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else int(os.environ.get("RANK", "0"))


def current_world_size() -> int:
    """Ranks in the world: torch.distributed's, else the launcher's WORLD_SIZE, else 1."""
    is_connected = dist.is_available() and dist.is_initialized()
    return dist.get_world_size() if is_connected else int(os.environ.get("WORLD_SIZE", "1"))


def group_timeout() -> timedelta | None:
    """The timeout of the default process group; None if its backend has none.

    New groups would otherwise have the backend's default (30 minutes with gloo).
    """
    group = dist.group.WORLD
    assert group is not None
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    return getattr(options, "_timeout", None)


def _check_seeds(seeds: Sequence[WeightSeed | None]) -> None:
    """Raise an error unless all ranks made the model's weights from the same number."""
    other_rank = next((rank for rank, seed in enumerate(seeds) if seed != seeds[0]), None)
    if other_rank is None:
        return
    first_seed, other_seed = (None if seed is None else seed.of_generator for seed in (seeds[0], seeds[other_rank]))
    difference = f"rank 0's generator has the seed {first_seed}, rank {other_rank}'s has {other_seed}"
    if first_seed == other_seed:
        both = f"rank 0 and rank {other_rank} have the seed {first_seed}"
        difference = f"{both}, but one drew more before it made the model"
    raise MeshError(
        "ranks made the model's new weights from different random numbers, so that these don't belong together: "
        f"{difference}. Call torch.manual_seed with the same number on all ranks right before the model is made; a "
        "seed for each rank may follow after that"
    )


def _weight_difference(checksums: Sequence[Mapping[str, int]]) -> str:
    """Which tensor of a model in memory differs between ranks, for an error."""
    first = checksums[0]
    other_rank = next(rank for rank, by_name in enumerate(checksums) if by_name != first)
    other = checksums[other_rank]
    for rank, names, peer_names in ((0, first, other), (other_rank, other, first)):
        lacking = next((name for name in peer_names if name not in names), None)
        if lacking is not None:
            return f"ranks sharded different models: rank {rank}'s has no {lacking}. Give all ranks the same one"
    differing = [name for name in first if first[name] != other[name]]
    return (
        f"ranks sharded a model with different weights in memory: {differing[0]} differs between rank 0 and rank "
        f"{other_rank}, and so do {len(differing) - 1} more of {len(first)} tensors. Every rank must have the same "
        "weights: load them on all ranks, or call torch.manual_seed with the same number on all ranks right before the "
        "model is made. cuboid.from_pretrained and cuboid.from_config make them alike"
    )
