"""``"mesh": "auto"`` of a model that gets adapters: ``lora`` in the config says what the commands' options say."""

import json
import logging

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import cuboid
from cuboid.cli import commands
from cuboid.config.schema import parse_config
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import MeshShape
from cuboid.errors import ConfigError
from cuboid.integrations.handoff import adopt_model
from cuboid.planner import automatic
from cuboid.planner.automatic import choose_mesh, planned_trunk, segment_choice, settle_stages
from cuboid.planner.description.cluster import Cluster
from cuboid.planner.description.meta_model import describe
from cuboid.planner.search import config_of, search
from cuboid.train.settings import check_config
from cuboid.weights.resolve import resolve
from planning import LLAMA_8B

pytest.importorskip("peft", reason="PEFT isn't installed")
from peft import LoraConfig, get_peft_model

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 1 << 16}  # fmt: skip
MESH = {"tensor_parallel": {"mode": "3d_tensor", "mesh": "auto"}}


def llama(**sizes):
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, **sizes}))


def llama_8b(layers=32):
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**{**LLAMA_8B, "num_hidden_layers": layers}))


CASES = {"all linear layers": ({"r": 16}, False), "all parameters": (None, False),
         "two layers on 4 bits": ({"r": 16, "target_modules": ["v_proj", "q_proj"]}, True)}  # fmt: skip


@pytest.mark.sample(0, ci=2)
@pytest.mark.parametrize("case", CASES)
def test_the_mesh_is_the_plans_for_the_same_inputs(case):
    (lora, four_bits), model, cluster = CASES[case], llama_8b(), "4xH100-80GB"
    sections = {} if lora is None else {"lora": lora}
    section = parse_config({**MESH, **sections, "train_batch_size": 16}).lora
    described = describe(model.config, trunk=planned_trunk(section, four_bits=four_bits))
    plan = search(described, Cluster.parse(cluster), 4096, 16, count=1).best[0]
    # All that the plan chose but the mesh, and the rows that follow from it.
    written = config_of(plan.layout) | sections
    written |= {"train_batch_size": 16, "cluster": cluster, "sequence_length": 4096}
    written["tensor_parallel"]["mesh"] = "auto"
    del written["train_micro_batch_size_per_gpu"]
    choice = choose_mesh(model, parse_config(written), four_bits=four_bits)
    assert choice.expected.layout == plan.layout
    assert choice.mesh == plan.layout.mesh == MeshShape(4 if lora is None else 2, 1, 1)


def test_segments_are_chosen_for_the_adapter_too():
    pipeline = {"engine": "seq1f1b", "stages": 2, "segments": "auto"}
    keys = {"pipeline": pipeline, "train_batch_size": 8, "cluster": "2xH100-80GB"}
    mesh = Mesh(MeshShape(), pipe=2, rank=0, world_size=2)
    alone, with_lora, packed = (
        segment_choice(llama_8b(4), parse_config({**MESH, **keys, **sections}), mesh, four_bits=four_bits)
        for sections, four_bits in (({}, False), ({"lora": {"r": 8}}, False), ({}, True))
    )
    assert alone.model.trunk is None
    assert str(with_lora.model.trunk) == "LoRA of rank 8 on all-linear, the rest frozen"
    assert with_lora.model.trained_parameters > packed.model.trained_parameters == 0
    assert packed.model.four_bits


def test_schedules_are_compared_without_gradients_of_frozen_weights(caplog):
    """With them, deferring these fills a bubble; without, there is nothing to defer."""
    pipeline = {"engine": "seq1f1b", "stages": 4, "segments": 1, "schedule": "auto", "chunks": 2}
    keys = {"pipeline": pipeline, "sequence_length": 8192, "train_micro_batch_size_per_gpu": 1}
    keys |= {"gradient_accumulation_steps": 8}
    with caplog.at_level(logging.WARNING):
        for sections, four_bits in (({}, False), ({"lora": {"r": 8}}, False), ({}, True)):
            settle_stages(llama_8b(8), parse_config({**keys, **sections}), MeshShape(), four_bits=four_bits)
    trained, with_lora, packed = said(caplog)
    assert "zero_bubble: " in trained
    assert "seq1f1b takes +7" in trained
    assert "seq1f1b: " in with_lora
    assert "zero_bubble takes +0.0%" in with_lora
    assert packed == with_lora


def test_a_stage_orders_its_units_as_it_was_chosen(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    pipeline = {"engine": "seq1f1b", "stages": 2, "segments": 2, "schedule": "zero_bubble"}
    for sections in ({}, {"lora": {"r": 8}}):
        plan = resolve(llama(), parse_config({"pipeline": pipeline, **sections}))
        assert plan.stages.sizes.is_frozen == bool(sections)


ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture
def on_a_small_gpu(tmp_path, monkeypatch):
    """Shards a small model on one rank, by a config with these sections, for a GPU that has room for little."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    gpu = {"like": "H100-80GB", "name": "small", "memory_bytes": 3 * 2**30}
    (tmp_path / "gpu.json").write_text(json.dumps({"gpus_per_node": 1, "gpu": gpu}))
    keys = {"train_batch_size": 1, "cluster": str(tmp_path / "gpu.json"), "sequence_length": 512}

    def sharded(**sections):
        return cuboid.shard(llama(), {**MESH, **keys, **sections})

    return sharded


def adapter(r, targets="all-linear", **options):
    return LoraConfig(r=r, target_modules=targets, task_type="CAUSAL_LM", **options)


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name == automatic.__name__]


def test_an_adapter_that_does_not_fit_the_mesh_is_an_error(on_a_small_gpu):
    model = on_a_small_gpu(lora={"r": 8, "target_modules": ["q_proj"]})
    message = (
        r'"mesh": "auto" was decided for LoRA of rank 8 on q_proj \(lora in the config\), and the model gets LoRA of '
        r"rank 65536 on all-linear: 1×1×1 would need \d\.\d of 2\.8 GiB a GPU; write this adapter's r"
    )
    with pytest.raises(ConfigError, match=message):
        get_peft_model(model, adapter(65536))
    # It had no adapter before either.
    assert model.cuboid.state.adapters is None
    assert get_peft_model(model, adapter(8, ["q_proj"])).get_nb_trainable_parameters()[0] == 2 * 8 * (64 + 64)


@pytest.mark.ci
def test_another_adapter_that_fits_is_said_and_the_same_is_not(on_a_small_gpu, caplog):
    with caplog.at_level(logging.WARNING):
        get_peft_model(
            on_a_small_gpu(lora={"r": 8, "target_modules": ["v_proj", "q_proj"]}), adapter(8, ["q_proj", "v_proj"])
        )
        get_peft_model(on_a_small_gpu(lora={"r": 8}), adapter(8, ALL_LINEAR))
        assert all(line.startswith('"mesh": "auto" is 1×1×1') for line in said(caplog))
        for options, what in (
            ({"r": 16}, "LoRA of rank 16 on all-linear"),
            ({"r": 8, "rank_pattern": {"q_proj": 2}}, "LoRA of rank 8 on all-linear, rank_pattern={'q_proj': 2}"),
        ):
            get_peft_model(on_a_small_gpu(lora={"r": 8}), adapter(**options))
            assert said(caplog)[-1].endswith(f"the model gets {what}; it fits, but another mesh may be faster")
        get_peft_model(on_a_small_gpu(lora={"r": 8}), adapter(8, ["q_proj", "embed_tokens"]))
        assert "which can't be counted: model.embed_tokens is one of the adapter's target_modules" in said(caplog)[-1]
        # Without the section, the mesh was chosen for training everything.
        get_peft_model(on_a_small_gpu(), adapter(16))
        assert "was decided for training all parameters, and the model gets LoRA of rank 16" in said(caplog)[-1]


def test_a_model_without_the_adapter_of_its_config_is_not_trained(on_a_small_gpu, tmp_path):
    sections = {**MESH, "train_batch_size": 1, "lora": {"r": 8}}
    config = parse_config(sections)
    with pytest.raises(
        ConfigError, match=r"lora \(r = 8\) says that only an adapter is trained, but LlamaForCausalLM has"
    ):
        adopt_model(llama(), config)
    with pytest.raises(ConfigError, match=r"lora.load_in_4bit is true, but the weights of LlamaForCausalLM are in"):
        on_a_small_gpu(lora={"r": 8, "load_in_4bit": True})
    model = on_a_small_gpu(lora={"r": 8})
    with pytest.raises(ConfigError, match="says that only an adapter is trained"):
        adopt_model(model, config.on_mesh(MeshShape()))
    adapted = get_peft_model(model, adapter(8))
    assert adopt_model(adapted, config.on_mesh(MeshShape())) is adapted
    named = {**sections, "tensor_parallel": {"mode": "3d_tensor", "mesh": {}}, "optimizer": {"type": "AdamW"}}
    with pytest.raises(ConfigError, match="lora says that only an adapter is trained, and this command trains all"):
        check_config(named, is_complete=False)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"r": 0}, r"lora\.r: .*greater than or equal to 1"),
        (
            {"rank": 8},
            r"lora\.r is missing[^$]*lora\.rank is not a known key; known keys: load_in_4bit, r, ",
        ),
        ({"r": 8, "target_modules": []}, r"lora\.target_modules: .*at least 1"),
        (8, "lora: it is a section of keys"),
    ],
)
def test_errors_name_the_sections_keys(section, message):
    with pytest.raises(ConfigError, match=message):
        parse_config({**MESH, "train_batch_size": 8, "lora": section})


@pytest.mark.ci
def test_the_commands_write_and_read_the_section(tmp_path, capsys):
    llama(num_hidden_layers=4).config.save_pretrained(tmp_path)
    common = ["--model", str(tmp_path), "--cluster", "2xH100-80GB", "--seq-len", "512"]
    lora, config = ["--lora-r", "4", "--lora-target-modules", "q_proj, v_proj"], tmp_path / "plan.json"

    def command(name, *options):
        with pytest.raises(SystemExit) as end:
            commands([name, *common, *options], standalone_mode=True)
        return end.value.code

    assert command("plan", "--global-batch", "8", *lora, "--out", str(config)) in (0, None)
    written = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
    assert json.loads(config.read_text())["lora"] == written
    trained = []
    for options in ([], lora):
        assert command("estimate", "--config", str(config), "--json", str(tmp_path / "out.json"), *options) in (0, None)
        trained.append(json.loads((tmp_path / "out.json").read_text())["model"]["trained_parameters"])
    assert trained == [4 * 4 * (64 + 64 + 64 + 32)] * 2
    assert command("estimate", "--config", str(config), "--lora-r", "8") == 2
    assert "the config's lora says otherwise" in " ".join(capsys.readouterr().err.split())
    # A model of 64 features, whose rows have a scale each.
    assert command("plan", "--global-batch", "8", *lora, "--load-in-4bit", "--out", str(config)) in (0, None)
    assert json.loads(config.read_text())["lora"] == {**written, "load_in_4bit": True}
    assert command("estimate", "--config", str(config)) in (0, None)
    assert "LoRA of rank 4 on q_proj, v_proj, the rest frozen in 4 bits" in capsys.readouterr().out
