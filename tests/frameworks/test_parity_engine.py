"""The DeepSpeed engine on a mesh computes the same as plain transformers with torch's AdamW."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from comparing import describe, mesh_section
from conftest import TIMEOUT_S
from cuboid import MeshShape
from cuboid.models.architectures.transformers_names import recomputes
from cuboid.verify import Architecture, PassReport, Plan, SmallModel, WorkerPool, verify
from training import make_engine, settings, train

Compare = Callable[..., PassReport]


@pytest.fixture
def parity(pool: WorkerPool, checkpoint: Callable[[SmallModel], str]) -> Compare:
    """Verifies the engine on a mesh, with two micro-batches a step, and asserts that it passed."""

    def run(mesh: str, architecture: Architecture, settings: dict[str, Any], **changes: Any) -> PassReport:
        shape = MeshShape.parse(mesh)
        config = {**settings, "tensor_parallel": mesh_section(mesh)}
        path = checkpoint(SmallModel.fitting(architecture, shape.size))
        plan = Plan(path, batch=2 * shape.batch, accumulate=2, steps=3, **changes)
        report = verify(plan, config, passes=("engine",), pool=pool, timeout_s=TIMEOUT_S).passes[0]
        assert report.passed, describe(report)
        return report

    return run


def zero(stage: int, clipping: float = 0.25) -> dict[str, Any]:
    """A config with that ZeRO stage, and clipping that takes effect."""
    return {"zero_optimization": {"stage": stage}, "gradient_clipping": clipping}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("mesh", "architecture", "stage", "data_parallel"),
    [
        ("1x1x2", "gpt2", 1, 2),
        ("2x2x2", "llama", 1, 1),
        ("1x2x2", "llama", 0, 2),
        ("2x1x2", "qwen2", 2, 2),
        ("1x1x1", "qwen3", 0, 2),
    ],
)
def test_zero_stages(parity: Compare, mesh: str, architecture: Architecture, stage: int, data_parallel: int) -> None:
    report = parity(mesh, architecture, zero(stage), data_parallel=data_parallel)
    assert report.tolerance == 1e-5
    assert min(report.norms[0]) > 0.25
    assert len(report.losses[0]) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "architecture", "stage", "data_parallel"),
    [
        ("2x2x2", "mixtral", 1, 1),
        ("1x2x2", "qwen3_moe", 1, 2),
        ("2x1x2", "mixtral", 2, 2),
        ("4x1x1", "qwen3_moe", 0, 1),
    ],
)
def test_experts(parity: Compare, mesh: str, architecture: Architecture, stage: int, data_parallel: int) -> None:
    parity(mesh, architecture, zero(stage), data_parallel=data_parallel)
    if stage == 1:
        parity(mesh, architecture, zero(stage), data_parallel=data_parallel, checkpointing=True)


@pytest.mark.ci
def test_without_clipping_and_sharded_in_memory(parity: Compare) -> None:
    parity("1x2x1", "mistral", zero(1, clipping=0), shard_in_memory=True)


@pytest.mark.slow
def test_activation_checkpointing(parity: Compare) -> None:
    parity("1x2x2", "llama", zero(1), checkpointing=True)


def _trained(path: str, config: dict[str, Any]) -> tuple[list[float], bool]:
    engine = make_engine(path, config)
    return train(engine, 3), recomputes(engine.module)


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(("mesh", "stages"), [("1x2x1", None), ("1x1x1", 2)])
def test_the_configs_checkpointing_trains_to_the_same_losses(
    pool: WorkerPool, checkpoint: Callable[[SmallModel], str], mesh: str, stages: int | None
) -> None:
    path, losses = checkpoint(SmallModel("llama", heads=4, kv_heads=2, layers=2)), {}
    for mode, on_host in (("none", False), ("layers", False), ("attention", False), ("attention", True)):
        section = {"mode": mode, "cpu_checkpointing": on_host}
        config = {**settings(mesh, stages), "activation_checkpointing": section}
        ranks = pool.run(2, _trained, path, config, timeout_s=TIMEOUT_S)
        losses["host" if on_host else mode] = [rank_losses for rank_losses, _ in ranks]
        assert [checkpoints for _, checkpoints in ranks] == [mode != "none"] * 2
    assert losses["layers"] == losses["attention"] == losses["host"]
    for rank_losses, plain in zip(losses["layers"], losses["none"], strict=True):
        assert rank_losses == pytest.approx(plain, rel=1e-6)


def _resumed(path: str, config: dict[str, Any], folder: str | None) -> list[float]:
    engine = make_engine(path, config)
    losses = train(engine, 2)
    if folder is None:
        return losses + train(engine, 2, skip=2)
    engine.save_checkpoint(folder)
    engine = make_engine(path, config)
    engine.load_checkpoint(folder)
    return losses + train(engine, 2, skip=2)


@pytest.mark.sample(1, ci=1)
@pytest.mark.parametrize(("mesh", "data", "stage"), [("1x2x1", 1, 1), ("1x1x1", 2, 1), ("1x1x1", 2, 2)])
def test_an_optimizer_on_the_host_trains_to_the_same_losses(
    pool: WorkerPool, checkpoint: Callable[[SmallModel], str], tmp_path: Path, mesh: str, data: int, stage: int
) -> None:
    path = checkpoint(SmallModel("llama", heads=4, kv_heads=2, layers=2))
    plain = settings(mesh, zero=stage, data=data, bf16=True)
    zero_section = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    on_host = {**plain, "zero_optimization": zero_section, "zero_force_ds_cpu_optimizer": False}
    (expected, *_), *others = (
        pool.run(2, _resumed, path, config, folder, timeout_s=TIMEOUT_S)
        for config, folder in ((plain, None), (on_host, None), (on_host, str(tmp_path / "checkpoint")))
    )
    for losses, *_ in others:
        assert losses == expected


@pytest.mark.ci
def test_bfloat16(parity: Compare) -> None:
    parity("1x2x1", "llama", zero(1), data_parallel=2, dtype="bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("data_parallel", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("mesh", ["1x1x4", "4x1x1", "1x4x1", "2x1x2", "1x2x2", "2x2x1", "3x1x1"])
def test_every_stage_on_many_meshes(parity: Compare, mesh: str, stage: int, data_parallel: int) -> None:
    architecture: Architecture = "gpt2" if mesh == "1x2x2" else "llama"
    parity(mesh, architecture, zero(stage), data_parallel=data_parallel)


def _monitored(path: str, config: dict[str, Any]) -> list[float]:
    return train(make_engine(path, config), 3)


@pytest.mark.parametrize(("mesh", "stages"), [("1x2x1", None), ("1x1x1", 2)])
def test_monitors_get_the_loss_of_each_step(
    pool: WorkerPool, checkpoint: Callable[[SmallModel], str], tmp_path: Path, mesh: str, stages: int | None
) -> None:
    config = settings(mesh, stages)
    config["csv_monitor"] = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    losses = pool.run(
        2, _monitored, checkpoint(SmallModel("llama", heads=4, kv_heads=2, layers=2)), config, timeout_s=TIMEOUT_S
    )[0]
    header, *lines = (tmp_path / "job" / "Train_Samples_train_loss.csv").read_text().split()
    assert header == "step,train_loss"
    # Eight rows in each step.
    assert [int(line.split(",")[0]) for line in lines] == [8, 16, 24]
    assert [float(line.split(",")[1]) for line in lines] == pytest.approx(losses, rel=1e-6)
