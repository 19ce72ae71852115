"""Per-rank files: writing them, assembling them again, loading them on ranks, and rejecting mismatches."""

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

import cuboid
from comparing import stored
from converting import layout, layout_section, nothing_left, run, same
from cuboid.convert.formats import block_tensors as tensors_module
from cuboid.convert.formats.block_tensors import BlockTensors
from cuboid.convert.per_rank.plan import RankPlan
from cuboid.convert.per_rank.source import open_rank_files
from cuboid.convert.per_rank.target import write_document, write_rank_files
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import AXES, MeshShape
from cuboid.errors import CheckpointError, CuboidError, UnsupportedModelError
from cuboid.tensor3d.sharding.sharded_param import local_state
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec, take_shard
from cuboid.verify import SmallModel
from cuboid.weights.rank_folder import RankFolder, RankTensor, StoredSharding, file_name

LLAMA = SmallModel("llama", heads=8, kv_heads=4, layers=3)
TIED = SmallModel("qwen3", heads=8, kv_heads=4, layers=2)
FUSED = SmallModel("gpt2", heads=8, kv_heads=8, layers=2)
EXPERTS = SmallModel("mixtral", heads=4, kv_heads=2, layers=2)

# --- writing and reading -----------------------------------------------------------------------------------------

SHAPES = st.builds(MeshShape, *[st.integers(1, 3)] * 3)


@st.composite
def laid_out(draw):
    """A mesh and a layout on it: any axes on any dims, fused dims, ragged vocabularies."""
    mesh = draw(SHAPES)
    dims = draw(st.integers(1, 3))
    owner = {axis: draw(st.integers(-1, dims - 1)) for axis in AXES}
    split = tuple(tuple(axis for axis in AXES if owner[axis] == dim) for dim in range(dims))
    ragged = draw(st.booleans())
    parts = tuple(1 if ragged and dim == 0 else draw(st.integers(1, 3)) for dim in range(dims))
    shape = [parts[dim] * mesh.of(*split[dim]) * draw(st.integers(1, 3)) for dim in range(dims)]
    if ragged:
        shape[0] = draw(st.integers(1, 40))
    return mesh, ShardingSpec(tuple(shape), split, parts, ragged)


@settings(max_examples=60)
@given(laid_out(), st.data())
def test_a_ranks_file_has_exactly_its_shards_and_all_files_together_everything(tmp_path_factory, drawn, data):
    mesh, cut = drawn
    full = torch.arange(float(torch.Size(cut.shape).numel())).view(cut.shape)
    rows = data.draw(st.lists(st.integers(1, max(cut.shape[0], 1)), max_size=4))
    blocks = list(torch.tensor_split(full, sorted(row for row in rows if row < cut.shape[0])))
    tensor = RankTensor(dtype="float32", shape=cut.shape, parameter="x", layout=StoredSharding.of(cut), stages=(0,))
    folder = tmp_path_factory.mktemp("ranks")
    plan = RankPlan(mesh, (), {"x": tensor}, ())
    tensors = BlockTensors({"x": tensor.spec}, lambda _: iter(blocks))
    write_document(folder, write_rank_files(folder, tensors, plan, lambda _: None))
    places = RankFolder.read(folder).topology
    for place in range(places.world_size):
        shard = load_file(folder / file_name(places, place))["x"]
        padded = take_shard(full, cut, Mesh(mesh, rank=place, world_size=places.world_size))
        assert torch.equal(shard, padded[: shard.shape[0]])
        assert not padded[shard.shape[0] :].any()
    height = data.draw(st.integers(1, 200))
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(tensors_module, "BLOCK_BYTES", height)
        read = open_rank_files(folder, stack, lambda _: contextlib.nullcontext(lambda _: None))
        assert torch.equal(torch.cat(list(read.blocks("x"))), full)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("small", "mesh", "stages"),
    [
        (LLAMA, "1x2x2", None),
        (LLAMA, "2x2x1", None),
        (LLAMA, "1x1x2", 3),
        (TIED, "2x1x2", None),
        (TIED, "1x1x2", 2),
        (FUSED, "2x2x2", None),
        (FUSED, "1x2x1", 2),
        (EXPERTS, "1x1x1", 2),
    ],
)
def test_a_round_trip_through_per_rank_files_is_bit_for_bit(checkpoint, tmp_path, monkeypatch, small, mesh, stages):
    path = checkpoint(small)
    monkeypatch.setattr(tensors_module, "BLOCK_BYTES", 3000)
    run(path, tmp_path / "ranks", config=layout(mesh, stages))
    document = RankFolder.read(tmp_path / "ranks")
    assert len(document.files) == MeshShape.parse(mesh).size * (stages or 1)
    for name in document.files:
        with safe_open(tmp_path / "ranks" / name, "pt") as file:
            # The safetensors library reads them too.
            assert set(file.keys()) <= set(document.tensors)
    run(tmp_path / "ranks", tmp_path / "back")
    assert same(tmp_path / "back", path)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads(
        (Path(path) / "config.json").read_text()
    )


def test_each_ranks_file_has_its_share_of_the_bytes(checkpoint, tmp_path):
    run(checkpoint(LLAMA), tmp_path / "ranks", config=layout("2x2x2"))
    document = RankFolder.read(tmp_path / "ranks")
    held = [sum(x.numel() for x in load_file(tmp_path / "ranks" / name).values()) for name in document.files]
    assert sum(held) == sum(x.numel() for x in stored(checkpoint(LLAMA)).values())
    assert max(held) - min(held) <= 0.02 * max(held)


def test_per_rank_files_are_converted_to_another_layout(checkpoint, tmp_path):
    run(checkpoint(LLAMA), tmp_path / "one", config=layout("1x2x2", 2, (1, 2)))
    run(tmp_path / "one", tmp_path / "other", config=layout("4x1x1"), world_size=8, dtype=torch.bfloat16)
    run(tmp_path / "other", tmp_path / "back")
    before, after = stored(checkpoint(LLAMA)), stored(tmp_path / "back")
    assert all(torch.equal(after[name], x.bfloat16()) for name, x in before.items())


def test_tensor_names_of_old_checkpoints_are_kept(checkpoint, tmp_path):
    """The GPT-2 of 2019 was saved without the base model's prefix, and with masks that are ignored now."""
    old = tmp_path / "old"
    shutil.copytree(checkpoint(FUSED), old)
    tensors = {name.removeprefix("transformer."): x for name, x in stored(old).items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 4, 4).tril() for layer in range(2)}
    save_file(tensors | masks, old / "model.safetensors", metadata={"format": "pt"})
    output = run(old, tmp_path / "ranks", config=layout("1x2x1", 2))
    assert "left out: tensor h.0.attn.bias, which the model doesn't use" in output
    run(tmp_path / "ranks", tmp_path / "back")
    after = stored(tmp_path / "back")
    assert after.keys() == tensors.keys()
    assert all(torch.equal(after[name], x) for name, x in tensors.items())


def alter(file):
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda folder: (folder / "rank-00001-of-00004.safetensors").unlink(), r"rank-00001-of-00004\S+ is missing"),
        (
            lambda folder: os.truncate(folder / "rank-00002-of-00004.safetensors", 5000),
            r"rank-00002-of-00004\S+ is 5000 bytes long instead of \d+",
        ),
        (lambda folder: alter(folder / "rank-00003-of-00004.safetensors"), r"rank-00003-of-00004\S+ its sha256"),
        (
            lambda folder: shutil.copy(
                folder / "rank-00003-of-00004.safetensors", folder / "rank-00004-of-00004.safetensors"
            ),
            r"rank-00004-of-00004\S+ is foreign",
        ),
        (lambda folder: (folder / "shards.json").write_text("{}"), r"shards\.json: can't be understood"),
    ],
)
def test_damaged_per_rank_files_are_rejected_with_their_names(checkpoint, tmp_path, damage, expected):
    run(checkpoint(LLAMA), tmp_path / "ranks", config=layout("1x2x2"))
    damage(tmp_path / "ranks")
    with pytest.raises(CheckpointError, match=expected):
        run(tmp_path / "ranks", tmp_path / "back")
    assert nothing_left(tmp_path / "back")


def test_a_checkpoint_that_ranks_could_not_load_is_rejected_with_the_tensors_name(checkpoint, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(checkpoint(LLAMA), source)
    weights = stored(source)

    def assert_rejected(tensors, expected, **options):
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CuboidError, match=expected):
            run(source, tmp_path / "ranks", **{"config": layout("1x2x2"), **options})
        assert nothing_left(tmp_path / "ranks")

    name = "model.layers.1.mlp.up_proj.weight"
    assert_rejected({key: x for key, x in weights.items() if key != name}, f"no tensor for {name}")
    assert_rejected(weights | {"model.extra.weight": torch.ones(2)}, r"a tensor model\.extra\.weight")
    assert_rejected(weights | {name: torch.ones(3, 3)}, rf"{name} is of shape \[3, 3\]")
    assert_rejected(weights, "world.* 6", world_size=6)
    assert_rejected(weights, "divide", config=layout("1x3x1"))
    assert_rejected(weights, "stages", config=layout("1x1x1", 4))


def test_experts_that_are_stored_separately_are_not_sharded_by_a_mesh(checkpoint, tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"MixtralForCausalLM stores \S+ in another form"):
        run(checkpoint(EXPERTS), tmp_path / "ranks", config=layout("1x2x1"))


# --- loading -----------------------------------------------------------------------------------------------------


def load(monkeypatch, folder, config, rank, ranks, **kwargs):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    return cuboid.from_pretrained(folder, config, **kwargs)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("small", "mesh", "stages"),
    [
        (LLAMA, "1x2x2", None),
        (LLAMA, "1x2x1", 3),
        (TIED, "2x1x2", None),
        (TIED, "1x1x2", 2),
        (FUSED, "2x2x2", None),
        (FUSED, "1x2x1", 2),
        (EXPERTS, "1x1x1", 2),
    ],
)
def test_loading_a_ranks_file_equals_slicing_the_full_checkpoint(
    checkpoint, tmp_path, monkeypatch, small, mesh, stages
):
    path, config = checkpoint(small), layout_section(mesh, stages)
    run(path, tmp_path / "ranks", config=layout(mesh, stages))
    places = MeshShape.parse(mesh).size * (stages or 1)
    # All of the first replica, and one of the second, which reads the same files.
    for rank in (*range(places), 2 * places - 1):
        cut = load(monkeypatch, path, config, rank, 2 * places)
        rank_folder = _machine_of(cut.cuboid.mesh, tmp_path)
        model = load(monkeypatch, rank_folder, config, rank, 2 * places)
        wanted, state = local_state(cut), local_state(model)
        assert state.keys() == wanted.keys()
        tensors = [name for name, x in wanted.items() if isinstance(x, torch.Tensor)]
        assert all(torch.equal(state[name], wanted[name]) for name in tensors)
        assert not any(x.is_meta for x in (*model.parameters(), *model.buffers()))
        assert model.config.to_diff_dict() == cut.config.to_diff_dict()


def _machine_of(mesh, tmp_path):
    """A folder as on a rank's machine: with the rank's own file, and the files beside the weights."""
    document = RankFolder.read(tmp_path / "ranks")
    rank_folder = tmp_path / f"rank {mesh.rank}"
    rank_folder.mkdir()
    for file in (tmp_path / "ranks").iterdir():
        if not file.name.startswith("rank-") or file.name == document.file_of(mesh.coordinate):
            shutil.copy(file, rank_folder)
    return rank_folder


def test_options_of_from_pretrained_are_respected(checkpoint, tmp_path, monkeypatch):
    run(checkpoint(LLAMA), tmp_path / "ranks", config=layout("1x2x1"))
    config = layout_section("1x2x1")
    model = load(monkeypatch, tmp_path / "ranks", config, 1, 2, dtype=torch.bfloat16, attention_dropout=0.25)
    full_precision = load(monkeypatch, checkpoint(LLAMA), config, 1, 2)
    assert model.config.attention_dropout == 0.25
    assert all(
        torch.equal(x, y.bfloat16()) for x, y in zip(model.parameters(), full_precision.parameters(), strict=True)
    )
    with cuboid.scope(config):
        model, report = LlamaForCausalLM.from_pretrained(
            tmp_path / "ranks", attention_dropout=0.5, output_loading_info=True
        )
    assert model.config.attention_dropout == 0.5
    assert not report["missing_keys"]


@pytest.mark.parametrize(
    ("config", "ranks", "expected"),
    [
        (layout_section("1x4x1"), 4, r"mesh 1×2×2 .* asks for a mesh of 1×4×1 in 1 pipeline stage;"),
        (layout_section("1x2x2", 2), 8, r"mesh 1×2×2 .* asks for a mesh of 1×2×2 in 2 pipeline stages;"),
        (layout_section("1x2x2"), 6, r"1×2×2.* 6"),
    ],
)
def test_another_layout_than_the_files_is_rejected_with_both_named(
    checkpoint, tmp_path, monkeypatch, config, ranks, expected
):
    run(checkpoint(LLAMA), tmp_path / "ranks", config=layout("1x2x2"))
    with pytest.raises(CuboidError, match=expected):
        load(monkeypatch, tmp_path / "ranks", config, 0, ranks)


def test_another_division_of_layers_is_rejected_with_both_named(checkpoint, tmp_path, monkeypatch):
    run(checkpoint(LLAMA), tmp_path / "ranks", config=layout("1x2x1", 2, (1, 2)))
    with pytest.raises(CheckpointError, match=r"2 stages of 1, 2 layers.*2 stages of 2, 1 layers"):
        load(monkeypatch, tmp_path / "ranks", layout_section("1x2x1", 2, (2, 1)), 0, 4)


@pytest.mark.ci
def test_an_auto_mesh_loads_files_for_the_same_mesh(checkpoint, tmp_path, monkeypatch):
    automatic = {"tensor_parallel": {"mode": "3d_tensor", "mesh": "auto", "size": 4}}
    run(checkpoint(LLAMA), tmp_path / "ranks", config=cuboid.parse_config(automatic))
    model = load(monkeypatch, tmp_path / "ranks", automatic, 3, 4)
    cut = load(monkeypatch, checkpoint(LLAMA), automatic, 3, 4)
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), cut.parameters(), strict=True))


def test_a_missing_or_truncated_file_is_an_error_of_its_rank_only(checkpoint, tmp_path, monkeypatch):
    run(checkpoint(LLAMA), tmp_path / "ranks", config=layout("1x2x1"))
    file = tmp_path / "ranks" / "rank-00001-of-00002.safetensors"
    os.truncate(file, 5000)
    load(monkeypatch, tmp_path / "ranks", layout_section("1x2x1"), 0, 2)
    with pytest.raises(CheckpointError, match=r"rank-00001-of-00002\S+ is 5000 bytes long"):
        load(monkeypatch, tmp_path / "ranks", layout_section("1x2x1"), 1, 2)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"rank-00001-of-00002\S+ is missing, and rank 1 of 2 reads it"):
        load(monkeypatch, tmp_path / "ranks", layout_section("1x2x1"), 1, 2)
