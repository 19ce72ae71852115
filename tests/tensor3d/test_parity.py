"""Cuboid's core computes what plain transformers computes, to float64's last digits, on every mesh.

Each case runs the same batches (padding on both sides, labels that are ignored, a row without any) through both and
compares every output, gradient and weight; see docs/verify.md.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from comparing import describe, mesh_section
from conftest import TIMEOUT_S
from cuboid import CuboidError, MeshShape
from cuboid.cli import commands
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.thread_ranks import ThreadRanks
from cuboid.distributed.topology import Topology
from cuboid.models.architectures.small_model_names import MESH_ARCHITECTURES
from cuboid.tensor3d.layers import norm
from cuboid.verify import Architecture, PassReport, Plan, SmallModel, WorkerPool, verify
from cuboid.verify.reference import run_reference
from cuboid.verify.run import judge
from cuboid.verify.sharded import run_core
from threaded import assert_as_alone, step_of

MESHES = ("1x1x1", "1x1x8", "8x1x1", "1x8x1", "2x2x2", "1x2x4", "1x2x3", "3x1x2")
#: Every mesh and every architecture once or more; `-m slow` runs the product.
COVERING: tuple[tuple[str, Architecture], ...] = (
    ("1x1x1", "llama"),
    ("1x1x8", "qwen2"),
    ("8x1x1", "gpt2"),
    ("1x8x1", "qwen3"),
    ("2x2x2", "llama"),
    ("2x2x2", "gpt2"),
    ("1x2x4", "mistral"),
    ("1x2x3", "gpt2"),
    ("1x2x3", "qwen3"),
    ("2x2x2", "mixtral"),
    ("8x1x1", "qwen3_moe"),
    ("3x1x2", "qwen2"),
)

Compare = Callable[..., PassReport]


@pytest.fixture
def parity(pool: WorkerPool, checkpoint: Callable[[SmallModel], str]) -> Compare:
    """Verifies a small model on a mesh and asserts that it passed."""

    def run(mesh: str | dict[str, Any], small: SmallModel | Architecture, **changes: Any) -> PassReport:
        settings = section(mesh)
        ranks = settings["size"] if "size" in settings else MeshShape(**settings["mesh"]).size
        if isinstance(small, str):
            small = SmallModel.fitting(small, ranks)
        plan = dataclasses.replace(Plan(checkpoint(small), batch=2 * (rows(mesh) or ranks)), **changes)
        report = verify(plan, {"tensor_parallel": settings}, passes=("core",), pool=pool, timeout_s=TIMEOUT_S).passes[0]
        assert report.passed, describe(report)
        return report

    return run


def section(mesh: str | dict[str, Any]) -> dict[str, Any]:
    """The tensor_parallel section of a mesh, or with other keys of the section."""
    return {"mode": "3d_tensor", **mesh} if isinstance(mesh, dict) else mesh_section(mesh)


def rows(mesh: str | dict[str, Any]) -> int | None:
    """Size of the batch axis, if it is known."""
    return MeshShape.parse(mesh).batch if isinstance(mesh, str) else None


@pytest.mark.sample(2)
@pytest.mark.parametrize(("mesh", "architecture"), COVERING)
def test_every_mesh_and_architecture(parity: Compare, mesh: str, architecture: Architecture) -> None:
    report = parity(mesh, architecture, accumulate=2)
    assert report.tolerance == 1e-9
    # No parameter was skipped because the other side lacked it.
    names = {check.name for check in report.checks if check.kind == "activation"}
    layer = "transformer.h.1" if architecture == "gpt2" else "model.layers.1"
    assert {layer, layer.replace("1", "0")} <= names
    assert report.worst("gradient") is not None
    assert report.worst("logits") is not None


@pytest.mark.slow
@pytest.mark.parametrize("in_memory", [False, True], ids=["loaded", "in-memory"])
@pytest.mark.parametrize("architecture", MESH_ARCHITECTURES)
@pytest.mark.parametrize("mesh", MESHES)
def test_the_whole_product(parity: Compare, mesh: str, architecture: Architecture, in_memory: bool) -> None:
    parity(mesh, architecture, accumulate=2, sequence_length=29, shard_in_memory=in_memory)


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.parametrize("mesh", ["2x2x2", "1x8x1", "1x1x8", "8x1x1", "1x2x4"])
def test_grouped_query_attention(parity: Compare, mesh: str, kv_heads: int) -> None:
    parity(mesh, SmallModel("llama", heads=8, kv_heads=kv_heads))


@pytest.mark.sample(0, ci=1)
@pytest.mark.parametrize(
    ("mesh", "small"),
    [
        ("1x2x3", SmallModel("qwen2", heads=12, kv_heads=4)),
        ("3x1x2", SmallModel("llama", heads=12, kv_heads=3)),
    ],
    ids=["1x2x3-qwen2", "3x1x2-llama"],
)
def test_grouped_query_attention_where_groups_straddle_ranks(parity: Compare, mesh: str, small: SmallModel) -> None:
    parity(mesh, small)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", ["2x1x2", "2x2x2", "1x8x1", "8x1x1"])
@pytest.mark.parametrize(
    "small",
    [
        SmallModel("llama", tied=True),
        SmallModel("gpt2", tied=False),
        SmallModel("qwen3", tied=False, bias=True),
        SmallModel("llama", bias=True, vocabulary=128),
    ],
    ids=["llama-tied", "gpt2-untied", "qwen3-untied-bias", "llama-bias"],
)
def test_ties_and_biases(parity: Compare, mesh: str, small: SmallModel) -> None:
    parity(mesh, small)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("mesh", "small"),
    [("1x4x1", SmallModel("llama", vocabulary=9)), ("2x1x2", SmallModel("llama", vocabulary=5, tied=True))],
    ids=["1x4x1", "2x1x2-tied"],
)
def test_a_small_vocabulary_leaves_ranks_with_padding_only(parity: Compare, mesh: str, small: SmallModel) -> None:
    parity(mesh, small)


def test_a_sliding_window(parity: Compare) -> None:
    parity("1x2x2", SmallModel("mistral", sliding_window=8))


@pytest.mark.sample(1)
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("mesh", ["1x2x3", "2x2x2", "1x8x1"])
def test_sequences_that_do_not_divide(parity: Compare, mesh: str, architecture: Architecture) -> None:
    parity(mesh, architecture, sequence_length=29)


@pytest.mark.slow
def test_a_sequence_of_the_maximum_length(parity: Compare) -> None:
    small = SmallModel("gpt2", positions=29)
    parity("1x2x2", small, sequence_length=29)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("mesh", "architecture"), [("1x2x2", "llama"), ("2x1x2", "gpt2")])
@pytest.mark.parametrize("options", [{"masking": False, "positions": True}, {"masking": False}, {"positions": True}])
def test_without_a_mask_and_with_positions(
    parity: Compare, mesh: str, architecture: Architecture, options: dict[str, bool]
) -> None:
    parity(mesh, architecture, **options)


@pytest.mark.ci
def test_micro_batches_with_some_or_all_rows_without_labels(parity: Compare) -> None:
    # Row kinds rotate: with one row a rank, some rank's part has no label; with one row, some micro-batch has none.
    parity("2x2x1", "llama", batch=2, accumulate=4, steps=1)
    parity("1x2x1", "llama", batch=1, accumulate=4, steps=1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_mean_over_micro_batches(parity: Compare, architecture: Architecture) -> None:
    parity("2x1x2", architecture, mean_over="micro_batches", accumulate=2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("mesh", ["2x1x1", "2x2x1", "1x2x3"])
def test_activation_checkpointing(parity: Compare, mesh: str, architecture: Architecture) -> None:
    parity(mesh, architecture, checkpointing=True, accumulate=2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", ["1x2x1", "1x2x2", "2x1x2", "2x2x1", "1x1x1"])
def test_data_parallel_and_accumulation(parity: Compare, mesh: str) -> None:
    parity(mesh, "llama", data_parallel=2, accumulate=2)


def test_clipping(parity: Compare) -> None:
    report = parity("2x1x2", "llama", clipping=0.25)
    assert min(report.norms[0]) > 0.25


@pytest.mark.sample(1)
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_sharding_in_memory(parity: Compare, architecture: Architecture) -> None:
    parity("2x2x1", architecture, shard_in_memory=True)


@pytest.mark.slow
def test_an_auto_mesh(parity: Compare) -> None:
    report = parity({"mesh": "auto", "size": 4}, "llama")
    assert report.mesh.size == 4


@pytest.mark.ci
def test_the_casts_of_hugging_face(parity: Compare) -> None:
    assert parity("1x2x2", "llama", keep_float64=False).tolerance == 1e-6


@pytest.mark.ci
def test_float32(parity: Compare) -> None:
    parity("2x1x2", "llama", dtype="float32", keep_float64=False)


@pytest.mark.sample(1)
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_bfloat16(parity: Compare, architecture: Architecture) -> None:
    parity("1x2x2", architecture, dtype="bfloat16", keep_float64=False)


def test_a_wrong_weight_is_located(pool: WorkerPool, checkpoint: Callable[[SmallModel], str], tmp_path: Path) -> None:
    path = checkpoint(SmallModel("llama"))
    wrong = AutoModelForCausalLM.from_pretrained(path)
    wrong.get_parameter("model.layers.1.mlp.down_proj.weight").data[3, 5] += 1e-6
    wrong.save_pretrained(tmp_path / "wrong")
    for name in ("reference", "cuboid"):
        (tmp_path / name).mkdir()
    plan, config = Plan(path, batch=4), {"tensor_parallel": section("1x2x2")}
    pool.run(1, run_reference, plan, str(tmp_path / "reference"), timeout_s=TIMEOUT_S)
    changed = dataclasses.replace(plan, checkpoint=str(tmp_path / "wrong"))
    pool.run(4, run_core, changed, config, str(tmp_path / "cuboid"), timeout_s=TIMEOUT_S)
    report = judge("core", plan, Topology(MeshShape(1, 2, 2), 4), tmp_path / "reference", tmp_path / "cuboid")
    assert report.first_difference == ("forward: the first output that differs is that of model.layers.1.mlp.down_proj")


def test_norms_of_whole_rows_by_torch_are_those_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, where torch has a kernel for them."""
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).train()
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            torch.nn.init.normal_(module.weight, 1.0, 0.2)
    used: list[torch.Tensor] = []
    monkeypatch.setattr(norm, "has_fused_kernel", lambda x, _: not used.append(x))
    ids = torch.arange(2 * 8).view(2, 8) % 61
    assert_as_alone(model, "2x2x1", step_of(input_ids=ids, labels=ids))
    # On four ranks two layers with two norms each, and one behind them.
    assert len(used) == 4 * 5


@pytest.mark.parametrize("hidden", [1, 2])
def test_gradients_of_a_layer_norms_float32_parameters_are_not_rounded_as_its_bfloat16_input(hidden: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, dy = torch.randn(2, 64, 32, generator=generator).bfloat16().unbind()
    weight, bias = torch.randn(2, 32, generator=generator).unbind()
    exact = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
    torch.nn.functional.layer_norm(exact[0], (32,), exact[1], exact[2]).backward(dy.double())

    def gradients(mesh: Mesh) -> list[torch.Tensor | None]:
        along = mesh.along("hidden")
        local = [tensor.chunk(hidden, -1)[along.index].clone().requires_grad_() for tensor in (x, weight, bias)]
        norm._LayerNorm.apply(*local, 1e-5, along).backward(dy.chunk(hidden, -1)[along.index])
        return [tensor.grad for tensor in local]

    by_rank = zip(*ThreadRanks(MeshShape(1, 1, hidden)).run(gradients), strict=True)
    for parts, wanted, dtype in zip(by_rank, exact, (torch.bfloat16, torch.float32, torch.float32), strict=True):
        actual = torch.cat(parts, -1)
        assert actual.dtype == dtype
        bound = 1e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(actual.double(), wanted.grad, rtol=bound, atol=bound)


def test_a_users_error_is_raised_unchanged(pool: WorkerPool, checkpoint: Callable[[SmallModel], str]) -> None:
    path = checkpoint(SmallModel("llama", heads=8))
    config = {"tensor_parallel": section("1x1x3")}
    with pytest.raises(CuboidError, match="3") as caught:
        verify(Plan(path), config, passes=("core",), pool=pool, timeout_s=TIMEOUT_S)
    assert "Traceback" not in str(caught.value)


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(("tolerance", "status"), [([], 0), (["--tolerance", "1e-30"], 1)])
def test_the_command_exits_with_1_above_the_tolerance(
    tolerance: list[str],
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("cuboid.library_warnings.quiet", lambda: None)  # it is for a process of its own
    out = tmp_path / "report.json"
    command = ["verify", "--arch", "llama", "--mesh", "1x2x1", "--no-engine", "--json", str(out), *tolerance]
    assert (commands(command, standalone_mode=False) or 0) == status
    printed = " ".join(capsys.readouterr().out.split())
    assert ("checks pass" if status == 0 else "the first output that differs is that of model.") in printed
    assert json.loads(out.read_text(encoding="utf-8"))["passed"] is (status == 0)


@pytest.mark.parametrize("arguments", [[], ["--model", ".", "--arch", "llama"], ["--arch", "llama"]])
def test_the_command_names_missing_arguments(arguments: list[str]) -> None:
    with pytest.raises(typer.BadParameter, match="give "):
        commands(["verify", *arguments], standalone_mode=False)
