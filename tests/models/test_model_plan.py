"""One plan of a model, whoever makes it: loading, sharding in memory, per-rank files, reading weights again."""

import builtins
import dataclasses
import os
import sys
from pathlib import Path

import pytest
import torch
import transformers

import cuboid
from cuboid.checkpoint.format.tensor_file import TensorSpec
from cuboid.convert.per_rank.plan import plan_ranks
from cuboid.errors import UnsupportedModelError
from cuboid.models.architectures.certificate import Certificate, MeshVerdict, Verdict
from cuboid.models.attention.forward_context import ForwardContext
from cuboid.models.kinds.sharding import Sharding, WholeModel
from cuboid.models.model_plan import ModelPlan
from cuboid.models.sharded.parallel_plan import ParallelPlan
from cuboid.models.stages.stage_model import StagePlan
from cuboid.tensor3d.sharding.sharded_param import local_state
from cuboid.weights.resolve import plan_of, resolve, resolve_elsewhere
from threaded import Threaded, step_of

#: Ranks of the world, and the sections of a config.
LAYOUTS = {
    "a mesh": (4, {"tensor_parallel": {"mode": "3d_tensor", "mesh": {"sequence": 2, "hidden": 2}}}),
    "stages": (2, {"pipeline": {"engine": "seq1f1b", "stages": 2, "segments": 2}}),
    "both": (
        4,
        {
            "tensor_parallel": {"mode": "3d_tensor", "mesh": {"hidden": 2}},
            "pipeline": {"engine": "seq1f1b", "stages": 2, "segments": 2},
        },
    ),
}


def small_config():
    return transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )


def whole_model():
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(small_config())


@pytest.fixture(params=LAYOUTS)
def layout(request, monkeypatch):
    """A config, and the environment of the world's last rank."""
    size, sections = LAYOUTS[request.param]
    monkeypatch.setenv("WORLD_SIZE", str(size))
    monkeypatch.setenv("RANK", str(size - 1))
    return size, cuboid.split_config({"train_micro_batch_size_per_gpu": 2, **sections})[0]


def facts(plan):
    """All of a plan but the mesh and the outline, which compare by identity, or hold such."""
    stages = plan.stages and (
        plan.stages.layout,
        plan.stages.cuts,
        plan.stages.outline.before,
        plan.stages.outline.head,
    )
    parallel = plan.parallel and (plan.parallel.specs, plan.parallel.verdict)
    return plan.cls, plan.mesh.shape, plan.mesh.placement, parallel, stages


def test_a_plan_changes_nothing_and_is_never_changed(layout):
    _, config = layout
    model = whole_model()
    before = [(name, id(module), type(module)) for name, module in model.named_modules()]
    plan = resolve(model, config)
    assert [(name, id(module), type(module)) for name, module in model.named_modules()] == before
    assert facts(resolve(model, config)) == facts(plan)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.stages = None
    if plan.stages is not None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            plan.stages.cuts = ()


def test_routers_in_blocks_that_only_the_real_model_computes_whole_have_no_loss_in_stages(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    config, _ = cuboid.split_config({"train_micro_batch_size_per_gpu": 2, **LAYOUTS["both"][1]})
    for jitter in (0.0, 0.1):
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 64}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "router_jitter_noise": jitter}
        with torch.device("meta"):
            model = transformers.MixtralForCausalLM(
                transformers.MixtralConfig(**sizes, **heads, output_router_logits=True)
            )
        if jitter == 0:
            assert resolve(model, config).stages.outline.router_loss is not None
        else:
            with pytest.raises(UnsupportedModelError, match=r"output_router_logits: routers of Mixtral.*jitter to 0"):
                resolve(model, config)


#: Of a load on a mesh of 1×2×2 in a process that has loaded before. Each further one is a place that a reader passes.
MOST_FUNCTIONS = 217


def test_a_load_passes_few_functions_and_reads_the_config_twice_at_most(monkeypatch, tmp_path):
    transformers.LlamaForCausalLM(small_config()).save_pretrained(tmp_path)
    size, sections = LAYOUTS["a mesh"]
    monkeypatch.setenv("WORLD_SIZE", str(size))
    monkeypatch.setenv("RANK", "0")
    config = {"train_micro_batch_size_per_gpu": 2, **sections}
    cuboid.from_pretrained(tmp_path, config)
    package, codes, opened = str(Path(cuboid.__file__).parent), set(), []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            codes.add(frame.f_code)

    def noting(function):
        return lambda path, *args, **kwargs: opened.append(path) or function(path, *args, **kwargs)

    for module in (builtins, os):
        monkeypatch.setattr(module, "open", noting(module.open))
    # Changed since, so that what was read before doesn't count.
    os.utime(tmp_path / "config.json", ns=(1, 1))
    sys.setprofile(note)
    try:
        cuboid.from_pretrained(tmp_path, config)
    finally:
        sys.setprofile(None)
    functions = [code.co_qualname for code in codes if not code.co_name.startswith("<")]
    assert len(functions) <= MOST_FUNCTIONS, sorted(functions)
    assert 1 <= sum(str(path).endswith("/config.json") for path in opened) <= 2


DECIDED = (ModelPlan, ParallelPlan, StagePlan, Sharding, WholeModel, Certificate, Verdict, MeshVerdict, ForwardContext)


@pytest.mark.parametrize("decision", DECIDED)
def test_what_is_decided_is_frozen(decision):
    assert decision.__dataclass_params__.frozen


def test_training_and_scripts_set_the_state_of_a_model_and_nothing_that_was_decided():
    threaded = Threaded(transformers.LlamaForCausalLM(small_config()).train(), "1x2x2")
    ids = torch.arange(2 * 12).view(2, 12)
    shardings = [model.cuboid for model in threaded.models]
    before = [dict(vars(sharding)) for sharding in shardings]
    threaded.run(step_of(input_ids=ids, labels=ids))
    for model in threaded.models:
        model.gradient_checkpointing_enable()
        model.cuboid.state.chunk_bytes = 64
    threaded.run(step_of(input_ids=ids, labels=ids))
    for model, sharding, fields in zip(threaded.models, shardings, before, strict=True):
        assert model.cuboid is model.base_model.cuboid is sharding
        assert all(value is fields[name] for name, value in vars(sharding).items())
        with pytest.raises(dataclasses.FrozenInstanceError):
            model.cuboid.verdict = MeshVerdict()


def test_loading_sharding_and_reading_again_follow_the_same_plan(layout, tmp_path):
    _, config = layout
    plain = transformers.LlamaForCausalLM(small_config())
    plain.save_pretrained(tmp_path)
    plan = resolve(plain, config)
    loaded = cuboid.from_pretrained(tmp_path, config)
    sharded = cuboid.shard(plain, config)
    assert facts(plan_of(loaded, whole_model())) == facts(plan_of(sharded, whole_model())) == facts(plan)
    shards, others = local_state(loaded), local_state(sharded)
    assert shards.keys() == others.keys()
    assert all(torch.equal(shard, others[name]) for name, shard in shards.items())


def test_per_rank_files_follow_the_same_plan(layout, tmp_path):
    size, config = layout
    model = whole_model()
    plan = resolve(model, config)
    model.config.save_pretrained(tmp_path)
    specs = {name: TensorSpec(x.dtype, tuple(x.shape)) for name, x in model.state_dict().items()}
    ranks = plan_ranks(tmp_path, specs, config, size)
    assert facts(resolve_elsewhere(model, config, size))[:4] == facts(plan)[:4]
    assert ranks.mesh == plan.mesh.shape
    assert ranks.layers == (() if plan.stages is None else plan.stages.layout.counts)
    specs = {} if plan.parallel is None else plan.parallel.by_parameter
    assert {name: tensor.sharding for name, tensor in ranks.tensors.items() if name in specs} == specs


def test_a_load_reads_the_config_at_most_twice(layout, tmp_path):
    _, config = layout
    transformers.LlamaForCausalLM(small_config()).save_pretrained(tmp_path)
    read, path = [], str(tmp_path / "config.json")
    # An audit hook stays for the life of the process.
    sys.addaudithook(lambda event, args: read.append(event) if event == "open" and str(args[0]) == path else None)
    cuboid.from_pretrained(tmp_path, config)
    assert len(read) <= 2
