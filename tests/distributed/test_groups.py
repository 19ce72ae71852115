"""The process groups of a mesh: how many there are, how they are made, and what NCCL is asked for."""

import resource
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from cuboid.distributed import process_groups
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import MeshShape
from proofs.fake_world import fake_world

#: Seven sets of axes, replicas, stages, a copy of the model; even and odd channels in both directions, and that around.
MOST = 15
WORLDS = [((2, 2, 2), 8, 64), ((4, 4, 4), 1, 64), ((2, 2, 2), 8, 512), ((4, 4, 4), 4, 512), ((64, 1, 1), 8, 512)]


def connected(shape, pipe, rank, size):
    mesh = Mesh(MeshShape(*shape), pipe=pipe, rank=rank, world_size=size)
    mesh.connect()
    mesh.connect_host()
    return mesh


@pytest.mark.parametrize(("shape", "pipe", "size"), WORLDS, ids=str)
def test_a_rank_is_in_few_groups_and_never_in_one_alone(shape, pipe, size):
    # What a first mesh imports isn't counted.
    with fake_world(0, 8):
        connected((1, 2, 1), 2, 0, 8)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for rank in (0, size // 3, size - 1):
        with fake_world(rank, size) as world:
            connected(shape, pipe, rank, size)
            assert len(world.own) <= MOST + 2, "and two for what lies in the host's memory"
            assert all(len(ranks) > 1 and rank in ranks for ranks in world.own)
            assert all(len(ranks) > 1 for ranks in world.asked)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 32 << 10


@pytest.mark.parametrize(("shape", "pipe", "size"), WORLDS, ids=str)
def test_where_a_device_is_bound_one_split_makes_the_groups_of_a_partition_on_all_ranks(shape, pipe, size):
    seen = []
    for rank in (0, size // 3, size - 1):
        with fake_world(rank, size, nccl=True) as world:
            connected(shape, pipe, rank, size)
            assert len(world.partitions) <= MOST
            for partition in world.partitions:
                ranks = [rank for group in partition for rank in group]
                assert len(ranks) == len(set(ranks)), "no rank twice"
            # Those of the host's memory are made apart, and nobody takes part in a split for them.
            assert world.splits == []
            seen.append(world.partitions)
    assert seen[0] == seen[1] == seen[2]


def test_groups_over_gloo_would_keep_a_bound_world_waiting():
    """Why they are made as if no device were bound: members of a gloo group split nothing, the others do."""
    stages = [[0, 1], [2, 3]]
    taken = {}
    for rank in range(4):
        with fake_world(rank, 4, nccl=True) as world:
            for ranks in stages:
                before = len(world.splits)
                dist.new_group(ranks, backend="gloo")
                taken.setdefault(str(ranks), []).append(len(world.splits) - before)
            world.splits.clear()
            assert process_groups.make_host_groups(stages) is not None
            assert world.splits == []
            assert str(dist.group.WORLD.bound_device_id) == "cuda:0"
    assert taken == {"[0, 1]": [0, 0, 1, 1], "[2, 3]": [1, 1, 0, 0]}


def test_groups_that_only_members_make_are_called_differently_where_a_script_has_made_some():
    """Why they aren't made by members only: the name, under which they meet, counts the groups that a rank is in."""
    names = {}
    for rank in (0, 2):
        with fake_world(rank, 4):
            dist.new_group([0, 1])  # a script's own
            names[rank] = dist.new_group([0, 2], use_local_synchronization=True).group_name
    assert names[0] != names[2]
    for rank in (0, 2):
        with fake_world(rank, 4):
            dist.new_group([0, 1])
            names[rank] = process_groups.make_host_groups([[0, 2], [1, 3]]).group_name
    assert int(names[2]) - int(names[0]) == 0


def test_nccl_is_asked_for_priority_along_axes_and_few_blocks_between_stages():
    with fake_world(5, 16, nccl=True) as world:
        mesh = Mesh(MeshShape(1, 2, 2), pipe=2, rank=5, world_size=16)
        mesh.connect()
        by_ranks = {
            str(partition[0]): options for partition, options in zip(world.partitions, world.options, strict=True)
        }
        along, channels = by_ranks["[0, 1]"], by_ranks["[0, 8]"]
        assert (along.is_high_priority_stream, along.config.max_ctas) == (True, None)
        assert (channels.is_high_priority_stream, channels.config.max_ctas) == (False, 4)
        replicas = by_ranks["[0, 4]"]
        assert (replicas.is_high_priority_stream, replicas.config.max_ctas) == (False, None)
        options = process_groups._options("axis", timedelta(seconds=7))
        assert options._timeout == timedelta(seconds=7)
    with fake_world(0, 2) as world:
        connected((1, 2, 1), 1, 0, 2)
        assert world.options == [None, None, None], "gloo has none"


@pytest.mark.parametrize(
    ("nodes", "spans"),
    [("aaaaaaaa", False), ("aabbccdd", False), ("aaaabbbb", False), ("abababab", True)],
    ids=["one node", "a node for each mesh", "a node for each stage", "every mesh on two"],
)
def test_nodes_are_found_by_host_name_and_only_gloo_sends_directly(nodes, spans):
    # Two stages of two replicas of two ranks: 0 and 1 are a mesh.
    with fake_world(1, 8, nccl=True, nodes=list(nodes)):
        mesh = Mesh(MeshShape(1, 2, 1), pipe=2, rank=1, world_size=8)
        mesh.connect()
        assert (mesh.spans_nodes, mesh.spans_networks) == (spans, False)
    with fake_world(1, 8, nodes=list(nodes)):
        mesh = Mesh(MeshShape(1, 4, 1), pipe=2, rank=1, world_size=8)
        mesh.connect()
        assert mesh.spans_nodes == (nodes in ("abababab", "aabbccdd")), "ranks 0 to 3 are a mesh"


def test_a_group_that_the_mesh_has_made_makes_no_other_one():
    with fake_world(5, 16) as world:
        mesh = connected((1, 2, 2), 2, 5, 16)
        before = list(world.own)
        groups = (mesh.data_parallel_group, mesh.mesh_group, mesh.pipe_group, mesh.model_parallel_group)
        assert [dist.get_world_size(group) for group in groups] == [2, 4, 2, 8]
        assert world.own == before


def test_a_framework_that_asks_for_the_replicas_of_a_single_one_gets_a_group_of_this_rank_alone():
    with fake_world(3, 4, nccl=True) as world:
        mesh = connected((1, 2, 2), 1, 3, 4)
        assert [3] not in world.own
        assert dist.get_process_group_ranks(mesh.data_parallel_group) == [3]
        assert mesh.data_parallel_group is mesh.pipe_group
        assert world.splits == []
    assert not distributed_c10d._world.pg_map
