"""What the planner says that a rank keeps, against counters in real pipelines."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import accumulate, combinations
from types import FunctionType

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama

import cuboid
from conftest import TIMEOUT_S
from cuboid.distributed.topology import MeshShape
from cuboid.models.pipeline.training_pipeline import Pipeline
from cuboid.models.stages import stage_runner
from cuboid.planner.cost.layout import CUBOID, Layout
from cuboid.planner.cost.memory import _Stage, fullest
from cuboid.planner.cost.step import StepCost
from cuboid.planner.description import kept as kept_module
from cuboid.planner.description.cluster import Cluster
from cuboid.planner.description.fake_mode import LightFakeMode
from cuboid.planner.description.kept import (
    ALWAYS,
    COLUMNS,
    SEGMENTS,
    SHORT_WINDOW,
    WHOLE,
    CountedAs,
    KeptBytes,
    LayerSample,
    SampleKey,
    _count,
    _fit,
    _most_others,
    _Saved,
    count_kept,
    unit_sizes,
)
from cuboid.planner.description.modules import describe_modules
from cuboid.planner.estimate import Estimate, cuboid_software, estimate
from cuboid.seq1f1b.attention import chunked_attention
from cuboid.seq1f1b.runtime.memory import LiveActivations, MeteredPool
from cuboid.seq1f1b.schedule.choice import CHUNKED
from cuboid.verify import SmallModel
from planning import LLAMA_8B, description_of, small

ROWS, LENGTH, MICRO_BATCHES = 4, 96, 4


def model(architecture):
    """Of few heads of keys and values, where it may have."""
    return SmallModel(architecture, heads=12, kv_heads=4, head_dim=16, layers=8)


ARCHITECTURES = [
    *("llama", "mistral", "qwen2", "qwen3", "gpt2", "mixtral", "qwen3_moe", "gpt_neox", "gemma2", "gemma3"),
]
SCHEDULES = [
    "seq1f1b",
    "1f1b",
    "gpipe",
    "seq1f1b-interleaved",
    "zero_bubble",
    "zero_bubble-interleaved",
    "zero_bubble-v",
]


def config_of(path):
    """Without dropout of scores, for which CPUs have no fused kernel. GPT-2 drops out elsewhere, and keeps masks."""
    config = AutoConfig.from_pretrained(path)
    if hasattr(config, "attn_pdrop"):
        config.attn_pdrop = 0.0
    return config


@contextmanager
def counting(model, pool):
    """Live activations, with what is behind autograd: what waits for weight gradients, and gradients of units' results
    that the loss has made."""
    store, loss = model.staging.weight_gradients, stage_runner.chunked_loss
    add = store.add
    with LiveActivations([*model.parameters(), *model.buffers()], pool) as live:

        def add_and_count(product):
            dy = product.dy if isinstance(product.dy, list) else [product.dy]
            object.__setattr__(product, "counted", [live._pack(x) for x in (product.x, *dy)])
            add(product)

        def loss_and_count(*arguments, **options):
            value, gradient = loss(*arguments, **options)
            gradient.counted = live._pack(gradient)
            return value, gradient

        def keep_and_count(kernel, out, lse):
            made = kept_output(kernel, out, lse)
            object.__setattr__(made, "counted", [live._pack(out.read()), live._pack(lse.read())])
            return made

        kept_output = chunked_attention.KeptOutput
        store.add, stage_runner.chunked_loss = add_and_count, loss_and_count
        chunked_attention.KeptOutput = keep_and_count
        try:
            yield live
        finally:
            del store.add
            stage_runner.chunked_loss = loss
            chunked_attention.KeptOutput = kept_output


def counted(path, config, rows):
    """Of a step: the most bytes that are kept, and those of the parameters."""
    model = cuboid.from_pretrained(path, config, config=config_of(path), dtype=torch.bfloat16).train()
    runs = Pipeline(model)
    runs.pool = MeteredPool()
    ids = torch.randint(2, 100, (MICRO_BATCHES, rows, LENGTH))
    with counting(model, runs.pool) as live:
        runs.train(iter({"input_ids": batch, "labels": batch} for batch in ids), MICRO_BATCHES)
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    return live.peak_bytes, parameter_bytes, model.cuboid.mesh.comm_counter.snapshot()


def measure(pool, path, schedule, mesh="1x1x1", checkpointing="none", stages=2, rows=ROWS):
    """What is counted on each rank, and what is predicted."""
    shape, chunks = MeshShape.parse(mesh), 2 if schedule in CHUNKED else 1
    segments = 1 if schedule == "1f1b" else 3
    pipeline = {"engine": "seq1f1b", "stages": stages, "segments": segments, "schedule": schedule, "chunks": chunks}
    axes = {"batch": shape.batch, "sequence": shape.sequence, "hidden": shape.hidden}
    config = {"pipeline": pipeline, "train_micro_batch_size_per_gpu": rows}
    config["activation_checkpointing"] = {"mode": checkpointing}
    if shape.size > 1:
        config["tensor_parallel"] = {"mode": "3d_tensor", "mesh": axes}
    counts = pool.run(stages * shape.size, counted, path, config, rows, timeout_s=TIMEOUT_S)
    with torch.device("meta"):
        described = describe_modules(AutoModelForCausalLM.from_config(config_of(path)))
    layout = Layout(
        shape, stages, rows, MICRO_BATCHES, 1, segments, chunks, schedule, checkpointing=checkpointing
    )  # fmt: skip
    return counts, StepCost(described, layout, Cluster.parse(f"{layout.ranks}xH100"), LENGTH, cuboid_software(layout))


def check(measured, most=0.02):
    counts, cost = measured
    for rank, (activations, parameters, _) in enumerate(counts):
        stage = _Stage(cost, rank // cost.layout.mesh.size)
        assert sum(stage._activations()) == pytest.approx(activations, rel=most)
        # Vectors that a mesh doesn't divide are padded.
        assert stage.memory().parameters == pytest.approx(parameters, rel=0.001)


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_a_rank_keeps_is_what_counters_see(pool, checkpoint, architecture, schedule):
    check(measure(pool, checkpoint(model(architecture)), schedule))


@pytest.mark.sample(0, ci=1)
@pytest.mark.parametrize("rows", [ROWS, 1])
@pytest.mark.parametrize("architecture", ["falcon", "bloom"])
def test_layers_that_attend_by_themselves_keep_what_counters_see(pool, tmp_path, architecture, rows):
    config = small(architecture, hidden_size=96, num_attention_heads=12, n_head=12, num_hidden_layers=8, n_layer=8)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    measured = measure(pool, tmp_path, "seq1f1b", rows=rows)
    assert not _Stage(measured[1], 0).count.obstacle
    check(measured)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["seq1f1b", "zero_bubble", "zero_bubble-v"])
@pytest.mark.parametrize("mesh", ["1x2x1", "2x1x1", "1x1x2", "2x2x1"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3", "gemma2", "mixtral", "qwen3_moe"])
def test_what_a_rank_of_a_mesh_keeps_is_what_counters_see(pool, checkpoint, architecture, mesh, schedule):
    check(measure(pool, checkpoint(model(architecture)), schedule, mesh))


LATENT = {
    "deepseek_v3": {"first_k_dense_replace": 8},
    "deepseek_v2": {"first_k_dense_replace": 8, "q_lora_rank": None},
    # As many experts as the ranks of a mesh divide, for their routers' rows are padded.
    "mixture": {"first_k_dense_replace": 2, "n_routed_experts": 8, "num_local_experts": 8},
}


def latent_model(folder, kind):
    """With latents as large as they are beside real models' hidden states."""
    sizes = {"hidden_size": 192, "intermediate_size": 384, "kv_lora_rank": 48, "num_hidden_layers": 8, "head_dim": 8}
    sizes |= {"q_lora_rank": 96, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    config = small("deepseek_v3" if kind == "mixture" else kind, **{**sizes, "num_key_value_heads": 12, **LATENT[kind]})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["seq1f1b", "zero_bubble"])
@pytest.mark.parametrize("mesh", ["1x2x1", "2x1x1", "1x1x2", "2x2x1"])
@pytest.mark.parametrize("kind", LATENT)
def test_what_latent_attention_keeps_on_a_mesh_is_what_counters_see(pool, tmp_path, kind, mesh, schedule):
    measured = measure(pool, latent_model(tmp_path, kind), schedule, mesh)
    assert not _Stage(measured[1], 0).count.obstacle
    check(measured)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["layers", "attention"])
@pytest.mark.parametrize("mesh", ["1x1x1", "1x2x1"])
@pytest.mark.parametrize("schedule", ["seq1f1b", "zero_bubble"])
def test_what_is_kept_under_activation_checkpointing_is_what_counters_see(
    pool, checkpoint, schedule, mesh, checkpointing
):
    check(measure(pool, checkpoint(model("llama")), schedule, mesh, checkpointing))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["1x2x1", "1x1x2"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_what_a_split_backward_sends_is_what_counters_see(pool, checkpoint, architecture, mesh):
    (plain, before), (split, after) = (
        measure(pool, checkpoint(model(architecture)), schedule, mesh) for schedule in ("seq1f1b", "zero_bubble")
    )
    assert after.splits
    split_bytes, plain_bytes = (Estimate.of(cost).bytes_by_axis for cost in (after, before))
    expected = {axes: count - plain_bytes[axes] for axes, count in split_bytes.items()}
    for (_, _, of_split), (_, _, of_plain) in zip(split, plain, strict=True):
        more = {axes: of_split[axes] - of_plain[axes] for axes in expected}
        assert more == {axes: pytest.approx(count, abs=200) for axes, count in expected.items()}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["1x2x1", "1x1x2", "2x1x1"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
def test_what_recomputation_sends_again_is_what_counters_see(pool, checkpoint, architecture, mesh):
    (plain, before), (again, after) = (
        measure(pool, checkpoint(model(architecture)), "seq1f1b", mesh, mode) for mode in ("none", "layers")
    )
    again_bytes, plain_bytes = (Estimate.of(cost).bytes_by_axis for cost in (after, before))
    expected = {axes: count - plain_bytes[axes] for axes, count in again_bytes.items()}
    assert any(expected.values())
    for (_, _, of_again), (_, _, of_plain) in zip(again, plain, strict=True):
        more = {axes: of_again[axes] - of_plain[axes] for axes in expected}
        assert more == {axes: pytest.approx(count, rel=0.02) for axes, count in expected.items()}


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *(("mixtral", None), ("mixtral", "1x2x2"), ("gemma2", None)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("gemma2", "1x2x2"), ("deepseek_v3", None), ("deepseek_v3", "1x2x2"))
        ),
    ],
)
def test_counts_hold_for_units_of_other_sizes(name, mesh):
    described, window = description_of(small(name)), 96
    windows = [kind.attention.window is not None for kind in described.kinds]
    rank = CountedAs(mesh and MeshShape.parse(mesh), segmented=True)
    key = SampleKey(described.config, described.kind_of_layers, described.verdict)
    sample = LayerSample(key, described.kinds, window, rank)
    unit = sample.run(3, [192, 320])[-1]
    assert (unit.rows, unit.length, unit.start) == (3, 320, 192)
    count = count_kept(described, rank)
    last = len(sample.kinds) - 1
    layer, keys = count.layers[sample.kinds[last]], 192 + 320
    if windows[sample.kinds[last]]:
        layer, keys = count.windowed[sample.kinds[last]], window - 1 + 320
    assert layer.kept.of(3, 320, keys) == pytest.approx(unit.kept[last], rel=1e-6)


def points(segmented, window):
    """Rows, tokens and keys of the units that are run, in blocks; ``window`` is None or one that all end beyond."""
    for rows, lengths in SEGMENTS if segmented else WHOLE:
        for length, stop in zip(lengths, accumulate(lengths), strict=True):
            assert window is None or stop > window
            yield rows, length, length + (stop - length if window is None else min(stop - length, window))


@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize("window", [None, SHORT_WINDOW])
def test_units_tell_all_coefficients_that_are_looked_for_apart(segmented, window):
    others = [name for name in COLUMNS if name not in ALWAYS and (segmented or name != "key")]
    units = list(points(segmented, window))
    for number in range(len(ALWAYS) + 1, len(units) + 1):
        most = min(len(others), _most_others(number))
        # One candidate more, which the others may not stand for.
        for some in combinations(others, min(len(others), most + (most < 2))):
            columns = [name for name in COLUMNS if name in ALWAYS or name in some]
            table = np.array(
                [[getattr(unit_sizes(*unit), name) for name in columns] for unit in units[:number]], dtype=float
            )
            assert np.linalg.matrix_rank(table / table.max(axis=0), tol=1e-3) == len(columns), columns
    assert _most_others(len(units)) >= 4


def test_the_fewest_coefficients_that_reproduce_counts_are_found():
    units = [(rows, 64 * length, 64 * keys) for rows, length, keys in points(True, None)]
    columns = [name for name in COLUMNS if name != "row"]
    for truth, needed in (
        (KeptBytes(), 0),
        (KeptBytes(token=1e6, fixed=48), 3),
        (KeptBytes(token=1e6, position=16), 4),
        (KeptBytes(token=1e6, key=64, score=24), 6),
    ):
        sizes = [round(truth.of(rows, length, keys)) for rows, length, keys in units]
        fits = [_fit(units[:number], sizes[:number], columns) for number in range(1, len(units) + 1)]
        assert [fit == truth for fit in fits] == [number >= needed for number in range(1, len(units) + 1)]
    # What falls with sizes, or doesn't grow with any of them, is no count.
    assert _fit(units, [10**9 - rows * length for rows, length, _ in units], columns) is None
    assert _fit(units, [rows * length**3 for rows, length, _ in units], columns) is None


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(("name", "segmented"), [("gemma2", False), ("falcon", True)])
def test_one_row_is_counted_as_one_where_attention_is_no_kernel(name, segmented):
    described, lengths, kept = description_of(small(name, num_key_value_heads=1)), [192, 320], {}
    for alone in (False, True):
        rank = CountedAs(MeshShape(), segmented=segmented, alone=alone)
        key = SampleKey(described.config, described.kind_of_layers, described.verdict)
        unit = LayerSample(key, described.kinds, 1 << 20, rank).run(1, lengths if segmented else lengths[1:])[-1]
        fitted = count_kept(described, rank).layers[-1].kept.of(1, 320, 320 + unit.start)
        kept[alone] = fitted, unit.kept[len(key.kinds) - 1]
    assert kept[True][0] == pytest.approx(kept[True][1], rel=1e-6)
    assert kept[True][0] < kept[False][0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_the_first_count_of_a_process_is_as_any_other(name):
    described, counts = description_of(small(name)), []
    for forget in (True, False):
        if forget:
            # What torch remembers of operators without values, as a new process has none of it.
            FakeTensorMode.cache_clear()
        _count.cache_clear()
        count_kept.cache_clear()
        counts.append(count_kept(described, CountedAs(MeshShape(), segmented=True)))
    assert not counts[0].obstacle
    assert counts[0] == counts[1]


@pytest.mark.sample(0, ci=1)
@pytest.mark.parametrize("segmented", [False, True])
def test_the_count_is_the_same_while_a_model_is_being_loaded(segmented):
    described, counts = description_of(small("llama")), []
    # As transformers loads, "mesh": "auto" being decided in the middle of it.
    for surroundings in (nullcontext(), torch.device("meta"), torch.no_grad()):
        _count.cache_clear()
        count_kept.cache_clear()
        with surroundings:
            counts.append(count_kept(described, CountedAs(MeshShape(), segmented=segmented)))
    assert counts[0].layers
    assert counts[0] == counts[1] == counts[2]


@pytest.mark.sample(1, ci=1)
@pytest.mark.parametrize(
    "rank",
    [
        *(CountedAs(None, segmented=True, splits=True), CountedAs(MeshShape(1, 2, 2), segmented=True, splits=True)),
        *(CountedAs(MeshShape(2, 2, 1), alone=True), CountedAs(MeshShape())),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", [*ARCHITECTURES, "phi3", "bloom", "mamba2", "qwen3_next", "deepseek_v3"])
def test_shortcuts_of_operators_without_values_leave_the_count_as_it_is(monkeypatch, name, rank):
    described, counts = description_of(small(name)), []
    for mode in (LightFakeMode, FakeTensorMode):
        monkeypatch.setattr(kept_module, "LightFakeMode", mode)
        _count.cache_clear()
        count_kept.cache_clear()
        counts.append(count_kept(described, rank))
    assert counts[0] == counts[1]
    _count.cache_clear()
    count_kept.cache_clear()


def test_numbers_are_read_where_tensors_have_them():
    with LightFakeMode() as mode:
        # As models read a number that they have put into a tensor.
        assert torch.tensor(3).add_(1).item() == 4
        weight = torch.empty(6, 4)
        out = weight.new_empty(6, 6)
        assert torch.mm(weight, weight.t(), out=out) is out
        assert out.addmm_(weight, weight.t()) is out
        assert [part.untyped_storage()._cdata for part in out.unbind()] == [out.untyped_storage()._cdata] * 6
        assert all(part.fake_mode is mode and part.device.type == "cpu" for part in out.unbind())


def test_what_cannot_be_counted_is_said_and_taken_from_formulas():
    layout, cluster = Layout(MeshShape()), Cluster.parse("1xH200")
    described = description_of(LLAMA_8B)
    described = replace(described, config=AutoConfig.for_model("clip"))
    by_formulas = estimate(described, layout, cluster, 4096)
    assert "ValueError" in by_formulas.uncounted
    formulas = replace(CUBOID, counted=False)
    assert by_formulas.memory_bytes == fullest(StepCost(described, layout, cluster, 4096, formulas)).total
    assert not estimate(description_of(LLAMA_8B), layout, cluster, 4096).uncounted


@pytest.mark.parametrize("name", ["bytes_by_place", "bytes_of", "_pack"])
def test_a_fault_of_the_counting_code_is_not_taken_for_an_obstacle(monkeypatch, name):
    monkeypatch.delattr(_Saved, name)
    _count.cache_clear()
    count_kept.cache_clear()
    with pytest.raises(AttributeError, match=name):
        count_kept(description_of(small("llama")), CountedAs(None, segmented=True, splits=True))


def fail(*_, **__):
    raise TypeError("of the model")


def give_another_shape(_, x):
    return x.view(7, -1, 7)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [(fail, "TypeError: of the model"), (give_another_shape, "RuntimeError: shape '[7, -1, 7]' is")],
)
def test_what_a_models_own_code_raises_is_an_obstacle_by_name(monkeypatch, fault, reason):
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", FunctionType(fault.__code__, vars(modeling_llama)))
    _count.cache_clear()
    count_kept.cache_clear()
    count = count_kept(description_of(small("llama")), CountedAs(None, segmented=True, splits=True))
    assert count.obstacle.startswith(reason)
    count_kept.cache_clear()


def key_of(**sizes):
    described = description_of(small("llama", **sizes))
    return SampleKey(described.config, described.kind_of_layers, described.verdict)


def test_models_that_differ_in_the_number_of_layers_alone_share_a_count():
    assert key_of(num_hidden_layers=4) == key_of(num_hidden_layers=9)
    assert hash(key_of(num_hidden_layers=4)) == hash(key_of(num_hidden_layers=9))
    assert key_of(num_hidden_layers=9).config.num_hidden_layers == 2
    assert key_of() != key_of(intermediate_size=104)
    # With one layer there is no second one, which shares masks and positions with the first.
    assert key_of(num_hidden_layers=1) != key_of(num_hidden_layers=2)
