"""Models as the planner sees them: by their class on the meta device, for every architecture that training takes."""

import json
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig
from typer.testing import CliRunner

from cuboid.cli import commands
from cuboid.distributed.topology import MeshShape
from cuboid.errors import ConfigError, MeshError, UnsupportedModelError
from cuboid.models.architectures.certificate import Certificate, MeshVerdict, Verdict
from cuboid.models.certification.mesh_certificates import MESH_TABLE, read_verdict
from cuboid.models.certification.small_config import small_config
from cuboid.models.plain_construction import plain_construction
from cuboid.models.sharded.parallel_plan import make_parallel_plan
from cuboid.models.stages.model_costs import sizes_of
from cuboid.planner.cost.layout import CUBOID, Layout
from cuboid.planner.cost.step import StepCost
from cuboid.planner.description import limits, meta_model
from cuboid.planner.description.cluster import Cluster
from cuboid.planner.description.meta_model import describe
from cuboid.planner.description.model import Attention, Experts, Layer, Projection
from cuboid.planner.description.modules import describe_modules
from cuboid.planner.estimate import Estimate, estimate
from cuboid.planner.search import layouts, search
from planning import LLAMA_8B, description_of, on_meta, small

sys.path[:0] = [str(Path(__file__).parents[2] / "docs")]

from generators.architectures import causal_cases, config_of  # noqa: E402

ATTENTION = Attention(12, 4, 4, 4, rotary=4)
QKV, OUT = Projection("qkv", 48, 80, "up"), Projection("o", 48, 48, "down")
GATE_UP, DOWN = Projection("gate_up", 48, 192, "up"), Projection("down", 96, 48, "down")
#: By what their configs say, of small models: the distinct layers.
LAYERS = {
    "llama": (Layer(ATTENTION, (QKV, OUT, GATE_UP, DOWN), 96, 96, gated=True),),
    "qwen2": (Layer(ATTENTION, (replace(QKV, bias=True), OUT, GATE_UP, DOWN), 96, 96, gated=True),),
    "qwen3": (Layer(replace(ATTENTION, head_norms=True), (QKV, OUT, GATE_UP, DOWN), 104, 96, gated=True),),
    "gemma2": tuple(
        Layer(replace(ATTENTION, window=window), (QKV, OUT, GATE_UP, DOWN), 192, 96, gated=True)
        for window in (4096, None)
    ),
    "gpt2": (
        Layer(
            Attention(12, 12, 4, 4),
            (
                Projection("qkv", 48, 144, "up", bias=True), Projection("o", 48, 48, "down", bias=True),
                Projection("up", 48, 192, "up", bias=True), Projection("down", 192, 48, "down", bias=True),
            ),
            192, 192, gated=False,
        ),
    ),
    "mixtral": (
        Layer(
            ATTENTION, (QKV, OUT, Projection("router", 48, 6, "router")), 96, 0, gated=True,
            experts=Experts(6, 2, (GATE_UP, DOWN)),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_what_the_config_says(name):
    assert description_of(small(name)).kinds == LAYERS[name]


def test_latents_are_what_the_config_says():
    dense, sparse = description_of(small("deepseek_v3")).kinds
    assert dense.attention == Attention(12, 12, 12, 8, rotary=4)
    assert [(projection.inputs, projection.outputs) for projection in dense.latents] == [(48, 20), (48, 20)]
    assert [(projection.inputs, projection.outputs) for projection in dense.from_latents] == [(20, 144), (16, 192)]
    assert (dense.intermediate, dense.experts, dense.gathers_attention_input) == (96, None, False)
    # Two shared experts, and the router's product in float32.
    inside = (Projection("gate_up", 48, 80, "up"), Projection("down", 40, 48, "down"))
    assert (sparse.intermediate, sparse.experts) == (80, Experts(6, 2, inside, 48 * 4))


def test_ends_are_the_models_own():
    llama, gpt2 = (description_of(small(name)) for name in ("llama", "gpt2"))
    assert (llama.outputs, llama.head_parameters, llama.embedding_parameters) == (130, 130 * 48, 130 * 48)
    # Tied, with learned positions.
    assert (gpt2.outputs, gpt2.head_parameters, gpt2.embedding_parameters) == (130, 0, (130 + 64) * 48)
    config = small("bert", architectures=["BertForSequenceClassification"])
    config.architectures, config.num_labels = ["BertForSequenceClassification"], 3
    classifier = describe_modules(meta_model.meta_model(config))
    assert (classifier.outputs, classifier.head_parameters) == (3, 3 * 48)


#: Sizes of which only some divide by numbers of ranks: shards over `batch` are padded.
ODD = [{}, {"hidden_size": 60, "intermediate_size": 172}, {"hidden_size": 84, "intermediate_size": 88}]


@pytest.mark.sample(5, ci="others")
@pytest.mark.parametrize("sizes", ODD, ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe"])
def test_meshes_that_divide_a_model_are_those_that_sharding_accepts(name, sizes):
    model = on_meta(small(name, **sizes))
    described = describe_modules(model)
    for size in (2, 3, 4, 6, 8):
        for mesh in MeshShape.of_size(size):
            reason = described.limits.reason_against(mesh)
            # For the same reason, which names the module.
            with pytest.raises(MeshError, match=re.escape(reason)) if reason else nullcontext():
                make_parallel_plan(model, mesh)


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "qwen3_moe"])
def test_schedules_are_made_by_what_training_makes_them_by(name):
    model = on_meta(small(name))
    described = describe_modules(model)
    assert described.sizes == sizes_of(model)
    assert described.with_layers(2).sizes.layers == sizes_of(model).layers[:2]


@pytest.mark.ci
def test_every_certified_causal_architecture_is_described():
    """By the shipped verdicts, at small sizes; those that transformers' defaults don't build aren't certified."""
    table, cluster, refused = json.loads(MESH_TABLE.read_text(encoding="utf-8")), Cluster.parse("4xH100"), {}
    for name, flavour in causal_cases():
        key = table["flavours"].get(name, {}).get(flavour)
        if flavour or key is None:
            continue
        verdict = read_verdict(table["architectures"][name][key])
        cls, config = config_of(name, flavour)
        with plain_construction(), torch.device("meta"):
            model = cls(small_config(config))
        try:
            described = describe_modules(model, verdict)
        except UnsupportedModelError as error:
            refused |= {} if "whole rows" in verdict.refused else {name: str(error)}
            continue
        assert described.parameters == sum(parameter.numel() for parameter in model.parameters()), name
        assert described.sizes == sizes_of(model), name
        on_mesh = described.limits.fitting(4)
        # What training refuses is left out, with its reason.
        assert bool(on_mesh) is not bool(described.limits.no_mesh), name
        assert ("whole rows" in verdict.refused) is bool(described.limits.no_mesh), name
        for mesh in (MeshShape(), *on_mesh[:2]):
            layout = Layout(mesh, micro_batch=4, replicas=4 // mesh.size)
            estimated = Estimate.of(StepCost(described, layout, cluster, 64, replace(CUBOID, counted=False)))
            assert estimated.time.total_s > 0, name
            assert estimated.memory_bytes > 16 * described.parameters / 4, name
            assert bool(estimated.bytes_by_axis) is (mesh.size > 1), name
    assert refused == {}


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["olmoe", "smollm3"])
def test_what_no_table_of_the_planner_knew_is_planned(name):
    # As certified, but for sizes.
    config = AutoConfig.for_model(name, hidden_size=512, intermediate_size=1024, num_hidden_layers=4)
    model, cluster = describe(config), Cluster.parse("4xH100")
    assert not model.limits.refused(4)
    best = search(model, cluster, 1024, 16).best
    assert {estimated.layout.ranks for estimated in best} == {4}
    meshes = {layout.mesh.size for layout in layouts(model, cluster, 1024, 16)}
    assert meshes == {1, 2, 4}
    assert "what its layers keep" not in best[0].uncounted


@pytest.mark.parametrize(
    ("name", "architecture", "message"),
    [
        ("vit", "ViTForImageClassification", "is given images, and the planner counts the work of tokens"),
        ("t5", "T5ForConditionalGeneration", "is an encoder-decoder, whose two stacks have sequences of their own"),
        ("blt", "BltForCausalLM", "BltForCausalLM has no hidden_size in its config"),
        ("clip", None, "no model can be built from the config of 'clip': ValueError"),
        ("wav2vec2", "Wav2Vec2ForCTC", "no model can be built from the config of 'wav2vec2'"),
    ],
)
def test_what_cannot_be_planned_says_why(tmp_path, name, architecture, message):
    config = AutoConfig.for_model(name)
    config.architectures = architecture and [architecture]
    config.save_pretrained(tmp_path)
    result = CliRunner().invoke(commands, ["plan", "--model", str(tmp_path), "--cluster", "8xH100", "--seq-len", "64",
                                           "--global-batch", "8"])  # fmt: skip
    assert isinstance(result.exception, UnsupportedModelError)
    assert message in str(result.exception)


def test_what_a_models_own_code_refuses_is_said():
    with pytest.raises(UnsupportedModelError, match="no model can be built from the config of 'reformer': Assertion"):
        describe(AutoConfig.for_model("reformer"))


def test_layouts_that_training_rejects_are_left_out(monkeypatch, tmp_path):
    config, cluster = AutoConfig.for_model(**{**LLAMA_8B, "num_hidden_layers": 2}), Cluster.parse("4xH100")
    verdict = MeshVerdict(refused={"whole rows": "the loss differs"})
    monkeypatch.setattr(meta_model, "mesh_verdict", lambda *_: verdict)
    alone = describe(config)
    said = "LlamaForCausalLM isn't right on a mesh: the loss differs"
    assert alone.limits.refused(4) == [said]
    assert {layout.mesh for layout in layouts(alone, cluster, 1024, 16)} == {MeshShape()}
    with pytest.raises(UnsupportedModelError, match=said):
        estimate(alone, Layout(MeshShape(1, 4, 1)), cluster, 1024)
    with pytest.raises(ConfigError, match=f"no layout divides .* Left out was what training rejects: {said}"):
        search(alone, cluster, 1024, 3)
    config.max_position_embeddings = 4096
    config.save_pretrained(tmp_path)
    arguments = ["--model", str(tmp_path), "--cluster", "4xH100", "--seq-len", "1024", "--global-batch", "4"]
    output = CliRunner().invoke(commands, ["plan", *arguments], catch_exceptions=False).output
    assert f"Left out was what training rejects: {said}" in " ".join(output.split())


def test_stages_and_segments_that_training_rejects_are_left_out(monkeypatch):
    config, cluster = AutoConfig.for_model(**{**LLAMA_8B, "num_hidden_layers": 4}), Cluster.parse("2xH100")

    def with_certificate(certificate, **options):
        monkeypatch.setattr(limits, "certificate_of", lambda *_: certificate)
        tried = list(layouts(describe(config, **options), cluster, 1024, 16))
        return {layout.stages for layout in tried}, {layout.segments for layout in tried}

    unprobed = Certificate(None, "it needs a file")
    assert with_certificate(unprobed) == ({1}, {1})
    assert with_certificate(unprobed, verified=True) == ({1, 2}, {1, 2, 4, 8, 16})
    whole_only = Certificate(Verdict(refused={"segments": {"whole rows": "a state is lost"}}))
    assert with_certificate(whole_only) == ({1, 2}, {1})
    assert with_certificate(Certificate(Verdict())) == ({1, 2}, {1, 2, 4, 8, 16})
    monkeypatch.setattr(limits, "certificate_of", lambda *_: whole_only)
    with pytest.raises(UnsupportedModelError, match='a state is lost; "segments": 1 is right'):
        estimate(describe(config), Layout(MeshShape(), 2, segments=2), cluster, 1024)
