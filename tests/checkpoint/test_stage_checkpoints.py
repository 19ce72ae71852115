"""Pipeline stages read only their own tensors, and write one ordinary checkpoint together."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, core_model_loading
from transformers.distributed import sharding_utils

import cuboid
from comparing import stored
from cuboid.distributed.axis_collectives import own_slice
from cuboid.distributed.topology import MeshShape
from cuboid.errors import CheckpointError
from cuboid.models.batch.local_batch import IGNORE_INDEX
from cuboid.models.cross_entropy.chunked import chunked_loss
from cuboid.models.cross_entropy.lm_head import Head
from cuboid.models.stages.stage_cut import draw_outline
from cuboid.tensor3d.layers.vocab_cross_entropy import shifted
from cuboid.tensor3d.sharding.sharded_param import local_state
from cuboid.verify import SmallModel

LAYERS = 4
TIED = SmallModel("gpt2", heads=8, kv_heads=8, layers=LAYERS)
UNTIED = SmallModel("llama", heads=8, kv_heads=8, layers=LAYERS)


def pipeline(stages, mesh="1x1x1", balance="layers"):
    shape = MeshShape.parse(mesh)
    axes = {"batch": shape.batch, "sequence": shape.sequence, "hidden": shape.hidden}
    return {
        "tensor_parallel": {"mode": "3d_tensor", "mesh": axes},
        "pipeline": {"engine": "seq1f1b", "stages": stages, "segments": 2, "stage_balance": balance},
    }


class CountedBytes:
    """Counts the bytes of tensors that transformers' loader reads."""

    def __init__(self, monkeypatch):
        self.count = 0
        copy, shard = core_model_loading._materialize_copy, sharding_utils.DtensorShardOperation.shard_tensor

        def copied(*args, **kwargs):
            return self._counted(copy(*args, **kwargs))

        def sharded(*args, **kwargs):
            return self._counted(shard(*args, **kwargs))

        monkeypatch.setattr(core_model_loading, "_materialize_copy", copied)
        monkeypatch.setattr(sharding_utils.DtensorShardOperation, "shard_tensor", sharded)

    def _counted(self, tensor):
        self.count += tensor.nbytes
        return tensor


def load_stage(monkeypatch, path, stage, stages, **options):
    monkeypatch.setenv("RANK", str(stage))
    monkeypatch.setenv("WORLD_SIZE", str(stages))
    return cuboid.from_pretrained(path, pipeline(stages, **options))


# --- loading -----------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("small", [TIED, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("counts", [(4,), (1, 3), (1, 2, 1), (1.5, 2.5)])
def test_a_stage_reads_only_its_own_tensors(monkeypatch, checkpoint, caplog, small, counts):
    path = checkpoint(small)
    checkpoint_tensors = stored(path)
    counted = CountedBytes(monkeypatch)
    seen = set()
    for stage in range(len(counts)):
        counted.count = 0
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="transformers"):
            model = load_stage(monkeypatch, path, stage, len(counts), balance=counts)
        stage_tensors = {name: x for name, x in local_state(model).items() if name in checkpoint_tensors}
        assert {name for name, _ in model.named_parameters()} == set(stage_tensors)
        assert all(torch.equal(x, checkpoint_tensors[name]) for name, x in stage_tensors.items())
        assert counted.count == sum(x.nbytes for x in stage_tensors.values())
        assert "UNEXPECTED" not in caplog.text
        assert "MISSING" not in caplog.text
        assert not any(parameter.is_meta for parameter in model.parameters())
        assert not any(buffer.is_meta for buffer in model.buffers())
        seen |= set(stage_tensors)
    assert seen == set(checkpoint_tensors)


def test_architectures_without_a_parallel_plan_load_in_stages(monkeypatch, tmp_path):
    config = AutoConfig.for_model(
        "mixtral",
        vocab_size=67,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config)
    # Several files, and experts that are merged while loading.
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    full_state = model.state_dict()
    counted = CountedBytes(monkeypatch)
    for stage in range(3):
        counted.count = 0
        part = load_stage(monkeypatch, tmp_path, stage, 3)
        stage_state = local_state(part)
        assert all(torch.equal(x, full_state[name]) for name, x in stage_state.items())
        assert counted.count == sum(parameter.nbytes for parameter in part.parameters())


def test_a_checkpoint_of_the_base_model_without_its_prefix(monkeypatch, checkpoint, tmp_path, caplog):
    """Save a model as the GPT-2 of 2019 was saved, without the base model's prefix."""
    full_state = stored(checkpoint(TIED))
    save_file(
        {name.removeprefix("transformer."): x for name, x in full_state.items()},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    (tmp_path / "config.json").write_text((Path(checkpoint(TIED)) / "config.json").read_text())
    for stage in range(2):
        with caplog.at_level(logging.WARNING, logger="transformers"):
            stage_state = local_state(load_stage(monkeypatch, tmp_path, stage, 2))
        assert all(torch.equal(x, full_state[name]) for name, x in stage_state.items() if name in full_state)
    assert "UNEXPECTED" not in caplog.text


def test_a_missing_tensor_is_an_error_of_its_stage_only(monkeypatch, checkpoint, tmp_path):
    path = Path(checkpoint(UNTIED))
    tensors = stored(path)
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    load_stage(monkeypatch, tmp_path, 0, 2)
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\.mlp\.up_proj\.weight"):
        load_stage(monkeypatch, tmp_path, 1, 2)


def bytes_read(path, config):
    with pytest.MonkeyPatch.context() as patch:
        counted = CountedBytes(patch)
        model = cuboid.from_pretrained(path, config)
    return counted.count, sum(p.nbytes for p in model.parameters())


@pytest.mark.ci
def test_stages_and_mesh_together_read_every_byte_once(pool, checkpoint):
    path = checkpoint(UNTIED)
    with safe_open(Path(path) / "model.safetensors", "pt") as file:
        total = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    read, held = zip(*pool.run(8, bytes_read, path, pipeline(2, "1x2x2")), strict=True)
    assert sum(read) == total
    # The vocabulary's last rows are padded.
    assert all(bytes_of_rank <= kept <= bytes_of_rank * 1.02 for bytes_of_rank, kept in zip(read, held, strict=True))


# --- saving ------------------------------------------------------------------------------------------------------


def reloaded(path, config, out):
    model = cuboid.from_pretrained(path, config)
    model.save_pretrained(out, max_shard_size="200KB")
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    state, gradients = cuboid.full_state_dict(model), cuboid.full_gradients(model)
    return {name: tuple(x.shape) for name, x in state.items()}, {name: tuple(x.shape) for name, x in gradients.items()}


@pytest.mark.sample(2)
@pytest.mark.parametrize("small", [TIED, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("stages", "mesh", "ranks"), [(2, "1x1x1", 2), (4, "1x1x1", 4), (2, "1x2x2", 8), (3, "1x1x1", 6)]
)
def test_stages_write_back_the_checkpoint_that_they_read(pool, checkpoint, tmp_path, small, stages, mesh, ranks):
    path = checkpoint(small)
    first, *others = pool.run(ranks, reloaded, path, pipeline(stages, mesh), str(tmp_path))
    before, after = stored(path), stored(tmp_path)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads((Path(path) / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(path)
    shapes = {name: tuple(x.shape) for name, x in model.named_parameters(remove_duplicate=False)}
    assert first == ({name: tuple(x.shape) for name, x in model.state_dict().items()}, shapes)
    replicas = [other for other in others if other != ({}, {})]
    # The first rank of each replica gets the full tensors.
    assert len(replicas) == ranks // (stages * MeshShape.parse(mesh).size) - 1


# --- the head on a mesh ------------------------------------------------------------------------------------------


def loss_of_final_states(path, mesh, chunk_bytes):
    """The chunked loss, and the full gradients of hidden states and head."""
    outline = draw_outline(*_class_and_config(path))
    if mesh is None:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
        layout, forward = None, None
    else:
        axes = dict(zip(("batch", "sequence", "hidden"), map(int, mesh.split("x")), strict=True))
        config = {"tensor_parallel": {"mode": "3d_tensor", "mesh": axes}}
        with cuboid.scope(config):
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
        layout, forward = cuboid.mesh_of(model), model.cuboid.base.forward
        layout.connect()
    generator = torch.Generator().manual_seed(2)
    width, vocabulary = outline.width, model.config.vocab_size
    hidden = torch.randn(4, 24, width, dtype=torch.float64, generator=generator)
    labels = shifted(torch.randint(0, vocabulary, (4, 24), generator=generator), IGNORE_INDEX)
    labels[1, :7] = IGNORE_INDEX
    if layout is not None:
        labels = own_slice(labels, 0, layout.along("batch"))
        for dim, axis in enumerate(("batch", "sequence", "hidden")):
            hidden = own_slice(hidden, dim, layout.along(axis))
    loss, gradient = chunked_loss(
        Head(model, outline, forward),
        hidden,
        labels,
        scale=0.01,
        vocabulary=vocabulary,
        mesh=layout,
        chunk_bytes=chunk_bytes,
    )
    norm = gradient.square().sum()
    head_norm = model.lm_head.weight.grad.square().sum()
    return loss.item(), norm.item(), head_norm.item()


def _class_and_config(path):
    config = AutoConfig.from_pretrained(path)
    return AutoModelForCausalLM._model_mapping[type(config)], config


@pytest.mark.sample(1, ci=2)
@pytest.mark.parametrize("mesh", ["1x2x1", "1x1x2", "2x1x1", "1x2x4", "1x4x2", "2x2x2"])
@pytest.mark.parametrize("chunk_bytes", [1, 20_000, 10**9])
def test_the_chunked_loss_on_a_mesh(pool, checkpoint, mesh, chunk_bytes):
    path = checkpoint(UNTIED)
    ((loss, norm, head_norm),) = pool.run(1, loss_of_final_states, path, None, 10**9)
    ranks = pool.run(MeshShape.parse(mesh).size, loss_of_final_states, path, mesh, chunk_bytes)
    assert [rank[0] for rank in ranks] == pytest.approx([loss] * len(ranks), rel=1e-6)
    assert sum(rank[1] for rank in ranks) == pytest.approx(norm, rel=1e-5)
    assert sum(rank[2] for rank in ranks) == pytest.approx(head_norm, rel=1e-5)
