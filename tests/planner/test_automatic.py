"""``"mesh": "auto"`` and ``"segments": "auto"``: what the planner chooses for a model on the GPUs that it sees."""

import json
import logging
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from cuboid.config.compatibility import check_layout
from cuboid.config.schema import parse_config, require_config
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import MeshShape
from cuboid.errors import ConfigError, MeshError
from cuboid.models.certification.mesh_certificates import mesh_verdict
from cuboid.models.pipeline.sequence_cut import Cutter
from cuboid.models.sharded.parallel_plan import MeshRules
from cuboid.planner import automatic, profile
from cuboid.planner.automatic import choose_mesh, segment_choice, settle_stages
from cuboid.planner.cost.layout import Layout
from cuboid.planner.description import seen
from cuboid.planner.description.cluster import GPUS, Cluster
from cuboid.planner.description.modules import describe_modules
from cuboid.planner.description.seen import known_gpu, seen_cluster
from cuboid.planner.estimate import best_segments, estimate, layout_of_config, segment_counts
from cuboid.seq1f1b.schedule.choice import ModelPipeline, place_stages
from cuboid.seq1f1b.schedule.partition import balance_by_flops
from cuboid.seq1f1b.schedule.schedules import PipelineShape
from cuboid.seq1f1b.schedule.simulator import peak_bytes, simulate
from cuboid.weights.resolve import settle
from launching import alone, reports_of, world
from planning import LLAMA_8B, description_of


def llama(**sizes):
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**{**LLAMA_8B, "num_hidden_layers": 4, "model_type": "llama", **sizes}))


@pytest.fixture(scope="module")
def model():
    return llama()


def config_of(mesh_keys, **sections):
    return parse_config({"tensor_parallel": {"mode": "3d_tensor", "mesh": "auto", **mesh_keys}, **sections})


@pytest.mark.slow
def test_the_mesh_of_a_size_is_the_fastest_that_fits(model, caplog):
    config = config_of({"size": 8}, train_micro_batch_size_per_gpu=8, cluster="8xH100-80GB", sequence_length=2048)
    with caplog.at_level(logging.WARNING):
        chosen = choose_mesh(model, config).mesh
    cluster, described = Cluster.parse("8xH100-80GB"), describe_modules(model)
    times = {
        mesh: estimate(described, Layout(mesh, micro_batch=8, zero_stage=0), cluster, 2048).time.total_s
        for mesh in MeshRules(model).fitting(8)
    }
    assert times[chosen] == min(times.values())
    (said,) = [record.getMessage() for record in caplog.records if record.name == automatic.__name__]
    assert said.startswith(f'"mesh": "auto" is {chosen} with 1 replicas, for micro-batches of 8 rows of 2048 tokens on')


@pytest.mark.ci
def test_one_row_leaves_nothing_to_the_batch_axis(model):
    one_row = config_of({"size": 8}, train_micro_batch_size_per_gpu=1, cluster="8xH100")
    assert choose_mesh(model, one_row).mesh.batch == 1


@pytest.mark.ci
def test_without_a_size_the_ranks_of_the_mesh_are_chosen_too(model):
    free = config_of({}, train_batch_size=32, gradient_accumulation_steps=2, cluster="4xH100", sequence_length=4096)
    described, cluster = describe_modules(model), Cluster.parse("4xH100-80GB")
    times = {}
    for size in (1, 2, 4):
        rows = 32 // (4 // size) // 2
        for mesh in (mesh for mesh in MeshRules(model).fitting(size) if rows % mesh.batch == 0):
            layout = Layout(mesh, 1, rows, 2, 4 // size, zero_stage=0)
            estimated = estimate(described, layout, cluster, 4096)
            times |= {mesh: estimated.time.total_s} if estimated.fits else {}
    assert choose_mesh(model, free).mesh == min(times, key=times.__getitem__)
    # One replica doesn't fit into a GPU, but four of them do together.
    large = llama(num_hidden_layers=32)
    assert choose_mesh(large, free.model_copy(update={"cluster": "4xH200-141GB"})).mesh.size > 1


def test_rows_that_are_named_leave_one_size(model):
    numbers = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2}
    chosen = choose_mesh(model, config_of({}, **numbers, cluster="8xH100")).mesh
    assert chosen.size == 4
    config, rest = require_config({"tensor_parallel": {"mode": "3d_tensor", "mesh": "auto"}, **numbers})
    check_layout(config.on_mesh(chosen), rest, 8)
    with pytest.raises(ConfigError, match="train_batch_size is 32"):
        check_layout(config.on_mesh(MeshShape(2, 1, 1)), rest, 8)


def test_a_pipelines_mesh_and_segments(model):
    pipeline = {"engine": "seq1f1b", "stages": 4}
    config = config_of({}, pipeline=pipeline, train_batch_size=32, gradient_accumulation_steps=8, cluster="8xH100")
    chosen = choose_mesh(model, config).mesh
    assert chosen.size in (1, 2)
    mesh = Mesh(chosen, pipe=4, rank=0, world_size=8)
    choice = segment_choice(model, config, mesh)
    counts = [choice(length, 1, 4, recomputes=False) for length in (512, 8192, 65536)]
    assert counts == sorted(counts)
    assert counts[0] == 1 < counts[-1]
    assert segment_choice(model, config_of({"size": 2}, pipeline={**pipeline, "segments": 2}), mesh) is None


@pytest.mark.parametrize(
    ("sections", "in_stages", "alone"),
    [
        ({"bf16": {"enabled": True}}, None, None),
        ({"fp16": {"enabled": True}}, 2, None),
        ({"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "float32"}}, 4, 6),
    ],
    ids=["bf16", "fp16", "fp16 in float32"],
)
def test_a_choice_counts_the_gradients_and_the_host_memory_of_its_config(model, sections, in_stages, alone):
    sections |= {"activation_checkpointing": {"mode": "layers", "cpu_checkpointing": True}, "train_batch_size": 8}
    config = config_of({"size": 2}, pipeline={"engine": "seq1f1b", "stages": 2}, cluster="4xH100", **sections)
    choice = segment_choice(model, config, Mesh(MeshShape(1, 2, 1), pipe=2, rank=0, world_size=4))
    tried = [choice.layout, *automatic._layouts(choice.model, config, 4, 512)]
    assert len(tried) > 1
    assert {(layout.gradient_bytes, layout.on_host) for layout in tried} == {(in_stages, True)}
    without_stages = automatic._layouts(choice.model, config_of({"size": 2}, **sections), 2, 512)
    assert {(layout.gradient_bytes, layout.on_host) for layout in without_stages} == {(alone, True)}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "keys",
    [{"chunks": "auto"}, {"chunks": 2, "stage_balance": "layers"}, {"chunks": 2, "stage_balance": [1, 2, 3, 2]}],
    ids=str,
)
def test_a_mesh_is_chosen_before_the_schedule_is(keys):
    deep, pipeline = llama(num_hidden_layers=8), {"engine": "seq1f1b", "stages": 2, "schedule": "auto", **keys}
    numbers = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "cluster": "4xH100"}
    config = config_of({"size": 2}, pipeline=pipeline, **numbers)
    # As for the same layers without chunks.
    without_chunks = config.with_pipeline(config.pipeline.without_chunks)
    assert choose_mesh(deep, config).mesh == choose_mesh(deep, without_chunks).mesh
    assert choose_mesh(deep, config).mesh.size == 2


def test_segments_are_chosen_for_blocks_as_a_mesh_computes_them(model, monkeypatch):
    verdict = replace(mesh_verdict(type(model), model.config), whole_blocks=("mlp",))
    monkeypatch.setattr(automatic, "mesh_verdict", lambda *_: verdict)
    config = config_of({"size": 2}, pipeline={"engine": "seq1f1b", "stages": 2}, cluster="4xH100")
    choice = segment_choice(model, config, Mesh(MeshShape(1, 2, 1), pipe=2, rank=0, world_size=4))
    assert choice.model.layers == describe_modules(model, verdict).layers
    assert choice.model.layers != describe_modules(model).layers
    # On one rank for each stage nothing is split.
    alone = segment_choice(model, config, Mesh(MeshShape(), pipe=2, rank=0, world_size=4))
    assert alone.model.layers == describe_modules(model).layers


def test_the_number_of_segments_is_the_fastest_that_fits():
    described, cluster = description_of(LLAMA_8B), Cluster.parse("8xH100-80GB")
    layout = Layout(MeshShape(), 8, 1, 8, checkpointing="layers")
    estimates = {
        k: estimate(described, replace(layout, segments=k), cluster, 32768) for k in segment_counts(layout, 32768)
    }
    fitting = {k: estimated.time.total_s for k, estimated in estimates.items() if estimated.fits}
    assert best_segments(described, layout, cluster, 32768) == min(fitting, key=fitting.__getitem__)
    # Where memory is scarce, as many as it takes.
    tight = replace(cluster, gpu=replace(cluster.gpu, memory_bytes=int(estimates[8].memory_bytes / 0.93) + 1))
    assert best_segments(described, layout, tight, 32768) >= 8
    assert best_segments(described, replace(layout, schedule="1f1b"), cluster, 32768) == 1


def scheduled(layout, cluster, length):
    """For each number of segments, whether a step under the layout's own schedule is too large, and then how large."""
    described = description_of(LLAMA_8B)
    steps = {
        k: estimate(described, replace(layout, segments=k), cluster, length) for k in segment_counts(layout, length)
    }
    return {k: (not step.fits, step.time.total_s if step.fits else step.memory_bytes) for k, step in steps.items()}


@pytest.mark.parametrize(
    ("stages", "micro_batches", "more", "fixed", "best"),
    [
        # 2 would take 9 % longer, and in the other case 1 doesn't fit, because shares of a head keep units for longer.
        (4, 16, {"checkpointing": "attention"}, 2, 1),
        (2, 16, {"schedule": "zero_bubble-interleaved", "chunks": 2, "spreads_head": True}, 1, 2),
    ],
)
def test_segments_are_the_fastest_that_fit_under_the_schedule_itself(stages, micro_batches, more, fixed, best):
    described, cluster = description_of(LLAMA_8B), Cluster.parse(f"{stages}xH200-141GB")
    layout = Layout(MeshShape(), stages, 1, micro_batches, **{"schedule": "zero_bubble", **more})
    assert best_segments(described, layout.without_chunks, cluster, 8192) == fixed
    assert best_segments(described, layout, cluster, 8192) == best
    by_segments = scheduled(layout, cluster, 8192)
    assert min(by_segments, key=by_segments.__getitem__) == best


@given(
    st.sampled_from((2, 4)),
    st.sampled_from((1, 2, 4)),
    st.sampled_from((8192, 16384)),
    st.sampled_from((("zero_bubble", 1), ("zero_bubble-v", 2), ("seq1f1b-interleaved", 2), ("auto", 1))),
    st.sampled_from(("none", "attention")),
    st.sampled_from((None, 1.0, 1.5)),
    st.sampled_from((24, 40, 80, 141)),
)
@settings(max_examples=25, deadline=None)
def test_segments_are_never_worse_than_those_of_the_fixed_schedule(
    stages, micro_batches, length, schedule, checkpointing, limit, gigabytes
):
    described, cluster = description_of(LLAMA_8B), Cluster.parse(f"{stages}xH200-141GB")
    cluster = replace(cluster, gpu=replace(cluster.gpu, memory_bytes=gigabytes * 10**9))
    name, chunks = schedule
    layout = Layout(
        MeshShape(), stages, 1, micro_batches, schedule=name, chunks=chunks, checkpointing=checkpointing,
        memory_limit=limit if name.startswith("zero_bubble") else None,
    )  # fmt: skip
    by_segments = scheduled(layout, cluster, length)
    fixed = best_segments(described, layout.without_chunks, cluster, length)
    assert by_segments[best_segments(described, layout, cluster, length)] <= by_segments[fixed]


@pytest.mark.parametrize(
    ("keys", "sections", "error", "message"),
    [
        ({"size": 5}, {"train_micro_batch_size_per_gpu": 4}, MeshError, r"size = 5 ranks .*a multiple of 5 rows"),
        ({}, {"train_batch_size": 4, "gradient_accumulation_steps": 8}, MeshError, "no mesh divides.*= 4 rows in 8 "),
        ({"size": 8}, {"cluster": "8xV100-16GB", "sequence_length": 2**20}, ConfigError, "no layout fits.*GiB a GPU"),
        ({"size": 8}, {"cluster": "8xTPU"}, ConfigError, "no profile of a GPU 'TPU'"),
    ],
)
def test_what_cannot_be_chosen_says_so(model, keys, sections, error, message):
    with pytest.raises(error, match=message):
        choose_mesh(model, config_of(keys, **{"cluster": "8xH100", **sections}))


def test_the_cluster_is_the_worlds(model):
    with pytest.raises(ConfigError, match="has 8 GPUs, but the world has 4 ranks"):
        choose_mesh(model, config_of({"size": 4}, cluster="8xH100"), world_size=4)


def test_sizes_that_are_not_known_yet_are_asked_for():
    config = config_of({}, train_batch_size=8)
    with pytest.raises(ConfigError, match=r"tensor_parallel\.size is missing.*Trainer"):
        config.topology(8)
    assert config.on_mesh(MeshShape(2, 1, 1)).topology(8).data == 4


def test_gpus_are_known_by_their_names():
    assert known_gpu("NVIDIA H100 80GB HBM3", 85 * 10**9).matmul_efficiency == GPUS["H100-80GB"].matmul_efficiency
    assert known_gpu("NVIDIA A100-SXM4-40GB", 42 * 10**9).name == "A100-40GB"
    assert known_gpu("NVIDIA H200", 150 * 10**9).memory_bytes == 150 * 10**9
    assert known_gpu("NVIDIA RTX 4090", 24 * 10**9) is None


def test_a_gpu_without_a_profile_says_what_to_do(monkeypatch):
    monkeypatch.setattr(seen.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(seen.torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(seen.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(seen.torch.cuda, "get_device_name", lambda _: "NVIDIA RTX 4090")
    device = SimpleNamespace(name="NVIDIA RTX 4090", total_memory=24 * 10**9)
    monkeypatch.setattr(seen.torch.cuda, "get_device_properties", lambda _: device)
    with pytest.raises(ConfigError, match=r'no profile of the GPU "NVIDIA RTX 4090".*cuboid profile'):
        seen_cluster(8)
    device.name = "NVIDIA H100 80GB HBM3"
    assert str(seen_cluster(32)) == "4x8xH100-80GB"


@pytest.mark.parametrize(("world_size", "nodes"), [(12, (2, 6)), (8, (1, 8)), (6, (1, 6)), (20, (4, 5)), (7, (1, 7))])
def test_a_cluster_that_is_seen_has_as_many_gpus_as_there_are_ranks(monkeypatch, world_size, nodes):
    monkeypatch.setattr(seen.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(seen.torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(seen.torch.cuda, "current_device", lambda: 0)
    device = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=85 * 10**9)
    monkeypatch.setattr(seen.torch.cuda, "get_device_properties", lambda _: device)
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    cluster = seen_cluster(world_size)
    assert (cluster.nodes, cluster.gpus_per_node) == nodes
    assert cluster.gpus == world_size


def test_ranks_that_share_a_core_have_a_part_of_it(monkeypatch):
    monkeypatch.setattr(seen.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(seen.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    cluster = seen_cluster(16)
    assert (cluster.nodes, cluster.gpus_per_node) == (2, 8)
    assert cluster.gpu.peak_flops == seen.CPU.peak_flops / 4
    assert cluster.gpu.kernel_s == seen.CPU.kernel_s * 4
    # Each message waits for the turns of three others.
    assert cluster.gpu.link_latency_s == pytest.approx(seen.CPU.link_latency_s + 3 * 8e-4)


#: Seconds of a step of 8 rows on 8 ranks of two cores, over loopback in bfloat16, by hidden size and length.
MEASURED = {
    (512, 512): {"4x2x1": 1.511, "2x2x2": 1.861},
    (256, 256): {
        "2x1x1": 0.47,
        "1x2x1": 0.49,
        "4x1x1": 0.52,
        "8x1x1": 0.56,
        "4x2x1": 0.61,
        "2x2x2": 0.76,
        "1x8x1": 1.02,
    },
}


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("size", MEASURED)
def test_on_loopback_meshes_take_as_long_as_measured(monkeypatch, size):
    monkeypatch.setattr(seen.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(seen.os, "sched_getaffinity", lambda _: {0, 1})
    hidden, length = size
    tiny = description_of({"model_type": "llama", "hidden_size": hidden, "intermediate_size": hidden * 43 // 16,
                     "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 8 * hidden})  # fmt: skip
    for name, measured in MEASURED[size].items():
        mesh = MeshShape.parse(name)
        layout = Layout(mesh, 1, 8 * mesh.size // 8, 1, 8 // mesh.size, zero_stage=1)
        predicted = estimate(tiny, layout, seen_cluster(8), length).time.total_s
        assert predicted == pytest.approx(measured, rel=0.35), mesh


# --- where the stages are ---------------------------------------------------------------------------------------


def places_of(sequence_length=8192, accumulation=4, **keys):
    pipeline = {"engine": "seq1f1b", "stages": 4, "segments": 4, "schedule": "auto", "chunks": 2, **keys}
    numbers = {"gradient_accumulation_steps": accumulation, "train_micro_batch_size_per_gpu": 1}
    return {"pipeline": pipeline, "sequence_length": sequence_length, "bf16": {"enabled": True}, **numbers}


def settled(model, sections):
    return settle_stages(model, parse_config(sections), MeshShape()).pipeline


@pytest.mark.sample(1, ci=3)
@pytest.mark.parametrize("limit", [None, 1.25, 3.0])
@pytest.mark.parametrize(("chunks", "layers"), [(2, 8), (2, 13), ("auto", 4), ("auto", 16)])
def test_the_stages_are_where_the_shortest_step_has_them(caplog, chunks, layers, limit):
    deep, described = llama(num_hidden_layers=layers), description_of(LLAMA_8B | {"num_hidden_layers": layers})
    sections = places_of(chunks=chunks, **({} if limit is None else {"memory_limit": limit}))
    with caplog.at_level(logging.WARNING):
        pipeline = settled(deep, sections)
    counts = [1, *(v for v in ((2, 3, 4) if chunks == "auto" else (chunks,)) if 4 * v <= layers)]
    lengths = Cutter(parse_config(sections).pipeline, described.sizes, Mesh(MeshShape(), rank=0, world_size=1)).lengths(
        8192, 4
    )
    shape, times = PipelineShape(4, 4, 4), {}
    for name, v in [("auto", 1), *product(("auto-interleaved", "zero_bubble-v"), counts[1:])]:
        layer_counts = balance_by_flops(described.sizes, 4 * v, 4096)
        candidate = ModelPipeline(name, 4, v, layer_counts, lengths, limit)
        costs = candidate.costs(described.sizes, place_stages(name, 4, v)).actions
        schedule = candidate.order(described.sizes, 4)
        assert limit is None or peak_of(schedule, costs) <= limit * (1 + 1e-6)
        times[name, v] = simulate(schedule, replace(shape, stages=4 * v), costs.duration_s).makespan_s
    chosen_s = times[pipeline.schedule, pipeline.chunks]
    assert chosen_s <= min(times.values()) * (1 if chunks == 2 else 1.01)
    assert all(time > chosen_s * (1 - 0.011) for (_, v), time in times.items() if v < pipeline.chunks)
    (said,) = [record.getMessage() for record in caplog.records if record.name == automatic.__name__]
    assert said.startswith('"schedule": "auto" is, for 4 micro-batches of 8192 tokens in 4 segments, ')
    assert said.count("chunks") == 3 * len(counts[1:])
    # The estimate is of the same.
    settings, rest = require_config(sections)
    layout = layout_of_config(settings, rest, described, Cluster.parse("4xH100"), 8192)
    assert (layout.schedule, layout.chunks) == (pipeline.schedule, pipeline.chunks)


def peak_of(schedule, costs):
    return max(peak_bytes(actions, costs.kept, costs.input_gradient_frees) for actions in schedule)


@pytest.mark.ci
def test_stages_are_searched_with_their_schedule(caplog):
    deep, described = llama(num_hidden_layers=10), description_of(LLAMA_8B | {"num_hidden_layers": 10})
    for keys in ({"schedule": "zero_bubble", "chunks": 1}, {"chunks": 2}):
        sections = places_of(accumulation=1, stage_balance="schedule", **keys)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            pipeline = settled(deep, sections)
        assert pipeline.is_settled
        assert sum(pipeline.stage_balance) == 10
        said = [record.getMessage() for record in caplog.records if record.name == automatic.__name__]
        assert said[0].startswith(f'"stage_balance": "schedule" is {list(pipeline.stage_balance)}, for 1 micro-batches')
        assert len(said) == (2 if "schedule" not in keys else 1)
        # The estimate is of the same.
        settings, rest = require_config(sections)
        layout = layout_of_config(settings, rest, described, Cluster.parse("4xH100"), 8192)
        chosen = layout.schedule, layout.chunks, layout.stage_layers
        assert chosen == (pipeline.schedule, pipeline.chunks, pipeline.stage_balance)


def test_a_list_of_layers_leaves_the_schedules_with_as_many_parts(model):
    deep = llama(num_hidden_layers=8)
    for chunks in (2, "auto"):
        pipeline = settled(deep, places_of(chunks=chunks, stage_balance=[1] * 8))
        assert pipeline.chunks == 2
    assert settled(deep, places_of(chunks="auto", stage_balance=[2] * 4)).chunks == 1
    with pytest.raises(ConfigError, match=r"stage_balance is \[2, 2.* 8 numbers, each at least 1, with the sum 8"):
        settled(deep, places_of(stage_balance=[2] * 8))
    with pytest.raises(ConfigError, match=r"pipeline\.stages is 4 and pipeline\.chunks 2, but the model has 4 layers"):
        settled(model, places_of())
    assert settled(model, places_of(chunks="auto")).chunks == 1


def test_what_works_without_chunks_is_left_as_it_is(model):
    for keys in ({"chunks": 1}, {"schedule": "zero_bubble-v"}, {"schedule": "seq1f1b", "chunks": 1}):
        config = parse_config(places_of(**keys))
        assert settle(model, config)[1] is config


def test_the_number_of_segments_may_be_open_too():
    deep = llama(num_hidden_layers=8)
    sections = {**places_of(segments="auto"), "cluster": "4xH100"}
    pipeline = settled(deep, sections)
    assert pipeline.segments == "auto"
    mesh = Mesh(MeshShape(), pipe=4, placement=pipeline.placement, rank=0, world_size=4)
    config = parse_config(sections).with_pipeline(pipeline)
    assert segment_choice(deep, config, mesh)(32768, 1, 4, recomputes=False) > 1


def test_micro_batches_are_those_that_deepspeed_derives():
    numbers = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}
    assert parse_config({**places_of(accumulation=None), **numbers}).framework.per_replica(4) == (2, 4)
    assert parse_config(places_of(accumulation=6)).framework.per_replica(4) == (1, 6)


def test_places_that_are_not_known_yet_are_asked_for():
    with pytest.raises(ConfigError, match=r"where the chunks are is known once the model is loaded"):
        _ = parse_config(places_of()).placement


@pytest.mark.parametrize(
    ("chunks", "allowed", "refused"),
    [
        (2, [(0, 1), (0, 1, 0, 1), (0, 1, 1, 0)], [(0, 1, 0, 1, 0, 1), (0,), (1, 0), (0, 0, 1, 1)]),
        ("auto", [(0, 1), (0, 1, 1, 0, 0, 1)], [(0, 1, 0), (0, 0, 1, 1)]),
    ],
)
def test_a_model_may_be_cut_as_auto_would_cut_it(chunks, allowed, refused):
    pipeline = parse_config(places_of(stages=2, chunks=chunks)).pipeline
    assert all(map(pipeline.allows, allowed))
    assert not any(map(pipeline.allows, refused))


AUTOMATIC = """
    import copy, json, logging
    import torch, deepspeed, cuboid
    from transformers import AutoModelForCausalLM, LlamaConfig

    said = []
    class Keep(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())
    logging.getLogger("cuboid.planner.automatic").addHandler(Keep())
    model_config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, vocab_size=64,
        max_position_embeddings=1024,
    )
    ids = torch.randint(64, (8, 1024), generator=torch.Generator().manual_seed(0))
    config = {
        "train_batch_size": 8, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0, "cluster": "RANKSxH100",
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0, "torch_adam": True}},
        "tensor_parallel": {"mode": "3d_tensor", "mesh": "auto"},
        **json.loads('SECTIONS'),
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_config)
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(model_config))
    plain.load_state_dict(model.state_dict())
    engine, *_ = deepspeed.initialize(model=cuboid.shard(model, config), config=config)
    mesh = cuboid.mesh_of(engine)
    rows, replica = engine.train_micro_batch_size_per_gpu(), mesh.coordinate.data
    own = ids[replica * 2 * rows : (replica + 1) * 2 * rows].split(rows)

    def step():
        batches = [{"input_ids": batch, "labels": batch} for batch in own]
        if hasattr(engine, "train_batch"):
            return float(engine.train_batch(iter(batches)))
        losses = []
        for batch in batches:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        total = torch.stack(losses).mean()
        torch.distributed.all_reduce(total, group=mesh.data_parallel_group)
        return float(total) / mesh.topology.data

    losses = [step(), step()]
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0)
    expected = []
    for _ in range(2):
        loss = plain(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss))
    print("RESULT" + json.dumps([str(mesh.shape), rows, mesh.topology.data, losses, expected, said]), flush=True)
"""


@pytest.mark.sample(0, ci=1)
@pytest.mark.parametrize(
    ("ranks", "sections"),
    [(2, "{}"), (4, "{}"), (4, '{"pipeline": {"engine": "seq1f1b", "stages": 2}}')],
    ids=["2", "4", "4 in stages"],
)
def test_an_engine_trains_on_what_was_chosen(tmp_path, ranks, sections):
    reports = reports_of(ranks, AUTOMATIC.replace("SECTIONS", sections).replace("RANKS", str(ranks)), tmp_path)
    assert len(reports) == ranks
    shapes = {shape for shape, *_ in reports}
    assert len(shapes) == 1
    stages = 2 if "pipeline" in sections else 1
    for shape, rows, replicas, losses, expected, _ in reports:
        assert MeshShape.parse(shape).size * replicas * stages == ranks
        assert rows * replicas == 4
        assert losses == pytest.approx(expected, rel=1e-5)
    spoken = [said for *_, said in reports if said]
    assert len(spoken) == 1, "by the first rank only"
    assert [line.partition(" is ")[0] for line in spoken[0]] == ['"mesh": "auto"', '"segments": "auto"'][:stages]


DIFFERENT = """
    import json
    import torch.distributed as dist
    from cuboid.distributed.mesh import Mesh
    from cuboid.distributed.topology import MeshShape

    dist.init_process_group("gloo")
    try:
        Mesh(MeshShape(2, 1, 1) if dist.get_rank() else MeshShape(1, 2, 1)).connect()
    except Exception as error:
        print("RESULT" + json.dumps(f"{type(error).__name__}: {error}"), flush=True)
"""


def test_ranks_that_came_to_different_meshes_say_so(tmp_path):
    first, second = reports_of(2, DIFFERENT, tmp_path)
    assert first.startswith("MeshError: ranks have different meshes, 1×2×1, 2×1×1; rank 0 has 1×2×1")
    assert "rank 1 has 2×1×1" in second


# --- profiles ---------------------------------------------------------------------------------------------------

PROFILE = """
    import json, sys
    from pathlib import Path
    import torch.distributed as dist
    from cuboid.cli import commands
    from cuboid.planner import profile

    # Sizes that take no time.
    profile._PRODUCTS, profile._TOKENS, profile._LARGE = ((64, 256, 256), (256, 256, 256)), (64, 256), 2**18
    folder = Path(sys.argv[1])
    try:
        commands(["profile", "--out", str(folder / "ours.json"), "--seconds", "2"], standalone_mode=True)
    except SystemExit as end:
        print("RESULT" + json.dumps([end.code, dist.is_initialized()]), flush=True)
"""


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_profile_is_measured_and_read(tmp_path, ranks):
    def launch(count, script, root):
        return world(count, script, root) if count > 1 else alone(script, root)

    assert reports_of(ranks, PROFILE, tmp_path, launch) == [[0, False]] * ranks
    cluster = Cluster.parse(str(tmp_path / "ours.json"))
    assert (cluster.nodes, cluster.gpus_per_node, cluster.gpu.name) == (1, ranks, "CPU")
    content = json.loads((tmp_path / "ours.json").read_text())
    measured = content["measured"]
    assert len(measured["products"]) == len(measured["attention"]) == 2
    assert [row["ranks"] for row in measured["all_gather"]] == [2, 2, 2] * (ranks - 1)
    gpu = cluster.gpu
    # Its rates are the measured ones, since no data sheet is known.
    assert (gpu.matmul_efficiency, gpu.memory_efficiency) == (1, 1)
    largest = measured["products"][-1]
    rate = 2 * largest["rows"] * largest["inputs"] * largest["outputs"] / largest["seconds"]
    # Of its seconds, those that read and write memory and start the kernel are taken away, up to nine tenths.
    assert rate <= gpu.peak_flops <= 10.001 * rate
    assert (gpu.link_efficiency == 1) is (ranks == 2)
    assert estimate(description_of(LLAMA_8B), Layout(MeshShape(1, ranks, 1)), cluster, 4096).time.total_s > 1


def test_a_known_gpus_profile_has_shares_of_its_data_sheet(monkeypatch):
    profiler = profile.Profiler(torch.device("cpu"), 1.0)
    base = GPUS["H100-80GB"]
    times = {1024: 5e-6, 2**26: 5e-6 + 3 * 2**27 / (0.5 * base.memory_bytes_per_s)}
    monkeypatch.setattr(profiler, "_elementwise", times.__getitem__)
    monkeypatch.setattr(profiler, "_product", lambda gpu, size: (0.7 * gpu.peak_flops, 1e-3))
    monkeypatch.setattr(profiler, "_attention", lambda gpu, tokens: (0.4 * gpu.peak_flops, 1e-3))
    profiled = profiler._kernels(base, is_known=True)
    assert profiled == replace(base, kernel_s=5e-6, memory_efficiency=pytest.approx(0.5), matmul_efficiency=0.7,
                            attention_efficiency=0.4)  # fmt: skip
    renamed = replace(base, name="another")
    unknown = profiler._kernels(renamed, is_known=False)
    assert unknown.peak_flops == pytest.approx(0.7 * base.peak_flops)
    assert (unknown.matmul_efficiency, unknown.memory_efficiency) == (1, 1)
    assert unknown.attention_efficiency == pytest.approx(0.4 / 0.7)


def test_sizes_that_would_take_too_long_are_left_out():
    profiler = profile.Profiler(torch.device("cpu"), 4.0)
    assert profiler._series([4, 1, 2, 1000], float, lambda size: (size, 0.1 * size)) == [1, 2, 4]
