"""Tensor files compared with the safetensors library, the plan of a save, reading shards, and optimizer states."""

import json
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from cuboid.checkpoint.format.tensor_file import TensorFile, TensorFileWriter, TensorSpec, row_blocks
from cuboid.checkpoint.metadata import ShardRange, TensorMetadata
from cuboid.checkpoint.optimizer_state import OptimizerAdapter, OptimizerTensor, Slot, merge_stages
from cuboid.checkpoint.reader import LoadPlan, TensorFolder
from cuboid.checkpoint.save_planner import assign, find_sources
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import MeshShape
from cuboid.errors import CheckpointError
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec, take_shard

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
TENSORS = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
        lambda name: name != "__metadata__"
    ),
    st.tuples(st.sampled_from(DTYPES), SHAPES),
    max_size=5,
)


def filled(dtype, shape):
    values = torch.arange(1, torch.Size(shape).numel() + 1).view(shape)
    return (values % 2).bool() if dtype is torch.bool else values.to(dtype)


def write(path, tensors, **options):
    specs = {name: TensorSpec(x.dtype, tuple(x.shape)) for name, x in tensors.items()}
    with TensorFileWriter(path, specs, **options) as file:
        for name in file.specs:
            file.write(name, tensors[name])
    return file.close()


def same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


# --- files ---------------------------------------------------------------------------------------------------------


@given(TENSORS)
def test_safetensors_reads_our_files(tmp_path_factory, described):
    tensors = {name: filled(*one) for name, one in described.items()}
    path = tmp_path_factory.mktemp("file") / "x.safetensors"
    record = write(path, tensors)
    read = load_file(path)
    assert read.keys() == tensors.keys()
    assert all(same(read[name], tensors[name]) for name in tensors)
    assert record.bytes == path.stat().st_size


@given(TENSORS)
def test_we_read_the_files_of_safetensors(tmp_path_factory, described):
    tensors = {name: filled(*one) for name, one in described.items()}
    path = tmp_path_factory.mktemp("file") / "x.safetensors"
    save_file(tensors, path, metadata={"who": "them"})
    with TensorFile(path) as file:
        assert file.metadata == {"who": "them"}
        assert file.specs.keys() == tensors.keys()
        assert all(same(file.read(name), tensors[name]) for name in tensors)


@given(st.data(), st.sampled_from(DTYPES), st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_any_box_can_be_read(tmp_path_factory, data, dtype, shape):
    path = tmp_path_factory.mktemp("file") / "x.safetensors"
    full = filled(dtype, shape)
    write(path, {"x": full})
    box = []
    for size in shape:
        first = data.draw(st.integers(0, size))
        box.append(slice(first, data.draw(st.integers(first, size))))
    with TensorFile(path) as file:
        assert same(file.read("x", box), full[tuple(box)])
        rows = torch.cat([file.read("x", [rows]) for rows in row_blocks(file.specs["x"], 16)])
        assert same(rows, full)


def test_a_tensor_can_be_written_in_blocks_of_rows(tmp_path):
    full = filled(torch.float32, (7, 3))
    with TensorFileWriter(tmp_path / "x", {"x": TensorSpec(torch.float32, (7, 3))}) as file:
        for rows in full.split(2):
            file.write_rows("x", rows)
    assert same(load_file(tmp_path / "x")["x"], full)


def test_a_file_is_removed_if_writing_fails(tmp_path):
    specs = {"x": TensorSpec(torch.float32, (2,)), "y": TensorSpec(torch.float32, (2,))}
    with pytest.raises(AssertionError, match="never written"), TensorFileWriter(tmp_path / "x", specs) as file:
        file.write("x", torch.zeros(2))
    assert not (tmp_path / "x").exists()
    (tmp_path / "x").write_text("precious")
    with pytest.raises(FileExistsError):
        TensorFileWriter(tmp_path / "x", specs)
    assert (tmp_path / "x").read_text() == "precious"
    with pytest.raises(CheckpointError, match=r"z is of torch\.complex128"):
        TensorFileWriter(tmp_path / "z", {"z": TensorSpec(torch.complex128, (2,))})


def _with_header(header, data=b"\0" * 8):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a whole safetensors file"),
        (b"\xff" * 40, "is not a whole safetensors file"),
        (struct.pack("<Q", 3) + b"{x}", "can't be understood"),
        (_with_header([1]), "can't be understood"),
        (_with_header({"x": {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]}}), "can't be understood"),
        (_with_header({"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}), "gives x bytes 0 to 8"),
        (_with_header({"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}), "gives x bytes 4 to 8"),
        (_with_header({"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}), "truncated"),
        (_with_header({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}), "truncated"),
    ],
)
def test_malformed_files_are_rejected_with_their_names(tmp_path, content, message):
    (tmp_path / "bad.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as error:
        TensorFile(tmp_path / "bad.safetensors")
    assert "bad.safetensors" in str(error.value)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path):
    path = tmp_path / "x.safetensors"
    write(path, {"x": filled(torch.float32, (100,))})
    with TensorFile(path) as file:
        with open(path, "r+b") as other:
            other.truncate(path.stat().st_size - 40)
        with pytest.raises(CheckpointError, match="ends in the middle of x"):
            file.read("x")


# --- the plan of a save --------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 9))
def test_writers_get_about_the_same_number_of_bytes(sizes, writers):
    ranks = [10 + number for number in range(writers)]
    chosen = assign(sizes, ranks)
    assert len(chosen) == len(sizes)
    assert set(chosen) <= set(ranks)
    loads = [sum(size for size, rank in zip(sizes, chosen, strict=True) if rank == writer) for writer in ranks]
    # No writer's load gets smaller by moving its last item to another writer.
    assert max(loads) - min(loads) <= max(sizes, default=0)


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 3), st.data())
def test_sources_cover_every_shard_exactly_once(numel, cells, replicas, data):
    """Whether a replica has all of a shard, none of it, or its share."""
    places = [[replica * cells + cell for replica in range(replicas)] for cell in range(cells)]
    is_replicated = data.draw(st.booleans())
    cuts = sorted(data.draw(st.lists(st.integers(0, numel), min_size=replicas - 1, max_size=replicas - 1)))
    ranges = [(0, numel)] * replicas if is_replicated else list(zip([0, *cuts], [*cuts, numel], strict=True))
    held = {rank: {0: ranges[replica]} for ranks in places for replica, rank in enumerate(ranks)}
    writer = data.draw(st.sampled_from([rank for ranks in places for rank in ranks]))
    sources = find_sources("x", 0, numel, places, held, writer)
    for cell, ranks in enumerate(places):
        of_cell = [source for source in sources if source.cell == cell]
        assert [index for source in of_cell for index in range(source.start, source.stop)] == list(range(numel))
        for source in of_cell:
            start, stop = held[source.source][0]
            assert start <= source.start <= source.stop <= stop
            assert source.source in ranks
        if is_replicated:
            assert of_cell[0].source == (writer if writer in ranks else ranks[writer // cells])


def test_elements_that_no_rank_has_are_an_error():
    with pytest.raises(CheckpointError, match="elements 3 to 5 of shard 0 of x"):
        find_sources("x", 0, 8, [[0, 1]], {0: {0: (0, 3)}, 1: {0: (5, 8)}}, 0)
    with pytest.raises(CheckpointError, match="elements 5 to 8 of shard 0 of x"):
        find_sources("x", 0, 8, [[0, 1]], {0: {0: (0, 3)}, 1: {0: (3, 5)}}, 0)


# --- reading shards ------------------------------------------------------------------------------------------------

LAYOUTS = {
    "up": ShardingSpec((12, 8), (("sequence",), ("hidden",))),
    "down": ShardingSpec((8, 12), (("hidden",), ("sequence",))),
    "fused": ShardingSpec((8, 36), (("hidden",), ("sequence",)), (1, 3)),
    "vocabulary": ShardingSpec((13, 8), (("sequence",), ("hidden",)), ragged=True),
    "norm": ShardingSpec((12,), (("hidden",),)),
}


@given(st.data(), st.sampled_from(sorted(LAYOUTS)), st.sampled_from(["1x2x2", "2x2x1", "3x1x2", "1x1x1", "2x1x4"]))
def test_reading_a_range_equals_slicing_the_shard_in_memory(tmp_path_factory, data, name, mesh):
    layout, shape = LAYOUTS[name], MeshShape.parse(mesh)
    if layout.indivisible(shape):
        return
    full = filled(torch.float32, layout.shape)
    folder = tmp_path_factory.mktemp("folder")
    write(folder / "model.safetensors", {name: full})
    rank = data.draw(st.integers(0, shape.size - 1))
    here = Mesh(shape, rank=rank, world_size=shape.size)
    shard = take_shard(full, layout, here).view(-1)
    start = data.draw(st.integers(0, shard.numel()))
    stop = data.draw(st.integers(start, shard.numel()))
    target = ShardRange(start, torch.zeros(stop - start))
    LoadPlan(folder, {name: target}, {name: TensorMetadata(layout.shape, layout)}, required=[name]).read(here)
    assert same(target.values, shard[start:stop])


def test_folders_without_weights_or_tensors_are_rejected(tmp_path):
    with pytest.raises(CheckpointError, match="neither"):
        TensorFolder(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("[]")
    with pytest.raises(CheckpointError, match="is not an index"):
        TensorFolder(tmp_path)
    write(tmp_path / "a.safetensors", {"x": torch.zeros(2)})
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors"}}))
    mesh = Mesh(MeshShape(), rank=0, world_size=1)
    with TensorFolder(tmp_path) as files:
        with pytest.raises(CheckpointError, match=r"a\.safetensors: has no tensor y"):
            files.read("y")
        with pytest.raises(CheckpointError, match=r"b\.safetensors: can't be opened"):
            files.read("z")
        with pytest.raises(CheckpointError, match="has no tensor w"):
            files.read("w")
    plan = LoadPlan(tmp_path, {"x": ShardRange(0, torch.zeros(3))}, {"x": TensorMetadata((3,), None)}, required=())
    with pytest.raises(CheckpointError, match=r"x is of shape \[2\], but the model's is \[3\]"):
        plan.read(mesh)


# --- optimizers ----------------------------------------------------------------------------------------------------


def stepped(kind, **options):
    torch.manual_seed(0)
    parameters = {"a": torch.nn.Parameter(torch.randn(3, 2)), "b": torch.nn.Parameter(torch.randn(2))}
    optimizer = kind([{"params": [p], "lr": 0.1 * (n + 1)} for n, p in enumerate(parameters.values())], **options)
    for _ in range(2):
        for p in parameters.values():
            p.grad = torch.randn_like(p)
        optimizer.step()
    return parameters, optimizer


KINDS = [
    (torch.optim.AdamW, {"weight_decay": 0.1}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.RMSprop, {"centered": True}),
    (torch.optim.Adagrad, {}),
    (torch.optim.NAdam, {}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=[f"{kind.__name__}{options}" for kind, options in KINDS])
def test_a_fresh_optimizer_restores_the_state_of_another(kind, options):
    parameters, optimizer = stepped(kind, **options)
    adapter = OptimizerAdapter.direct(optimizer, {id(p): name for name, p in parameters.items()})
    state = adapter.state()
    numbers, groups = merge_stages([state])

    others = {name: torch.nn.Parameter(p.detach().clone()) for name, p in parameters.items()}
    # One group for each parameter, with settings that are overwritten.
    fresh = kind([{"params": [p], "lr": 9.0} for p in reversed(others.values())], **options)
    taking = OptimizerAdapter.direct(fresh, {id(p): name for name, p in others.items()})
    taking.allocate(state.quantities)
    for quantity, runs in taking.state().quantities.items():
        for name, run in runs.items():
            run.values.copy_(state.quantities[quantity][name].values)
    taking.restore(numbers, groups)
    for _ in range(3):
        for name, p in parameters.items():
            p.grad = torch.randn_like(p)
            others[name].grad = p.grad.clone()
        optimizer.step()
        fresh.step()
    assert all(torch.equal(parameters[name], others[name]) for name in parameters)


@pytest.mark.parametrize("capturable", [False, True])
def test_steps_are_restored_where_the_optimizer_reads_them(capturable):
    """Fused and capturable optimizers read them in a kernel on the parameter's device, others on the host."""
    parameter = torch.nn.Parameter(torch.empty(3, device="meta"))
    optimizer = torch.optim.AdamW([parameter], capturable=capturable)
    adapter = OptimizerAdapter.direct(optimizer, {id(parameter): "x"})
    adapter.allocate(["exp_avg", "exp_avg_sq"])
    groups = [{"lr": 0.5, "capturable": capturable, "parameters": ["x"]}]
    adapter.restore({"x": {"step": torch.tensor(7.0)}}, groups)
    assert optimizer.state[parameter]["step"].device.type == ("meta" if capturable else "cpu")
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_state_that_no_other_layout_could_load_is_rejected():
    parameters, optimizer = stepped(torch.optim.Adafactor)
    adapter = OptimizerAdapter.direct(optimizer, {id(p): name for name, p in parameters.items()})
    with pytest.raises(CheckpointError, match="'row_var' of a"):
        adapter.state()


def test_a_flat_copy_is_split_by_parameter():
    """A flat copy with the end of one parameter and the beginning of another."""
    flat = torch.nn.Parameter(torch.arange(5.0))
    optimizer = torch.optim.Adam([flat], lr=0.1)
    flat.grad = torch.ones(5)
    optimizer.step()
    flat_tensor = OptimizerTensor(flat, (Slot("a", 4, 0, 2), Slot("b", 0, 2, 3)), ("a", "b", "c"))
    state = OptimizerAdapter(optimizer, [[flat_tensor]], has_master=True).state()
    assert set(state.quantities) == {"exp_avg", "exp_avg_sq", "master"}
    ranges = state.quantities["master"]
    assert (ranges["a"].start, ranges["a"].stop, ranges["b"].start, ranges["b"].stop) == (4, 6, 0, 3)
    assert torch.equal(torch.cat([ranges["a"].values, ranges["b"].values]), flat)
    # Another replica has the elements of "c".
    assert (ranges["c"].start, ranges["c"].stop) == (0, 0)
    assert state.numbers["c"]["step"] == state.numbers["a"]["step"] == 1


def settings_of(optimizer):
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def test_groups_stay_apart_while_a_schedule_gives_them_the_same_settings():
    parameters, optimizer = stepped(torch.optim.AdamW)
    names = {id(p): name for name, p in parameters.items()}
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    numbers, groups = merge_stages([OptimizerAdapter.direct(optimizer, names).state()])
    assert [group["parameters"] for group in groups] == [["a"], ["b"]]
    # A script makes its groups with the rates of the first step again.
    again = torch.optim.AdamW([{"params": [p], "lr": 0.1 * (n + 1)} for n, p in enumerate(parameters.values())])
    OptimizerAdapter.direct(again, names).restore(numbers, groups)
    assert settings_of(again) == settings_of(optimizer)
    together = torch.optim.AdamW(parameters.values())
    OptimizerAdapter.direct(together, names).restore(numbers, groups)
    assert settings_of(together) == settings_of(optimizer)[:1]


def test_groups_of_stages_are_one_by_their_place():
    names, stages = {}, []
    for stage in ("first", "last"):
        parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
        names.update({id(p): f"{stage}.{number}" for number, p in enumerate(parameters)})
        optimizer = torch.optim.SGD([{"params": [parameters[0]]}, {"params": [parameters[1]]}], lr=0.1)
        stages.append(OptimizerAdapter.direct(optimizer, names).state())
    _, groups = merge_stages(stages)
    assert [group["parameters"] for group in groups] == [["first.0", "last.0"], ["first.1", "last.1"]]
    stages[1].groups[1]["lr"] = 0.2
    with pytest.raises(CheckpointError, match=r"group 1, that of first\.1, has lr 0\.1 on one stage and 0\.2"):
        merge_stages(stages)
    # A script that looks for a group's parameters finds it where they are.
    stages[0].groups[1]["parameters"] = []
    assert merge_stages(stages)[1][1]["lr"] == 0.2
    stages[1].groups.append({**stages[1].groups[1], "parameters": ["last.2"]})
    with pytest.raises(CheckpointError, match="have 2 and 3 parameter groups"):
        merge_stages(stages)


@pytest.mark.parametrize(
    ("option", "here", "then"), [("weight_decay", "0.3 and 0.0", 0.1), ("lr", "0.5 and 0.25", 0.1)]
)
def test_parameters_of_one_group_cannot_get_different_settings_in_silence(option, here, then):
    parameters, names = stepped(torch.optim.AdamW)[0], {}
    names = {id(p): name for name, p in parameters.items()}
    together = torch.optim.AdamW(parameters.values(), lr=0.1, weight_decay=0.1)
    numbers, groups = merge_stages([OptimizerAdapter.direct(together, names).state()])
    values = map(float, here.split(" and "))
    split = torch.optim.AdamW(
        [{"params": [p], option: value} for p, value in zip(parameters.values(), values, strict=True)]
    )
    before = settings_of(split)
    with pytest.raises(
        CheckpointError, match=f"a and b are in parameter groups with {option} {here} here, .* with {then}"
    ):
        OptimizerAdapter.direct(split, names).restore(numbers, groups)
    assert settings_of(split) == before


def test_parameters_with_different_settings_cannot_share_a_group():
    parameters, optimizer = stepped(torch.optim.AdamW)
    names = {id(p): name for name, p in parameters.items()}
    numbers, groups = merge_stages([OptimizerAdapter.direct(optimizer, names).state()])
    together = OptimizerAdapter.direct(torch.optim.AdamW(parameters.values()), names)
    with pytest.raises(CheckpointError, match="a and b are in one parameter group here"):
        together.restore(numbers, groups)
    flat = torch.nn.Parameter(torch.zeros(8))
    flat_tensor = OptimizerTensor(flat, (Slot("a", 0, 0, 6), Slot("b", 0, 6, 2)), ("a", "b"))
    numbers["b"] = {"step": torch.tensor(7.0)}
    with pytest.raises(CheckpointError, match="one state for a and 1 more"):
        OptimizerAdapter(torch.optim.AdamW([flat]), [[flat_tensor]]).restore(numbers, groups[:1])
