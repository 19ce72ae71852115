"""Several stages on each rank of a pipeline compute what one process computes, and what the plain schedules do."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cuboid
from conftest import TIMEOUT_S
from cuboid import ConfigError, Mesh, MeshShape
from cuboid.config.compatibility import check_layout
from cuboid.config.config_file import load_config
from cuboid.config.schema import parse_config
from cuboid.seq1f1b.schedule.lowering import lower
from cuboid.seq1f1b.schedule.schedules import PipelineShape, forwards_only, interleaved_placement, v_placement
from cuboid.seq1f1b.schedule.simulator import simulate
from cuboid.verify import Architecture, PassReport, SmallModel, WorkerPool
from launching import ROOT
from test_pipeline_parity import ALONE, Compare, compare, name_of
from test_split_backward import trained_gradients
from traces import read_chrome_trace
from training import make_engine
from training import settings as training_settings

SCHEDULES = ("seq1f1b-interleaved", "zero_bubble-interleaved", "zero_bubble-v")
LLAMA = SmallModel("llama", layers=4)
TIED = SmallModel("llama", layers=4, tied=True)


@pytest.fixture
def parity(pool: WorkerPool, checkpoint: Callable[[SmallModel], str]) -> Compare:
    """Verifies a small model on two ranks of two chunks and asserts that it passed."""

    def run(
        schedule: str, small: SmallModel = LLAMA, changes: dict[str, Any] | None = None, **options: Any
    ) -> PassReport:
        keys = {"stages": 2, "chunks": 2, "schedule": schedule, "stage_balance": "layers", **(changes or {})}
        return compare(pool, checkpoint, keys, small, **options)

    return run


# Whole pipelines beside one process


@pytest.mark.sample(1, ci=2)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("micro_batches", [2, 3, 4])
@pytest.mark.parametrize("segments", [1, 2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_loss_gradients_norms_and_weights_are_those_of_one_process(
    parity: Compare, schedule: str, segments: int, micro_batches: int, tied: bool
) -> None:
    small = TIED if tied else LLAMA
    report = parity(schedule, small, {"segments": segments}, accumulate=micro_batches)
    assert report.tolerance == 1e-9
    names = {check.name for check in report.checks if check.kind == "activation"}
    assert {f"model.layers.{layer}" for layer in range(4)} <= names
    assert {check.kind for check in report.checks} - {"sum"} == {"activation", "loss", "gradient", "norm", "weight"}


@pytest.mark.parametrize("chunks", [2, pytest.param("auto", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"mesh": "2x1x1", "checkpointing": True}, marks=pytest.mark.slow)]
)
def test_the_stages_may_be_where_the_shortest_step_has_them(
    parity: Compare, chunks: int | str, options: dict[str, Any]
) -> None:
    keys = {"schedule": "auto", "chunks": chunks, "segments": 2, "memory_limit": 1.5}
    report = parity("auto", LLAMA, keys, accumulate=3, **options)
    assert report.pipeline is not None
    # Known before anything runs, and written into the config that both passes run with.
    assert report.pipeline.is_placed
    assert (report.pipeline.schedule, report.pipeline.chunks) == ("auto-interleaved", 2)


ONCE = {"weight_gather": "step", "gradient_sync": "step"}


@pytest.mark.sample(0, ci=1)
@pytest.mark.parametrize(
    ("schedule", "mesh", "small", "options"),
    [
        ("seq1f1b-interleaved", "1x1x2", LLAMA, {}),
        ("zero_bubble-v", "1x1x2", TIED, {}),
        ("zero_bubble-interleaved", "1x1x2", SmallModel("gpt2", layers=4), {}),
        ("seq1f1b-interleaved", "2x1x1", TIED, ONCE),
        ("zero_bubble-v", "2x2x1", SmallModel("qwen3", layers=5), ONCE),
        ("zero_bubble-v", "2x1x1", LLAMA, {"weight_gather": "step"}),
        ("zero_bubble-interleaved", "2x1x1", LLAMA, {"gradient_sync": "step"}),
        ("zero_bubble-v", "2x1x1", TIED, ONCE),
    ],
    ids=name_of,
)
def test_each_rank_may_be_a_mesh(
    parity: Compare, schedule: str, mesh: str, small: SmallModel, options: dict[str, Any]
) -> None:
    parity(schedule, small, {"segments": 2}, mesh=mesh, accumulate=3, **options)


@pytest.mark.sample(0, ci=1)
@pytest.mark.parametrize("mesh", [ALONE, "1x1x2"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_engine_with_zero_and_clipping(parity: Compare, schedule: str, zero: int, tied: bool, mesh: str) -> None:
    settings = {"zero_optimization": {"stage": zero}, "gradient_clipping": 0.25}
    report = parity(schedule, TIED if tied else LLAMA, mesh=mesh, name="engine", settings=settings, data_parallel=2)
    assert min(report.norms[0]) > 0.25


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gpt2", "gemma3", "gpt_neox", "mixtral"])
@pytest.mark.parametrize("schedule", ["seq1f1b-interleaved", "zero_bubble-v"])
def test_other_architectures(parity: Compare, schedule: str, architecture: Architecture) -> None:
    for tied in (True, False):
        parity(schedule, SmallModel(architecture, layers=6, tied=tied), checkpointing=tied, shard_in_memory=not tied)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "changes"),
    [
        ("seq1f1b-interleaved", {"stages": 3, "segments": 2, "stage_balance": [1, 2, 1, 1, 1, 1]}),
        ("zero_bubble-v", {"stages": 1, "chunks": 3}),
        ("zero_bubble-v", {"stages": 2, "chunks": 3, "memory_limit": 1}),
        ("zero_bubble-interleaved", {"stages": 2, "chunks": 3, "memory_limit": 1.5}),
        ("zero_bubble-v", {"stages": 3, "segments": 5, "stage_balance": "flops"}),
        ("zero_bubble-v", {"segments": "auto", "partition": "measured"}),
    ],
    ids=str,
)
def test_other_shapes(parity: Compare, schedule: str, changes: dict[str, Any]) -> None:
    small = SmallModel("qwen2", layers=7, tied=True)
    parity(schedule, small, changes, accumulate=3, steps=4, varying=True, data_parallel=2, sequence_length=29)


@pytest.mark.slow
def test_activation_checkpointing(parity: Compare) -> None:
    parity("zero_bubble-v", SmallModel("mistral", layers=4, sliding_window=8), checkpointing=True)


@pytest.mark.slow
@pytest.mark.parametrize("on_host", [False, True])
def test_kept_attention(parity: Compare, on_host: bool) -> None:
    settings = {"activation_checkpointing": {"mode": "attention", "cpu_checkpointing": on_host}}
    parity("zero_bubble-v", SmallModel("mistral", layers=4, sliding_window=8), settings=settings)


# Beside the schedules of one stage a rank


@pytest.mark.ci
def test_gradients_have_the_bits_of_whole_stages(pool: WorkerPool, checkpoint: Callable[[SmallModel], str]) -> None:
    path = checkpoint(LLAMA)

    def train(schedule: str, chunks: int, segments: int) -> tuple[float, dict[str, torch.Tensor]]:
        pipeline = {"engine": "seq1f1b", "stages": 2, "chunks": chunks, "segments": segments, "schedule": schedule}
        settings = {"train_micro_batch_size_per_gpu": 2, "pipeline": {**pipeline, "partition": "even"}}
        (loss, first), (same, second) = pool.run(2, trained_gradients, path, settings, timeout_s=TIMEOUT_S)
        assert loss == same
        assert not first.keys() & second.keys()
        return loss, {**first, **second}

    # A run of W as one product adds segments up in another order, so split backwards are compared with whole sequences.
    for segments, schedules in ((3, SCHEDULES[:1]), (1, SCHEDULES)):
        loss, expected = train("seq1f1b", 1, segments)
        for schedule in schedules:
            other, gradients = train(schedule, 2, segments)
            assert loss == other
            assert expected.keys() == gradients.keys()
            assert all(torch.equal(expected[name], gradients[name]) for name in expected)


# What ranks know of themselves


def what_a_rank_says(path: str, config: dict[str, Any], trace: str, steps: int = 3) -> dict[str, Any]:
    """What the engine of this rank says of its place, what it holds, and its losses."""
    config["pipeline"]["trace"] = trace
    engine = make_engine(path, config)
    model, evaluated = engine.module, engine.eval_batch(micro_batches())
    names = [name for name, _ in model.named_parameters()]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return {
        "place": (engine.stage_id, engine.num_stages),
        "is_first": engine.is_first_stage(),
        "is_last": engine.is_last_stage(),
        "layers": sorted({int(name.split(".")[2]) for name in names if ".layers." in name}),
        "ends": (type(embedding).__name__, type(head).__name__),
        "is_tied": embedding.weight is head.weight,
        "shared": list(model.staging.shared),
        "counts": engine.pipeline.layers,
        "losses": [evaluated.item(), *(float(engine.train_batch(micro_batches())) for _ in range(steps))],
    }


def micro_batches() -> Iterator[dict[str, torch.Tensor]]:
    ids = torch.randint(2, 100, (2, 4, 12), generator=torch.Generator().manual_seed(3))
    return iter({"input_ids": rows, "labels": rows} for rows in ids)


ABSENT, HEAD = "PlaceholderEnd", "Linear"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (
            "zero_bubble-v",
            [
                {"is_first": True, "is_last": True, "layers": [0, 3], "ends": ("Embedding", HEAD), "is_tied": True},
                {"is_first": False, "is_last": False, "layers": [1, 2], "ends": (ABSENT, ABSENT), "is_tied": False},
            ],
        ),
        (
            "seq1f1b-interleaved",
            [
                {"is_first": True, "is_last": False, "layers": [0, 2], "ends": ("Embedding", ABSENT)},
                {"is_first": False, "is_last": True, "layers": [1, 3], "ends": ("Embedding", HEAD), "is_tied": True},
            ],
        ),
    ],
    ids=["v", "interleaved"],
)
def test_the_ends_of_the_model_are_where_the_placement_has_them(
    pool: WorkerPool,
    checkpoint: Callable[[SmallModel], str],
    tmp_path: Path,
    schedule: str,
    expected: list[dict[str, Any]],
) -> None:
    keys = {"chunks": 2, "schedule": schedule, "stage_balance": "layers"}
    config = training_settings(stages=2, pipeline=keys)
    ranks = pool.run(2, what_a_rank_says, checkpoint(TIED), config, str(tmp_path), timeout_s=TIMEOUT_S)
    for number, (rank, of_rank) in enumerate(zip(ranks, expected, strict=True)):
        assert {name: rank[name] for name in of_rank} == of_rank
        assert (rank["place"], rank["counts"]) == ((number, 2), (1, 1, 1, 1))
        # With a V, the tied matrix is one parameter of one rank.
        assert len(rank["shared"]) == (schedule == "seq1f1b-interleaved")
        assert rank["losses"] == ranks[0]["losses"]
    evaluated, trained, *_ = ranks[0]["losses"]
    assert evaluated == pytest.approx(trained, rel=1e-6)
    spans = read_chrome_trace(tmp_path / "step_3.json").spans
    assert [sorted({span.action.stage for span in lane}) for lane in spans] == [rank["layers"] for rank in ranks]
    assert (tmp_path / "step_3.png").is_file()


@pytest.mark.slow
def test_the_example_config_trains(pool: WorkerPool, checkpoint: Callable[[SmallModel], str], tmp_path: Path) -> None:
    config = load_config(ROOT / "configs" / "llama_2_stages_2_chunks.json")
    assert config["pipeline"]["trace"] is True
    # The learning rate of the first two steps is nothing.
    ranks = pool.run(4, what_a_rank_says, checkpoint(LLAMA), config, str(tmp_path), 4, timeout_s=TIMEOUT_S)
    assert [(rank["is_first"], rank["is_last"]) for rank in ranks] == [(True, True)] * 2 + [(False, False)] * 2
    losses = ranks[0]["losses"]
    assert losses[-1] < losses[0]
    assert (tmp_path / "step_3.json").is_file()


@given(st.integers(1, 6), st.integers(1, 4), st.sampled_from([interleaved_placement, v_placement]))
def test_neighbours_on_two_ranks_have_channels_and_no_rank_is_in_two_of_one_partition(
    ranks: int, chunks: int, place: Callable[[int, int], tuple[int, ...]]
) -> None:
    placement = place(ranks, chunks)
    mesh = Mesh(MeshShape(), pipe=ranks, rank=0, world_size=ranks, placement=placement)
    partitions = mesh._disjoint_channels()
    for channels in partitions:
        members = [placement[stage] for ends in channels for stage in ends]
        assert len(set(members)) == len(members)
    made = [ends for channels in partitions for ends in channels]
    pairs = [(one, two) for one, two in pairwise(range(len(placement))) if placement[one] != placement[two]]
    around = {(0, len(placement) - 1)} if placement[0] != placement[-1] and len(placement) > 2 else set()
    assert sorted(made) == sorted({*pairs, *((two, one) for one, two in pairs), *around})


# Evaluation


@given(
    st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4),
    st.sampled_from([interleaved_placement, v_placement]),
)  # fmt: skip
def test_evaluation_runs_every_placement(
    ranks: int, chunks: int, micro_batches: int, segments: int, place: Callable[[int, int], tuple[int, ...]]
) -> None:
    rank_of = place(ranks, chunks)
    shape = PipelineShape(len(rank_of), micro_batches, segments)
    schedule = forwards_only(shape, rank_of)
    lower(schedule, shape)
    # A rank that has begun idles no longer than its chunks make it.
    assert simulate(schedule, shape, lambda _: 1).makespan_s <= chunks * shape.units + shape.stages


# The config


def config(**keys: Any) -> dict[str, Any]:
    return {"pipeline": {"engine": "seq1f1b", "stages": 2, **keys}}


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"chunks": 2}, '"seq1f1b" has one chunk on each rank; with 2 chunks, take seq1f1b-interleaved'),
        ({"chunks": 3, "schedule": "zero_bubble"}, "with 3 chunks, take zero_bubble-interleaved or zero_bubble-v"),
        ({"chunks": 2, "schedule": "gpipe"}, '"gpipe" has one chunk on each rank'),
        ({"chunks": 2, "schedule": "1f1b", "segments": 1}, '"1f1b" has one chunk on each rank'),
        ({"schedule": "zero_bubble-v"}, '"zero_bubble-v" has several chunks on each rank: give 2 chunks or more'),
        ({"schedule": "seq1f1b-interleaved", "chunks": 1}, "give 2 chunks or more"),
        ({"chunks": "auto", "schedule": "zero_bubble-v"}, '"chunks": "auto" is for "schedule": "auto", .*a number'),
        ({"chunks": 40000, "schedule": "auto"}, '"stages" × "chunks" is 80000; 65536 at most'),
        (
            {"chunks": "auto", "schedule": "auto", "stage_balance": [1, 1, 1]},
            '"stage_balance" has 3 numbers for 2 stages; with "chunks": "auto" give 2, or for each chunk as many',
        ),
        ({"chunks": 0, "schedule": "zero_bubble-v"}, r"pipeline\.chunks: .*greater than or equal to 1"),
        ({"chunks": 2.0, "schedule": "zero_bubble-v"}, r"pipeline\.chunks: .*valid integer"),
        ({"chunks": 40000, "schedule": "zero_bubble-v"}, '"stages" × "chunks" is 80000; 65536 at most'),
        ({"chunk": 2, "schedule": "zero_bubble-v"}, r'pipeline\.chunk is not a known key; did you mean "chunks"'),
        (
            {"chunks": 2, "schedule": "seq1f1b-interleaved", "memory_limit": 2},
            '"memory_limit" is for .*"seq1f1b-interleaved" keeps what it keeps',
        ),
        (
            {"chunks": 2, "schedule": "zero_bubble-v", "stage_balance": [2, 2]},
            '"stage_balance" has 2 numbers for 2 stages of 2 chunks; give one for each chunk, 4 in all',
        ),
        ({"schedule": "zero_bubble-w"}, "known: gpipe, 1f1b, .*seq1f1b-interleaved, .*zero_bubble-v, auto"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_rejected_by_name(keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_layout(parse_config(config(**keys)), {}, 2)


def test_a_section_with_chunks_alone_is_ours() -> None:
    with pytest.raises(ConfigError, match=r"pipeline\.engine is missing"):
        parse_config({"pipeline": {"stages": 2, "chunks": 2}})


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({}, r"pipeline\.stages is 2 and pipeline\.chunks 2, but the model has 3 layers, .* of 3 or less would work"),
        ({"stage_balance": [1, 1, 1, 1], "segments": 2}, r"pipeline\.chunks 2, but the model has 3 layers"),
    ],
)
def test_too_few_layers_are_rejected_before_weights_are_read(
    checkpoint: Callable[[SmallModel], str], monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], problem: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("transformers.modeling_utils.load_state_dict", None)
    with pytest.raises(ConfigError, match=problem):
        cuboid.from_pretrained(
            checkpoint(SmallModel("llama", layers=3)), config(chunks=2, schedule="zero_bubble-v", **keys)
        )
