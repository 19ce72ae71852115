"""Properties of the pure parts: coordinates, sharding specs, key/value heads, the byte count."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import AXES, MeshShape, Topology
from cuboid.errors import MeshError
from cuboid.models.architectures.attention_heads import HeadCounts, plan_key_value_heads
from cuboid.planner.comm_formula import BlockSizes, layer_bytes
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec, put_shard, take_shard

meshes = st.builds(MeshShape, *[st.integers(1, 4)] * 3)


def ranks_of(mesh):
    return [Mesh(mesh, rank=rank, world_size=mesh.size) for rank in range(mesh.size)]


@given(meshes, st.integers(1, 3), st.integers(1, 3))
def test_rank_and_coordinate_are_inverse(mesh, replicas, stages):
    topology = Topology(mesh, mesh.size * replicas * stages, pipe=stages)
    coordinates = [topology.coordinate(rank) for rank in range(topology.world_size)]
    assert [topology.rank(at) for at in coordinates] == list(range(topology.world_size))
    assert len(set(coordinates)) == topology.world_size


@given(meshes, st.integers(1, 2), st.sets(st.sampled_from(AXES), min_size=1))
def test_groups_partition_the_world_in_index_order(mesh, replicas, axes):
    topology = Topology(mesh, mesh.size * replicas)
    groups = topology.groups(tuple(axes))
    assert sorted(rank for group in groups for rank in group) == list(range(topology.world_size))
    in_rank_order = [axis for axis in ("batch", "hidden", "sequence") if axis in axes]
    for group in groups:
        # A rank's place in its process group is its index along the axes, which gathers rely on.
        assert [topology.coordinate(rank).index(in_rank_order, mesh) for rank in group] == list(range(len(group)))


def test_a_world_that_the_mesh_does_not_divide_is_refused():
    with pytest.raises(MeshError, match="2×2×2 needs a multiple of 8 ranks, but the world has 12"):
        Topology(MeshShape(2, 2, 2), 12)


@pytest.mark.parametrize("text", ["2x2", "2x2x", "axbxc", "2,2,2", "0x1x1"])
def test_meshes_that_are_none_are_refused(text):
    with pytest.raises(MeshError):
        MeshShape.parse(text)


@st.composite
def specs(draw):
    """A mesh and a sharding spec that it can cut: 1 or 2 dims, axes shared out at random, fused parts, ragged rows."""
    mesh = draw(meshes)
    dims = draw(st.integers(1, 2))
    owners = [draw(st.integers(0, dims)) for _ in AXES]
    order = draw(st.permutations(AXES))
    split = tuple(tuple(axis for axis in order if owners[AXES.index(axis)] == dim) for dim in range(dims))
    ragged = draw(st.booleans())
    parts = tuple(1 if ragged and dim == 0 else draw(st.integers(1, 3)) for dim in range(dims))
    shape = tuple(parts[dim] * mesh.of(*split[dim]) * draw(st.integers(1, 4)) for dim in range(dims))
    if ragged:
        shape = (draw(st.integers(1, 60)), *shape[1:])
    return mesh, ShardingSpec(shape, split, parts, ragged)


@given(specs())
def test_every_element_has_exactly_one_owner(drawn):
    mesh, spec = drawn
    assert spec.indivisible(mesh) == []
    owners = torch.zeros(spec.shape)
    for rank in ranks_of(mesh):
        for box in product(*spec.shard_intervals(mesh, rank.coordinate)):
            owners[tuple(slice(*interval) for interval in box)] += 1
    assert (owners == 1).all()


@given(meshes, st.integers(1, 400))
def test_a_vocabulary_is_cut_alike_in_a_weight_and_a_bias(mesh, size):
    split = (("sequence",), ("hidden",))
    weight = ShardingSpec((size, 4 * mesh.hidden), split, ragged=True)
    bias = ShardingSpec((size,), split[:1], ragged=True)
    assert bias.block_shape(mesh)[0] == weight.block_shape(mesh)[0]
    for rank in ranks_of(mesh):
        at = rank.coordinate
        assert bias.block_intervals(mesh, at)[0] == weight.block_intervals(mesh, at)[0]


@given(specs())
def test_shards_are_equal_in_shape_and_reassemble(drawn):
    mesh, spec = drawn
    full = torch.arange(1.0, math.prod(spec.shape) + 1).view(spec.shape)
    again = torch.zeros_like(full)
    for rank in ranks_of(mesh):
        shard = take_shard(full, spec, rank)
        assert tuple(shard.shape) == spec.shard_shape(mesh)
        put_shard(again, shard, spec, mesh, rank.coordinate)
    assert torch.equal(again, full)


@given(specs())
def test_shards_over_storage_concatenate_to_the_block(drawn):
    mesh, spec = drawn
    full = torch.arange(1.0, math.prod(spec.shape) + 1).view(spec.shape)
    ranks = ranks_of(mesh)
    for rank in ranks:
        same = [
            other
            for other in ranks
            if all(other.index(axis) == rank.index(axis) for axis in AXES if axis not in spec.fsdp_axes)
        ]
        gathered = torch.cat([take_shard(full, spec, other) for other in same])[: spec.block_shape(mesh)[0]]
        block = full
        for dim, intervals in enumerate(spec.block_intervals(mesh, rank.coordinate)):
            block = torch.cat([block.narrow(dim, low, high - low) for low, high in intervals], dim)
        assert torch.equal(gathered[: block.shape[0]], block)
        assert not gathered[block.shape[0] :].any()


@given(meshes, st.integers(1, 4), st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([1, 2, 4]))
def test_each_rank_gets_the_key_value_heads_of_its_queries(mesh, per_rank, kv_heads, dim):
    queries = math.lcm(mesh.of("sequence", "hidden") * per_rank, kv_heads)
    counts = HeadCounts(queries, kv_heads, dim)
    heads_per_rank = queries // mesh.of("sequence", "hidden")
    for rank in ranks_of(mesh):
        plan = plan_key_value_heads(counts, mesh, rank.coordinate)
        start = rank.index("sequence", "hidden") * heads_per_rank
        wanted = [query // (queries // kv_heads) for query in range(start, start + heads_per_rank)]
        if plan.scattered:
            first = rank.index("sequence", "hidden") * (kv_heads // mesh.of("sequence", "hidden"))
        else:
            in_block = rank.coordinate.sequence * (kv_heads // mesh.sequence) if plan.split_by_sequence else 0
            first = in_block + plan.first
        got = [first + plan.keep[query // plan.groups] for query in range(heads_per_rank)]
        assert got == wanted
        assert max(plan.keep) < plan.heads


@given(meshes, st.integers(1, 3))
def test_the_byte_count_is_that_of_the_known_schemes(mesh, scale):
    sizes = BlockSizes(hidden=48 * scale, query=48 * scale, key_value=48 * scale, intermediate=96 * scale, gated=True)
    count = layer_bytes(sizes, mesh, batch=12, length=24)
    # An axis of one rank moves nothing, and only axes that are split are named.
    assert {axis for label in count for axis in label.split("+")} <= {a for a in AXES if mesh.of(a) > 1}
    if mesh.batch == mesh.hidden == 1 and mesh.sequence > 1:
        # Megatron with sequence parallelism: 8 collectives of B·S·H, and 2 more here, which save the gathered input.
        residual = 12 * 24 * 48 * scale * 2 * (mesh.sequence - 1) / mesh.sequence
        norms = 2 * 2 * 48 * scale * 2 * (mesh.sequence - 1) / mesh.sequence
        assert count == {"sequence": round(10 * residual) + round(norms)}
    if mesh.sequence == mesh.hidden == 1 and mesh.batch > 1:
        # FSDP: each parameter gathered twice and its gradient scattered once; norms are gathered once.
        weights = (4 * 48 * 48 + 3 * 48 * 96) * scale**2 * 2 * (mesh.batch - 1) / mesh.batch
        norms = 2 * 2 * 48 * scale * 2 * (mesh.batch - 1) / mesh.batch
        assert abs(count["batch"] - 3 * weights - norms) <= 3


@pytest.mark.parametrize(
    ("shape", "pipe", "hosts", "expected"),
    [
        ((1, 2, 2), 2, "aaaabbbb", (["stages"], ["hidden", "sequence"])),
        ((1, 2, 2), 1, "aaaabbbb", (["replicas"], ["hidden", "sequence"])),
        ((2, 2, 2), 1, "aabbccdd", (["batch", "hidden"], ["sequence"])),
        ((1, 1, 1), 1, "ab", (["replicas"], [])),
        # Ranks that aren't numbered by host.
        ((1, 4, 1), 2, "abababab", (["sequence"], ["stages"])),
    ],
)
def test_axes_cross_hosts_where_ranks_that_differ_in_them_alone_are_on_several(shape, pipe, hosts, expected):
    assert Topology(MeshShape(*shape), len(hosts), pipe).axes_between(hosts) == expected
