"""The planner: models by their configs, clusters, memory and time of a step, the search, and the measured tables."""

import functools
import itertools
import json
import statistics
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from transformers import AutoConfig
from typer.testing import CliRunner

from cuboid.cli import commands
from cuboid.config.compatibility import check_framework_config
from cuboid.config.schema import require_config, split_config
from cuboid.distributed.topology import MeshShape
from cuboid.errors import ConfigError, MeshError
from cuboid.planner.cost.layout import Layout
from cuboid.planner.cost.memory import USABLE, _Stage, ends_memory, fullest
from cuboid.planner.cost.step import StepCost
from cuboid.planner.description.cluster import GPUS, Cluster
from cuboid.planner.description.meta_model import describe
from cuboid.planner.estimate import cuboid_software, estimate, layout_of_config, remedies, segment_counts
from cuboid.planner.layer_memory import KeptSizes, layer_kept_bytes
from cuboid.planner.model_formulas import block_sizes
from cuboid.planner.ranking import SearchResult, best_of
from cuboid.planner.report import print_plan
from cuboid.planner.search import _with_other_stages, config_of, layouts, parse_layout, search
from cuboid.seq1f1b.schedule.actions import Op
from planning import COMMON, LLAMA_8B, description_of, small

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "benchmarks")]

from generators import choosing, planner, planner_rows  # noqa: E402


def test_clusters_are_read(tmp_path):
    cluster = Cluster.parse("4x8xH100-80GB")
    assert (cluster.nodes, cluster.gpus_per_node, cluster.gpus, cluster.gpu.name) == (4, 8, 32, "H100-80GB")
    assert Cluster.parse("8xA100-40GB").nodes == 1
    profile = tmp_path / "ours.json"
    profile.write_text(json.dumps({"nodes": 2, "gpus_per_node": 4, "gpu": {"like": "H200-141GB", "kernel_s": 1e-6}}))
    ours = Cluster.parse(str(profile))
    assert ours.gpu == replace(GPUS["H200-141GB"], kernel_s=1e-6)
    assert ours.gpus == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [("8x8", "form NODESxGPUSxKIND"), ("8x8xTPU", "no profile of a GPU 'TPU'.*H100-80GB"), ("0x8xH100", "has 0 GPUs")],
)
def test_clusters_that_mean_nothing_are_rejected(text, message):
    with pytest.raises(ConfigError, match=message):
        Cluster.parse(text)


@pytest.mark.parametrize(
    "gpu", [{"like": "H100-80GB", "speed": 1}, {"name": "x"}, {"like": "H100-80GB", "kernel_s": -1}]
)
def test_profiles_that_mean_nothing_are_rejected(tmp_path, gpu):
    (tmp_path / "a.json").write_text(json.dumps({"gpu": gpu}))
    with pytest.raises(ConfigError, match=r"a\.json"):
        Cluster.parse(str(tmp_path / "a.json"))


@pytest.mark.ci
@given(st.sampled_from(["1x1x1", "1x2x1", "2x1x1", "1x1x2", "1x2x2", "2x2x2"]), st.sampled_from(["llama", "gpt2"]))
def test_kept_activations_are_those_of_the_formulas_that_counters_confirm(mesh, name):
    """Those of test_memory_formula.py, but for the gathered weights of norms."""
    shape = MeshShape.parse(mesh)
    heads = {"num_key_value_heads": 12}
    nonlinearity = {"llama": "hidden_act", "gpt2": "activation_function"}[name]
    dropouts = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    model = description_of({"model_type": name, **COMMON, **heads, **dropouts, nonlinearity: "gelu_new", "n_inner": 96})
    layout = Layout(shape, micro_batch=4)
    cost = StepCost(model, layout, Cluster.parse("8xH100"), 32)
    attention = model.layers[0].attention
    sizes = KeptSizes(attention.heads, attention.key // shape.of("sequence", "hidden"), model.nonlinearity)
    exact = layer_kept_bytes(block_sizes(model, shape), sizes, shape, 4, 32)
    counted = _Stage(cost, 0)._kept(0, 0)
    assert counted == pytest.approx(sum(exact.values()), rel=0.03)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (4, 4), (4, 16), (8, 12)])
def test_closed_form_of_whole_sequences_is_the_simulators(stages, micro_batches):
    layout = Layout(MeshShape(), stages, 1, micro_batches)
    cost = StepCost(description_of(LLAMA_8B), layout, Cluster(GPUS["H100-80GB"], 1, stages), 4096)
    times = cost.stage_times()
    assert cost._whole_sequences_s(times) == pytest.approx(cost.pipeline_s(times), rel=0.03)


def test_estimates_of_a_layout_add_up():
    model, cluster = description_of(LLAMA_8B), Cluster.parse("2x8xH100-80GB")
    estimated = estimate(model, Layout(MeshShape(2, 2, 1), 2, 2, 8, 2, segments=4), cluster, 8192)
    assert sum(estimated.cost.lengths) == 8192
    assert estimated.fits
    assert estimated.as_dict()["step_s"] == pytest.approx(sum(estimated.as_dict()["time"].values()))
    assert 4 * sum(memory.parameters for memory in estimated.stages) == pytest.approx(2 * model.parameters)
    assert 0 < estimated.time.bubble < 0.5
    assert 0.05 < estimated.mfu < 0.8


@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize("zero", [0, 1])
def test_replicas_reduce_the_gradients_of_all_their_parameters(name, zero):
    sizes = {"model_type": name, "num_hidden_layers": 4, "num_local_experts": 8, "num_experts_per_tok": 2}
    model, cluster = description_of({**LLAMA_8B, **sizes}), Cluster.parse("16xH100")
    layout = Layout(MeshShape(1, 2, 1), replicas=8, zero_stage=zero)
    cost = StepCost(model, layout, cluster, 4096)
    gradients = 2 * model.parameters / layout.mesh.size
    assert cost.step_time().reduce_s == pytest.approx(2 * cost.units.links.replicas.gather_s(gradients), rel=1e-3)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_experts_are_reduced_over_the_ranks_that_have_the_same(ranks):
    model, cluster = description_of(small("mixtral")), Cluster.parse("2x8xH100")
    cost = StepCost(model, Layout(MeshShape(1, 2, 1), replicas=8, expert_ranks=ranks), cluster, 64)
    experts = cost.units.links.expert_replicas
    assert experts.size == 8 // ranks
    # Pairs of replicas with the same experts are on different nodes.
    assert (experts.rate < cluster.gpu.link_bytes_per_s * cluster.gpu.link_efficiency) is (experts.size > 1)
    local_experts = sum(layer.experts.parameters for layer in model.layers) / (2 * ranks)
    dense = cost.own_parameters[0][0]
    groups = (
        [(cost.units.links.replicas, dense), (experts, local_experts)]
        if ranks > 1
        else [(experts, dense + local_experts)]
    )
    expected = sum(2 * group.gather_s(2 * count) for group, count in groups)
    assert cost.step_time().reduce_s == pytest.approx(expected)


def test_more_segments_keep_less_and_wait_less():
    model, cluster = description_of(LLAMA_8B), Cluster.parse("8xH100-80GB")
    estimates = [estimate(model, Layout(MeshShape(), 8, 1, 8, segments=k), cluster, 32768) for k in (1, 2, 4)]
    for one, more in itertools.pairwise(estimates):
        assert more.memory_bytes < one.memory_bytes
        assert more.time.bubble < one.time.bubble


@pytest.mark.parametrize(
    ("layout", "error", "message"),
    [
        (Layout(MeshShape(1, 3, 1)), ConfigError, "3 ranks"),
        (Layout(MeshShape(1, 64, 1)), MeshError, "32 attention heads don't divide.*that can"),
        (Layout(MeshShape(2, 1, 1), replicas=32, micro_batch=3), ConfigError, "mesh.batch = 2 doesn't divide"),
        (Layout(MeshShape(), stages=64), ConfigError, "32 layers"),
    ],
)
def test_layouts_that_cannot_run_are_rejected(layout, error, message):
    with pytest.raises(error, match=message):
        estimate(description_of(LLAMA_8B), layout, Cluster.parse("8x8xH100"), 4096)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_latents_are_sent_and_kept_whole_on_a_mesh(name):
    config, cluster, layout = small(name), Cluster.parse("4xH100"), Layout(MeshShape(1, 2, 2))
    wider = small(name, kv_lora_rank=config.kv_lora_rank + 32)
    few, many = (estimate(description_of(c), layout, cluster, 64) for c in (config, wider))
    assert estimate(description_of(config), Layout(MeshShape(), replicas=2), Cluster.parse("2xH100"), 64).fits
    # In each of three layers 32 features of 64 tokens are gathered by two ranks, and scattered; their weights, half of
    # which multiply this rank's features of the input, are gathered twice, and scattered.
    more = 3 * (2 * 32 * 64 * 2 + 3 * 32 * 24 * 2) // 2
    assert many.bytes_by_axis["sequence"] - few.bytes_by_axis["sequence"] == more
    # As they are computed and as they are normalized, which no axis divides.
    kept = [max(stage.activations for stage in estimated.stages) for estimated in (few, many)]
    assert kept[1] - kept[0] == pytest.approx(3 * 32 * 64 * 2 * 2, rel=1e-3)
    # The router multiplies a copy in float32.
    assert description_of(config).kinds[-1].experts.router_kept == 48 * 4
    assert description_of(small("mixtral")).kinds[0].experts.router_kept == 0
    with pytest.raises(MeshError, match="12 attention heads don't divide by sequence × hidden = 8"):
        estimate(description_of(config), Layout(MeshShape(1, 8, 1)), Cluster.parse("8xH100"), 64)


def test_a_router_that_needs_more_than_tokens_is_named_as_uncounted():
    assert "what MiniMaxM2TopKRouter saves" in description_of(small("minimax_m2")).uncounted_by_formulas


@pytest.mark.ci
@pytest.mark.parametrize("cluster", ["2xA100-40GB", pytest.param("4xA100-40GB", marks=pytest.mark.slow)])
def test_search_finds_what_going_through_all_layouts_finds(cluster):
    model, cluster = description_of({**LLAMA_8B, "num_hidden_layers": 4}), Cluster.parse(cluster)
    every = [estimate(model, layout, cluster, 4096) for layout in layouts(model, cluster, 4096, 4)]
    fastest = min((estimated for estimated in every if estimated.fits), key=lambda estimated: estimated.time.total_s)
    result = search(model, cluster, 4096, 4)
    assert result.considered >= len(every)
    best = result.best[0]
    assert best.time.total_s <= fastest.time.total_s
    # Of other schedules not all are tried.
    assert best.time.total_s == fastest.time.total_s or best.layout.schedule != "seq1f1b"
    assert estimate(model, best.layout, cluster, 4096).time == best.time
    smallest = min(estimated.memory_bytes for estimated in every)
    assert search(model, cluster, 4096, 4, goal="smallest").best[0].memory_bytes == pytest.approx(smallest)


def test_the_optimizer_is_planned_in_host_memory_where_nothing_else_fits():
    model, cluster = description_of(LLAMA_8B), Cluster.parse("1xH100-80GB")
    assert not search(model, Cluster.parse("1xH200-141GB"), 8192, 16, count=1).best[0].layout.optimizer_on_host
    best = search(model, cluster, 8192, 16, count=1).best[0]
    assert best.layout.optimizer_on_host
    assert best.fits
    config = config_of(best.layout)
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    assert layout_of_config(*split_config(config), model, cluster, 8192) == best.layout
    check_framework_config(*require_config(config), 1, is_complete=True)


def test_gradients_take_what_the_config_accumulates_them_in():
    model, cluster = replace(description_of(LLAMA_8B), config=None), Cluster.parse("4xH100")
    layouts_with_default = (Layout(MeshShape(4, 1, 1), micro_batch=4), 2), (Layout(MeshShape(2, 1, 1), 2, 4), 4)
    for layout, default in layouts_with_default:
        assert layout_of_config(*split_config(config_of(layout)), model, cluster, 4096) == layout
        plain = estimate(model, layout, cluster, 4096)
        for size in (2, 4 if layout.stages > 1 else 6):
            config = config_of(replace(layout, gradient_bytes=size))
            read = layout_of_config(*split_config(config), model, cluster, 4096)
            assert read == replace(layout, gradient_bytes=size)
            gradients = [stage.gradients for stage in estimate(model, read, cluster, 4096).stages]
            assert gradients == [stage.gradients * size / default for stage in plain.stages]


def test_the_search_tries_meshes_of_four_nodes_for_long_rows_alone():
    model, cluster = replace(description_of(LLAMA_8B), config=None), Cluster.parse("8x8xH100")
    for length, most in ((2**17, 16), (2**20, 32)):
        tried = {layout.mesh.of("sequence", "hidden") for layout in layouts(model, cluster, length, 4)}
        assert max(tried) == most


def test_more_segments_are_tried_for_the_bubble_of_few_micro_batches_of_long_rows():
    layout = Layout(MeshShape(4, 16, 1), 16, 4)
    assert segment_counts(layout, 2**20) == [1, 2, 4, 8, 16, 32, 64]
    assert segment_counts(replace(layout, micro_batches=2), 2**20) == [1, 2, 4, 8, 16, 32, 64]
    assert segment_counts(replace(layout, micro_batches=4), 2**20) == [1, 2, 4, 8, 16, 32]
    assert segment_counts(replace(layout, micro_batches=8), 2**20) == [1, 2, 4, 8, 16]
    # Segments of 4,096 tokens at least.
    assert segment_counts(layout, 2**17) == [1, 2, 4, 8, 16, 32]
    assert segment_counts(layout, 2**16) == [1, 2, 4, 8, 16]


# The search for a head on all stages finds another schedule for every change.
@pytest.mark.slow
def test_other_schedules_are_tried_on_pipelines_that_fit():
    model, cluster = description_of({**LLAMA_8B, "num_hidden_layers": 24}), Cluster.parse("2x4xA100-40GB")
    best = search(model, cluster, 2**16, 1).best[0]
    # Without checkpointing it would be faster still, but has no room.
    assert (best.layout.stages, best.layout.schedule, best.layout.chunks) == (2, "zero_bubble-interleaved", 4)
    assert best.layout.checkpointing == "attention"
    fixed = replace(best.layout, schedule="seq1f1b", chunks=1)
    assert not estimate(model, replace(fixed, checkpointing="none"), cluster, 2**16).fits
    assert estimate(model, fixed, cluster, 2**16).time.total_s > 1.05 * best.time.total_s


@pytest.mark.ci
def test_a_head_on_all_stages_is_planned_where_it_pays():
    # A large vocabulary for few layers, and a slow network.
    model = describe(AutoConfig.for_model(**LLAMA_8B | {"num_hidden_layers": 16, "vocab_size": 256_000}))
    best = search(model, Cluster.parse("4x1xA100-80GB"), 2**16, 1, count=2).best[0]
    assert best.layout.spreads_head
    assert (best.layout.schedule, best.layout.chunks) == ("zero_bubble-interleaved", 4)
    assert config_of(best.layout)["pipeline"]["head"] == "spread"
    last = estimate(model, replace(best.layout, spreads_head=False), best.cost.cluster, 2**16)
    assert last.time.total_s > 1.1 * best.time.total_s


def test_rows_of_a_spread_head_travel_beside_units():
    """In the second case these are too short for it, and keep less than the gradients of all rows take."""
    model = description_of(LLAMA_8B | {"num_hidden_layers": 4, "vocab_size": 1_000_000})
    layout, cluster = Layout(MeshShape(), 4, schedule="zero_bubble", spreads_head=True), Cluster.parse("4x1xA100-80GB")
    constant_s = cluster.gpu.step_s
    hidden, exposed = (estimate(model, layout, cluster, length) for length in (2**16, 2**10))
    assert hidden.time.constant_s == constant_s
    sent_s = sum(exposed.cost.units.head_rows_s())
    assert constant_s + sent_s / 2 < exposed.time.constant_s < constant_s + sent_s
    assert exposed.stages[-1].activations > 2 * 1_000_000 * 4096 > 10 * exposed.stages[0].activations


@pytest.mark.sample(4, ci="others")
@pytest.mark.parametrize("compiles", [False, True], ids=["uncompiled", "compiled"])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(MeshShape(2, 2, 2), 1, 8, 1),
        Layout(MeshShape(2, 2, 2), 1, 8, 1, weight_gather="step"),
        Layout(MeshShape(4, 2, 1), 1, 8, 1, checkpointing="layers"),
        Layout(MeshShape(4, 2, 1), 1, 8, 1, checkpointing="attention", weight_gather="step"),
        Layout(MeshShape(2, 2, 1), 2, 4, 2, segments=2, schedule="zero_bubble"),
        Layout(MeshShape(2, 1, 2), 2, 4, 2, segments=2, schedule="zero_bubble"),
        Layout(MeshShape(2, 2, 1), 2, 4, 2, segments=2),
    ],
    ids=str,
)
def test_times_know_what_fp8_sends_by_the_formula(layout, compiles):
    model, cluster, length = description_of(LLAMA_8B), Cluster.parse("8xH100"), 8192
    # Links that nothing hides, and messages that take no time but their bytes'.
    gpu = replace(cluster.gpu, link_overlap=0.0, link_latency_s=0.0, link_efficiency=1.0, link_bytes_per_s=1e9)
    spent = []
    for least in (None, 1024):
        one = estimate(
            model, replace(layout, compiled=compiles, fp8_min_dimension=least), replace(cluster, gpu=gpu), length
        )
        units, waiting_s = one.cost.units, 0.0
        for start, stop in itertools.pairwise(itertools.accumulate(one.cost.lengths, initial=0)):
            parts = [units.layer_forward(model.layers[0], start, stop)]
            if one.cost.splits:
                parts += units.layer_split_backward(model.layers[0], start, stop)
            else:
                parts.append(units.layer_backward(model.layers[0], start, stop))
            waiting_s += sum(part.exposed for part in parts)
        layers = max(one.cost.stage_layers)
        spent.append(
            (waiting_s * gpu.link_bytes_per_s * layers * layout.micro_batches, sum(one.bytes_by_axis.values()))
        )
    (wide, wide_bytes), (narrow, narrow_bytes) = spent
    assert wide_bytes > narrow_bytes
    assert wide - narrow == pytest.approx(wide_bytes - narrow_bytes, rel=1e-4)


def test_compiled_layers_and_fp8_take_less_time():
    model, cluster, length = description_of(LLAMA_8B), Cluster.parse("8xH100"), 8192
    layout = Layout(MeshShape(8, 1, 1), 1, 8, 2)
    eager, compiled, fp8 = (
        estimate(model, one, cluster, length)
        for one in (
            layout, replace(layout, compiled=True), replace(layout, compiled=True, fp8_min_dimension=2048)
        )
    )  # fmt: skip
    # Nearly as on one H100, where two layers took 1.07 and 1.13 times as long.
    assert 1.03 < eager.time.total_s / compiled.time.total_s < 1.08
    assert 1.1 < compiled.time.total_s / fp8.time.total_s < 1.2
    assert compiled.memory_bytes == fp8.memory_bytes == eager.memory_bytes
    # On eight ranks of `hidden` blocks are too small for 8 bits, in products and in messages.
    narrow = Layout(MeshShape(1, 1, 8), 1, 1, 2)
    sixteen, eight = (
        estimate(model, one, cluster, length) for one in (narrow, replace(narrow, fp8_min_dimension=2048))
    )
    assert sixteen.time == eight.time
    # With a split backward, too, where units are long enough for their kernels to take longer than the host.
    for split in (
        Layout(MeshShape(2, 1, 1), 4, 16, 4, segments=4, schedule="zero_bubble"),
        Layout(MeshShape(), 8, 2, 4, segments=4, schedule="zero_bubble"),
    ):
        times = [estimate(model, replace(split, compiled=compiles), cluster, length).time for compiles in (False, True)]
        assert times[1].total_s < times[0].total_s
    config = config_of(fp8.layout)
    assert config["tensor_parallel"]["compile"] is True
    assert config["tensor_parallel"]["fp8"] == {"recipe": "rowwise_with_gw_hp"}
    assert layout_of_config(*split_config(config), model, cluster, length) == fp8.layout
    with pytest.raises(ConfigError, match="A100-80GB: this GPU has no products in fp8"):
        estimate(model, fp8.layout, Cluster.parse("8xA100-80GB"), length)
    with pytest.raises(ConfigError, match="mixtral has experts; leave fp8 out"):
        search(description_of(small("mixtral")), cluster, 64, 8, fp8=True)


@pytest.mark.ci
def test_fewest_gpus_are_the_smallest_part_of_a_cluster_that_has_a_layout():
    model = description_of(LLAMA_8B)
    best = search(model, Cluster.parse("4x8xV100-16GB"), 4096, 32, goal="fewest").best[0]
    used = best.cost.cluster
    assert (used.nodes, used.gpus_per_node) == (1, 4)
    assert best.layout.optimizer_on_host
    assert best.time == search(model, used, 4096, 32).best[0].time
    with pytest.raises(ConfigError, match="no layout fits"):
        search(model, Cluster.parse("2xV100-16GB"), 4096, 32)


@pytest.mark.parametrize("gather", ["layer", "step"])
def test_gradients_that_are_reduced_once_send_less_and_take_room(gather):
    model, cluster = description_of(LLAMA_8B), Cluster.parse("2x8xH100-80GB")

    def pair(micro_batches, segments):
        layout = Layout(MeshShape(4, 1, 1), 4, 4, micro_batches, segments=segments, weight_gather=gather)
        return [estimate(model, replace(layout, gradient_sync=sync), cluster, 4096) for sync in ("unit", "step")]

    unit, step = pair(8, 4)
    assert step.bytes_by_axis["batch"] < unit.bytes_by_axis["batch"]
    assert step.time.total_s < unit.time.total_s
    # Four bytes of each parameter of the first stage's blocks, and those of its embedding.
    blocks = sum(layer.dense_parameters - layer.others for layer in model.layers[: step.cost.stage_layers[0]])
    more = step.stages[0].gathered - unit.stages[0].gathered
    assert more == pytest.approx(4 * (blocks + model.embedding_parameters))
    # With a single unit a step's last one is each one.
    once, always = (estimated.cost.stage_times() for estimated in pair(1, 1))
    for stage in range(4):
        waits = [times.busy(stage).exposed + times.once_s[stage] for times in (once, always)]
        assert waits[0] == pytest.approx(waits[1])


#: No mesh of more than one rank divides them.
SEVEN_HEADS = {"hidden_size": 3584, "num_attention_heads": 7, "num_key_value_heads": 7}


def test_search_says_why_nothing_fits():
    model = description_of(planner_rows.CONFIGS["llama3.1-405b"])
    with pytest.raises(ConfigError, match=r"no layout fits llama with 4096 tokens.*needs .* GiB a GPU.*more GPUs"):
        search(model, Cluster.parse("2xV100-16GB"), 4096, 2)
    with pytest.raises(ConfigError, match="no layout divides"):
        search(
            description_of({**LLAMA_8B, **SEVEN_HEADS, "num_hidden_layers": 1}),
            Cluster.parse("5xH100"),
            4097,
            3,
        )


@pytest.mark.sample(1)
@pytest.mark.parametrize(("cluster", "length"), [("2xV100-16GB", 4096), ("2xA100-40GB", 2**18)])
def test_the_smallest_layout_is_named_with_all_that_it_needs(cluster, length):
    model, cluster = description_of({**LLAMA_8B, "num_hidden_layers": 24}), Cluster.parse(cluster)
    tried = list(layouts(model, cluster, length, 2))
    tried += [replace(layout, on_host=True) for layout in tried if layout.recomputes]
    tried += [replace(layout, optimizer_on_host=True) for layout in tried if layout.stages == 1 and layout.zero_stage]
    every = [estimate(model, layout, cluster, length) for layout in tried]
    least = min(estimated.memory_bytes for estimated in every)
    assert least > every[0].limit_bytes
    with pytest.raises(ConfigError, match=f"smallest found, .* needs {least / 2**30:.1f} GiB a GPU"):
        search(model, cluster, length, 2)


def test_what_the_smallest_layout_needs_is_more_than_can_be_used():
    model, layout = description_of(LLAMA_8B), Layout(MeshShape(), 4, stage_layers=(1, 20, 10, 1))
    cost = StepCost(model, layout, Cluster.parse("4xH100"), 4096)
    most = fullest(cost).total
    # Room for the first stage and the last one, but not for the second.
    cost.cluster = replace(cost.cluster, gpu=replace(cost.cluster.gpu, memory_bytes=int((most - 2**30) / USABLE)))
    assert ends_memory(cost) < USABLE * cost.cluster.gpu.memory_bytes
    with pytest.raises(ConfigError, match=f"needs {most / 2**30:.1f} GiB a GPU, and {most / 2**30 - 1:.1f} can"):
        best_of([[cost]], "this")


@functools.cache
def layouts_on_eight():
    return list(layouts(description_of(LLAMA_8B), Cluster.parse("8xH100"), 4096, 16))


@given(st.data())
def test_configs_of_layouts_are_what_the_parser_accepts(data):
    layout = data.draw(st.sampled_from(layouts_on_eight()))
    config, rest = split_config(config_of(layout))
    assert config is not None
    assert (config.tensor_parallel.mesh.shape, config.stages) == (layout.mesh, layout.stages)
    assert rest["gradient_accumulation_steps"] == layout.micro_batches


def test_explained_layouts_are_read():
    cluster = Cluster.parse("8xH100")
    layout = parse_layout("2x1x2,stages=2,segments=4,rows=2,checkpointing=attention,gather=step,sync=step", cluster, 8)
    assert layout == Layout(
        MeshShape(2, 1, 2), 2, 2, 4, 1, 4, checkpointing="attention", weight_gather="step", gradient_sync="step"
    )  # fmt: skip
    layout = parse_layout("2x1x1,stages=4,rows=2,schedule=zero_bubble-v", cluster, 8)
    assert (layout.schedule, layout.chunks) == ("zero_bubble-v", 2)
    for text, message in (("2x1x2,what=3", "'what'"), ("2x1x2,rows=two", "'two'"), ("3x1x1", "don't divide"),
                          ("2x1x2,sync=step", "give it stages"), ("2x1x2,schedule=zero_bubble", "several stages"),
                          ("2x1x1,stages=4,schedule=zero_bubble-v,chunks=1", "several chunks"),
                          ("1x8x1,segments=4", "segments are a pipeline's units; give it stages"),
                          ("1x2x1,stages=4,schedule=1f1b,segments=4", '"1f1b" has whole sequences'),
                          ("1x2x1,stages=4,zero=2", "stage 2 would give away gradients"),
                          ("1x8x1,zero=3", "stage 3"), ("1x8x1,rows=0", "rows='0' is not a number of at least 1"),
                          ("1x2x1,stages=4,segments=0", "segments='0'"), ("1x8x1,stages=0", "stages='0'"),
                          ("1x8x1,rows=²", "rows='²' is not a number")):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            parse_layout(text, cluster, 8)


# --- the command line -------------------------------------------------------------------------------------------


@pytest.fixture
def model_path(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA_8B, "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 8192}))
    return path


def run(*arguments):
    result = CliRunner().invoke(commands, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.ci
def test_estimate_and_plan_from_the_command_line(tmp_path, model_path):
    config, out = tmp_path / "ds.json", tmp_path / "out.json"
    output = run("plan", "--model", model_path, "--cluster", "8xH100-80GB", "--seq-len", 4096, "--global-batch", 32,
                 "--out", config, "--json", out)  # fmt: skip
    assert "against the first" in output
    best = json.loads(out.read_text())["best"]
    assert "set your own learning rate, 0.0003 stands there" in " ".join(output.split())
    chosen = json.loads(config.read_text()).get("activation_checkpointing", {"mode": "none"})
    assert chosen == {"mode": best[0]["layout"]["checkpointing"]}
    assert not any(key.startswith("_") for key in json.loads(config.read_text()))
    assert all(row["fits"] for row in best)
    arguments = ["--model", model_path, "--cluster", "8xH100-80GB", "--seq-len", 4096]
    output = run("estimate", *arguments, "--config", config, "--json", out, "--picture", tmp_path / "a.png")
    assert "It fits" in output
    written = json.loads(out.read_text())
    assert written["step_s"] == pytest.approx(best[0]["step_s"])
    assert {"fits", "step_s", "memory_bytes", "tokens_per_s", "bubble"} <= written.keys()
    assert (tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.parametrize("width", [60, 80, 140])
def test_all_figures_of_a_plan_are_there_however_narrow_the_terminal(width):
    layout = Layout(MeshShape(2, 2, 1), 2, 2, 8, segments=4, schedule="zero_bubble-v", chunks=2)
    estimated = estimate(description_of(LLAMA_8B), layout, Cluster.parse("8xH100"), 8192)
    console = Console(width=width, file=StringIO())
    print_plan(SearchResult((estimated,), 1), console)
    row = next(line for line in console.file.getvalue().splitlines() if line.startswith("│ 1"))
    figures = [cell.strip() for cell in row.split("│")[3:7]]
    assert figures == [f"{estimated.time.total_s:.3f}", f"{estimated.tokens_per_s:,.0f}", f"{estimated.mfu:.1%}",
                       f"{estimated.memory_bytes / 2**30:.1f}"]  # fmt: skip


#: Qwen3-8B with positions for a million tokens.
QWEN3_8B = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
QWEN3_8B |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 2**20}


@pytest.mark.slow
def test_the_search_lets_memory_wait_on_the_host_where_nothing_else_fits():
    model = description_of(AutoConfig.for_model("qwen3", **QWEN3_8B))
    (best, *_) = search(model, Cluster.parse("8xH100-80GB"), 2**20, 1).best
    assert best.layout.moves


@pytest.mark.ci
def test_what_waits_on_the_host(tmp_path):
    """Qwen3-8B, one row of a million tokens on eight H100s, which TRL trains in 380 s and 56.2 GB."""
    model, cluster = description_of(AutoConfig.for_model("qwen3", **QWEN3_8B)), Cluster.parse("8xH100-80GB")
    layout = parse_layout("1x4x2,checkpointing=attention,kept=host", cluster, 1)
    assert layout == Layout(MeshShape(1, 4, 2), checkpointing="attention", on_host=True)
    tokens, section = 2**20, {"mode": "attention", "cpu_checkpointing": True}
    estimated = estimate(model, layout, cluster, tokens)
    assert estimated.fits
    assert estimated.memory_bytes <= 56.2e9
    assert estimated.time.total_s <= 300
    # Inputs and outputs of 36 layers in 16 bits, and their log-sum-exps in float32.
    assert estimated.host_bytes * 8 == 36 * tokens * (4096 * 2 * 2 + 32 * 4)
    assert config_of(layout)["activation_checkpointing"] == section
    # Computing hides the copies; over a link of a thousandth it doesn't, and little host memory isn't enough.
    alone = estimate(model, replace(layout, on_host=False), cluster, tokens)
    assert estimated.time == alone.time
    slow = replace(cluster, gpu=replace(cluster.gpu, host_bytes_per_s=64e6))
    moving_s = 2 * estimated.host_bytes / slow.gpu.host_rate
    assert estimate(model, layout, slow, tokens).time.total_s == pytest.approx(moving_s, rel=0.05)
    assert not estimate(model, layout, replace(cluster, gpu=replace(cluster.gpu, host_memory_bytes=64e9)), tokens).fits
    config, path = tmp_path / "ds.json", tmp_path / "config.json"
    config.write_text(json.dumps(config_of(layout)))
    path.write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **QWEN3_8B}))
    arguments = ["--model", path, "--config", config, "--cluster", "8xH100-80GB", "--seq-len", tokens]
    output = " ".join(run("estimate", *arguments).split())
    assert "at 45 GB/s each way, computing hides the copies" in output
    assert "It fits" in output
    config.write_text(json.dumps(config_of(replace(layout, on_host=False))))
    assert f'with "activation_checkpointing": {json.dumps(section)} it does' in " ".join(
        run("estimate", *arguments).split()
    )


def test_an_8b_model_trains_on_one_h200_and_on_one_h100_with_its_optimizer_on_the_host():
    cluster, model = Cluster.parse("1xH100"), description_of(LLAMA_8B)
    config = config_of(Layout(MeshShape(1, 1, 1), checkpointing="attention"))
    assert estimate(
        model, layout_of_config(*split_config(config), model, cluster, 8192), Cluster.parse("1xH200"), 8192
    ).fits
    base = estimate(model, layout_of_config(*split_config(config), model, cluster, 8192), cluster, 8192)
    assert not base.fits
    name, remedy = remedies(base)[0]
    assert name == '"zero_optimization": {"offload_optimizer": {"device": "cpu"}}'
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    assert layout_of_config(*split_config(config), model, cluster, 8192) == remedy.layout
    (memory,) = remedy.stages
    assert memory.optimizer == 0
    assert memory.on_host == pytest.approx(18 * model.parameters)
    assert remedy.memory_bytes < 50e9
    # At 30 GB/s of the host's memory.
    assert remedy.time.optimizer_s == pytest.approx(28 * model.parameters / 30e9, rel=0.1)


def test_estimate_says_what_would_make_it_fit(tmp_path, model_path):
    config, out = tmp_path / "ds.json", tmp_path / "out.json"
    config.write_text(json.dumps(config_of(Layout(MeshShape(2, 4, 1), micro_batch=8, micro_batches=4))))
    arguments = ["--model", model_path, "--config", config, "--cluster", "8xA100-40GB", "--seq-len", 8192]
    assert "does not fit" in (output := run("estimate", *arguments, "--json", out))
    for mode in ("attention", "layers"):
        assert f'with "activation_checkpointing": {{"mode": "{mode}"}} it does' in " ".join(output.split())
    assert json.loads(out.read_text())["fits"] is False


def test_remedies_are_layouts_that_a_config_accepts():
    model, cluster = description_of(LLAMA_8B), Cluster.parse("4xA100-80GB")
    estimated = estimate(model, Layout(MeshShape(), 4, 8, 4, schedule="1f1b"), cluster, 4096)
    assert not estimated.fits
    offered = remedies(estimated)
    assert offered
    for _, remedy in offered:
        check_framework_config(*require_config(config_of(remedy.layout)), 4, is_complete=True)
    with pytest.raises(ConfigError, match='"1f1b" has whole sequences, and the layout 4 segments'):
        estimate(model, replace(estimated.layout, segments=4), cluster, 4096)


def test_fp16_is_estimated_as_bf16():
    config = config_of(Layout(MeshShape(2, 4, 1), micro_batch=8))
    half = {**config, "bf16": {"enabled": False}, "fp16": {"enabled": True}}
    assert read_layout(half) == read_layout(config)


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("pipeline", {"schedule": "zero_bubble-v", "chunks": 17}, "17 chunks on each, but llama has 32 layers"),
        ("pipeline", {"partition": "measured"}, "times of real steps"),
        ("pipeline", {"segments": 2, "partition": [4096, 4]}, "adds up to 4100"),
        ("pipeline", {"stage_balance": [16, 17]}, "adds up to 33"),
        ("tensor_parallel", {"mesh": "auto", "size": 4}, "cuboid plan"),
        ("tensor_parallel", {"gather_logits": True}, "whole logits"),
        ("bf16", {"enabled": False}, "trains in float32.*bf16"),
        ("zero_optimization", {"offload_optimizer": {"device": "cpu"}}, "offload_optimizer has no estimate"),
    ],
)
def test_configs_without_an_estimate_are_rejected(section, change, message):
    config = config_of(Layout(MeshShape(1, 4, 1), 2, 1, 4, segments=2))
    config[section] = {**config[section], **change}
    with pytest.raises(ConfigError, match=message):
        estimate(description_of(LLAMA_8B), read_layout(config), Cluster.parse("8xH100"), 8192)


@pytest.mark.parametrize(
    "keys",
    [
        {"schedule": "zero_bubble"},
        {"schedule": "auto", "memory_limit": 1.5},
        {"schedule": "seq1f1b-interleaved", "chunks": 2},
        {"schedule": "zero_bubble-interleaved", "chunks": 2, "stage_balance": [9, 7, 9, 7]},
        {"schedule": "zero_bubble-v", "chunks": 2},
    ],
    ids=str,
)
def test_schedules_with_chunks_and_split_backwards_are_estimated(keys):
    model, cluster = description_of(LLAMA_8B), Cluster.parse("8xH100")
    config = config_of(Layout(MeshShape(1, 4, 1), 2, 1, 4, segments=4))
    plain = estimate(model, read_layout(config, 65536), cluster, 65536)
    config["pipeline"] |= keys
    layout = read_layout(config, 65536)
    assert config_of(layout)["pipeline"].items() >= {k: v for k, v in keys.items() if k != "stage_balance"}.items()
    estimated = estimate(model, layout, cluster, 65536)
    cost, times = estimated.cost, estimated.cost.stage_times()
    assert sum(cost.stage_layers) == 32
    assert len(cost.stage_layers) == 2 * keys.get("chunks", 1)
    # The whole step was simulated: no rank computes longer than it takes, and the messages of V's turn are on one rank.
    order = cost.order(4)
    done_s = {(action.stage, action.micro_batch, action.segment): end_s
              for _, action, _, end_s in order.times(*cost._durations(times))}  # fmt: skip
    assert max(done_s.values()) == pytest.approx(estimated.time.pipeline_s - times.once_s[times.busiest])
    assert sum(4 * times.busy(rank).total for rank in range(2)) < 2 * estimated.time.pipeline_s
    # Each rank has its parts' parameters; where both ends are on one, nothing is there twice.
    assert sum(memory.parameters for memory in estimated.stages) * 4 == pytest.approx(2 * model.parameters)
    if cost.splits:
        assert estimated.bytes_by_axis["sequence"] > plain.bytes_by_axis["sequence"]
        # Halves of a backward take longer than the whole on a mesh, for both gather.
        whole_s = sum(seconds.total for seconds in times.units[Op.BACKWARD][0])
        halves = sum(seconds.total for op in (Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT) for seconds in times.units[op][0])
        assert whole_s < halves < 1.5 * whole_s


@pytest.mark.sample(0, ci=1)
@pytest.mark.parametrize(
    "keys", [{"schedule": "zero_bubble"}, {"schedule": "zero_bubble-interleaved", "chunks": 2}], ids=str
)
def test_a_head_on_all_stages_is_estimated(keys):
    model, cluster = description_of(LLAMA_8B), Cluster.parse("8xH100")
    config = config_of(Layout(MeshShape(), 8, 1, 8, segments=16))
    config["pipeline"] |= {**keys, "memory_limit": 3}
    last = estimate(model, read_layout(config, 32768), cluster, 32768)
    config["pipeline"]["head"] = "spread"
    layout = read_layout(config, 32768)
    assert config_of(layout)["pipeline"]["head"] == "spread"
    spread = estimate(model, layout, cluster, 32768)
    # All ranks compute together what they did, but none much longer than the others.
    total_s = sum(last.cost.stage_times().busy(rank).total for rank in range(8))
    for cost, least, most in ((last.cost, 1.15, 1.25), (spread.cost, 1.0, 1.08)):
        times = cost.stage_times()
        busy = [times.busy(rank).total for rank in range(8)]
        assert sum(busy) == pytest.approx(total_s)
        assert least < max(busy) / (total_s / 8) < most
    assert last.time.total_s > 1.1 * spread.time.total_s
    # The parameters stay where they were; every rank has its rows besides, and their gradients.
    assert [rank.parameters for rank in spread.stages][-1] > [rank.parameters for rank in spread.stages][1]
    rows_bytes = model.outputs * model.hidden / 8 * 2
    assert all(rank.logits > 3 * rows_bytes for rank in spread.stages)
    assert all(rank.logits == 0 for rank in last.stages[:-1])


@pytest.mark.parametrize("gather", ["layer", "step"])
@pytest.mark.parametrize("mesh", [MeshShape(1, 4, 1), MeshShape(2, 1, 2), MeshShape(1, 2, 2)], ids=str)
def test_a_head_on_all_stages_is_estimated_on_a_mesh(mesh, gather):
    model, cluster = description_of(LLAMA_8B), Cluster.parse("8xH100")
    config = config_of(Layout(mesh, 2, mesh.batch, 4, segments=2, weight_gather=gather))
    config["pipeline"] |= {"schedule": "zero_bubble", "memory_limit": 3}
    last = estimate(model, read_layout(config), cluster, 8192)
    config["pipeline"]["head"] = "spread"
    spread = estimate(model, read_layout(config), cluster, 8192)
    assert spread.layout.mesh == mesh
    assert spread.layout.head_ranks == 2
    whole_head, share = last.cost.units.head_forward(0, 4096), spread.cost.units.head_forward(0, 4096, 2)
    assert share.compute == pytest.approx(whole_head.compute / 2)
    # Every rank exchanges all hidden states over `sequence`, but over `hidden` the logits of its own part only.
    assert whole_head.exposed / 2 < share.exposed <= whole_head.exposed or mesh.batch > 1
    assert (share.exposed < whole_head.exposed) == (mesh.hidden > 1)
    # A share's rows are gathered for the step, which the last stage waits for, whatever units do with other weights.
    waits = spread.cost.stage_times().once_s, last.cost.stage_times().once_s
    assert waits[0][1] >= waits[1][1]
    assert (waits[0] == waits[1]) == (mesh.batch == 1)
    rows_bytes = model.outputs * model.hidden / mesh.of("sequence", "hidden") / 2 * 2
    assert all(rank.logits > 3 * rows_bytes for rank in spread.stages)


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("balance", ["halves", [6.5, 6.5, 6.5, 6.5, 6]])
def test_stages_that_begin_inside_a_layer_are_estimated(balance):
    model, cluster = description_of(LLAMA_8B), Cluster.parse("5xH100")
    config = config_of(Layout(MeshShape(), 5, 1, 8, segments=8))
    config["sequence_length"] = 32768
    config["pipeline"] |= {"schedule": "zero_bubble", "head": "spread"}
    settings, rest = split_config(config)
    uncut = estimate(model, layout_of_config(settings, rest, model, cluster, 32768), cluster, 32768)
    config["pipeline"]["stage_balance"] = balance
    settings, rest = split_config(config)
    cut = estimate(model, layout_of_config(settings, rest, model, cluster, 32768), cluster, 32768)
    assert sum(cut.cost.stage_layers) == 32
    assert sorted(cut.cost.stage_layers) == [6, 6.5, 6.5, 6.5, 6.5]
    # The same work and the same parameters, in stages that are more even.
    busy = [[one.cost.stage_times().busy(rank).total for rank in range(5)] for one in (uncut, cut)]
    assert sum(busy[1]) == pytest.approx(sum(busy[0]), rel=1e-3)
    assert max(busy[0]) > 1.04 * max(busy[1])
    parameters = [sum(map(sum, one.cost.own_parameters)) for one in (uncut, cut)]
    assert parameters[0] == parameters[1]
    # What the halves of a layer keep isn't known: both stages are taken to keep the layer's.
    layers = [sum(stage.activations for stage in one.stages) for one in (uncut, cut)]
    assert layers[0] < layers[1] < 1.2 * layers[0]


@pytest.mark.ci
def test_the_fastest_pipeline_gets_stages_for_its_step():
    """Which the recipe names, so that training needs no search."""
    model, cluster = description_of(LLAMA_8B), Cluster.parse("5xH100")
    layout = Layout(MeshShape(), 5, segments=8, schedule="zero_bubble", spreads_head=True, checkpointing="attention")
    plain = estimate(model, layout, cluster, 32768)
    moved = _with_other_stages(plain, lambda one: StepCost(model, one, cluster, 32768, cuboid_software(one)))
    best = min(moved, key=lambda one: one.time.total_s)
    assert best.time.total_s < 0.98 * plain.time.total_s
    assert sum(best.layout.stage_layers) == 32
    config, rest = require_config({**config_of(best.layout), "sequence_length": 32768})
    assert layout_of_config(config, rest, model, cluster, 32768).stage_layers == best.layout.stage_layers
    assert not _with_other_stages(estimate(model, Layout(MeshShape()), Cluster.parse("1xH100"), 4096), pytest.fail)


@pytest.mark.parametrize(
    ("schedule", "micro_batches"),
    [("seq1f1b-interleaved", 160), pytest.param("zero_bubble-v", 600, marks=pytest.mark.slow)],
)
def test_long_steps_are_continued_from_their_first_micro_batches(schedule, micro_batches):
    layout = Layout(MeshShape(), 8, 1, micro_batches, segments=4, chunks=2, schedule=schedule)
    cost = StepCost(description_of(LLAMA_8B), layout, Cluster.parse("8xH100"), 32768)
    times = cost.stage_times()
    assert cost.enough < micro_batches
    assert cost.pipeline_s(times) == pytest.approx(cost.simulated_s(times, micro_batches), rel=0.05)


@pytest.mark.slow
def test_the_search_tries_schedules_with_less_of_a_bubble():
    result = search(description_of({**LLAMA_8B, "num_hidden_layers": 8}), Cluster.parse("4x8xA100-40GB"), 2**16, 1)
    best = result.best[0]
    assert best.layout.schedule != "seq1f1b"
    plain = replace(best.layout, schedule="seq1f1b", chunks=1)
    assert best.time.total_s < estimate(best.cost.model, plain, best.cost.cluster, 2**16).time.total_s


def test_what_is_not_counted_is_said():
    assert "soft cap" in description_of(small("gemma2")).uncounted
    assert not description_of(small("llama")).uncounted


def read_layout(config, length=8192):
    settings, rest = split_config(config)
    return layout_of_config(settings, rest, description_of(LLAMA_8B), Cluster.parse("8xH100"), length)


def test_what_a_config_says_of_segments_is_counted():
    config = config_of(Layout(MeshShape(), 8, 1, 4, segments=4))
    by_cost = estimate(description_of(LLAMA_8B), read_layout(config), Cluster.parse("8xH100"), 8192)
    config["pipeline"] |= {"partition": "even", "kv_gradients": "parameter"}
    even = estimate(description_of(LLAMA_8B), read_layout(config), Cluster.parse("8xH100"), 8192)
    assert even.cost.lengths == (2048,) * 4
    assert by_cost.cost.lengths[0] > 2048
    assert even.stages[0].key_value_store < by_cost.stages[0].key_value_store


# --- measured tables --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "median", "worst"),
    [("simumax", 0.05, 0.12), ("kwai", 0.05, 0.12), ("vtrain_multi", 0.08, 1), ("vtrain_single", 0.08, 1),
     ("korthikanti", 0.08, 1)],
)  # fmt: skip
def test_times_are_as_near_to_measured_ones_as_promised(name, median, worst):
    errors = [abs(error) for error in planner.errors(name)]
    assert statistics.median(errors) <= median
    assert max(errors) <= worst


@pytest.mark.parametrize(("name", "most"), [("simumax", 0.02), ("kwai_memory", 0.08)])
def test_memory_is_as_near_to_measured_as_promised(name, most):
    measured = [row for row in planner.rows(name) if row.measured_bytes is not None]
    for row in measured:
        assert fullest(row.cost()).total == pytest.approx(row.measured_bytes, rel=most), row.name


def test_what_ran_out_of_memory_does_not_fit_and_what_ran_does():
    for name in ("simumax", "kwai_memory", "seq1f1b"):
        for row in planner.rows(name):
            if row.out_of_memory or row.measured_bytes is not None:
                fits = fullest(row.cost()).total <= USABLE * row.cluster.gpu.memory_bytes
                assert fits is not row.out_of_memory, row.name


def test_series_are_continued_from_two_of_their_rows():
    errors = [float(line.split("|")[-2].strip(" %").replace("−", "-")) for line in planner.scaling().splitlines()[2:]]
    assert max(map(abs, errors)) <= 1.5


# --- recipes ----------------------------------------------------------------------------------------------------

RECIPES = sorted(choosing.RECIPES.glob("*.json"))


def test_every_recipe_answers_a_question():
    assert {case.path for case in choosing.cases() if case.path.is_file()} == set(RECIPES)
    assert len(RECIPES) > 20


# The first one, of a small dense model, takes seconds; those of experts take longer.
@pytest.mark.sample(1)
@pytest.mark.parametrize("path", RECIPES[::-1], ids=lambda path: path.stem)
def test_recipes_are_accepted_and_fit(path):
    config, rest = require_config(path)
    gpus = Cluster.parse(config.cluster).gpus
    check_framework_config(config, rest, gpus, is_complete=True)
    (case,) = (case for case in choosing.cases() if case.path == path)
    planned = case.read()
    assert planned.fits
    assert planned.counted_bytes <= planned.limit_bytes
    assert planned.layout.rows == case.rows
    assert (planned.cost.length, config.ranks * planned.layout.replicas) == (choosing.LENGTHS[case.length], gpus)


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES[::7], ids=lambda path: path.stem)
def test_recipes_are_what_the_search_finds(path):
    (case,) = (case for case in choosing.cases() if case.path == path)
    assert case.search() == json.loads(path.read_text(encoding="utf-8"))
