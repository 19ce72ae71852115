"""The comparison itself: relative errors, what fails, and the location of the first difference."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.nn import functional
from transformers import AutoModelForCausalLM

from cuboid import CuboidError, MeshShape
from cuboid.distributed.topology import Topology
from cuboid.models.batch.length_cases import Case
from cuboid.models.certification.float64 import KeepFloat64, precision
from cuboid.models.certification.trials import relative_error, words_of_error
from cuboid.verify import PassReport, Plan, Report, SmallModel
from cuboid.verify.compare import ALL, Check, allow_rounding, compare, first_difference
from cuboid.verify.noise import compare_noisy
from cuboid.verify.plan import tokens_of
from cuboid.verify.probe import assemble, residual_part
from cuboid.verify.run import complete, default_tolerance, engine_config_of, engine_plan_of
from cuboid.verify.training import RunOutcome


def outcome(**changes: torch.Tensor | float) -> RunOutcome:
    """An invented outcome, with single tensors or numbers replaced."""

    def value(name: str, default: torch.Tensor) -> torch.Tensor:
        changed = changes.get(name, default)
        assert isinstance(changed, torch.Tensor)
        return changed

    layers = ("embedding", "first", "second")
    return RunOutcome(
        losses=[float(changes.get("loss", 2.0))],
        norms=[float(changes.get("norm", 3.0))],
        activations={name: value(f"{name}_output", torch.ones(1, 4, 2)) for name in layers},
        logits={"logits": value("logits", torch.ones(1, 4, 5))},
        gradients=[{name: value(f"{name}_gradient", torch.ones(3)) for name in layers}],
        weights={name: value(f"{name}_weight", torch.ones(3)) for name in layers},
    )


def wrong(**changes: torch.Tensor | float) -> list[tuple[str, str]]:
    checks = compare(outcome(), outcome(**changes), 1e-9)
    return [(check.kind, check.name) for check in checks if not check.passed]


def test_zeros_stand_for_moments_that_there_are_not() -> None:
    # Of a parameter without a gradient, such as the bias of ERNIE's routers.
    for moment, passed in ((torch.zeros(3), True), (torch.full((3,), 1e-30), False)):
        checks = compare(outcome(), dataclasses.replace(outcome(), moments={"bias": moment}), 1e-9)
        assert [check.passed for check in checks if check.kind == "moment"] == [passed]


def test_float32_passes_as_far_as_plain_float32_is_off() -> None:
    ones = torch.ones(3)
    reference = outcome(first_gradient=ones + 3e-5, second_gradient=ones + 0.1, loss=math.nan)
    other = outcome(
        first_gradient=ones + 1.1e-4,
        second_gradient=ones + 0.102,
        second_weight=ones + 2e-5,
        loss=2.0,
    )
    checks = allow_rounding(compare(reference, other, 1e-5), compare(outcome(), reference, 1e-5))
    wrong = {(check.kind, check.name): check.tolerance for check in checks if not check.passed}
    # At three times 3e-5, the first passes. No rounding explains the second's, plain float32 is right in the weight.
    assert wrong == {("loss", "step 1"): 1e-5, ("gradient", "second"): 1e-3, ("weight", "second"): 1e-5}


def test_relative_error_is_relative_to_the_largest_value() -> None:
    reference = torch.tensor([4.0, 0.5], dtype=torch.float64)
    assert relative_error(reference, reference) == 0
    assert relative_error(reference, reference + torch.tensor([0.0, 0.1])) == pytest.approx(0.025)


@pytest.mark.parametrize(
    "other", [torch.tensor([math.nan, 1.0]), torch.tensor([math.inf, 1.0]), torch.ones(3), torch.ones(2, 1)]
)
def test_nan_and_other_shapes_have_infinite_error(other: torch.Tensor) -> None:
    assert relative_error(torch.ones(2), other) == math.inf


def test_nan_on_both_sides_fails() -> None:
    assert relative_error(torch.tensor([math.nan]), torch.tensor([math.nan])) == math.inf


def test_zero_tensors_need_zeros_up_to_the_floor() -> None:
    zero = torch.zeros(2)
    assert relative_error(zero, zero) == 0
    assert relative_error(zero, zero + 1e-12) == math.inf
    assert relative_error(zero, zero + 1e-12, floor=1e-3) == pytest.approx(1e-9)


def test_equal_outcomes_pass() -> None:
    assert wrong() == []


@pytest.mark.parametrize(
    ("changes", "failing"),
    [
        ({"loss": 2.1}, [("loss", "step 1")]),
        ({"loss": math.nan}, [("loss", "step 1")]),
        ({"norm": 2.9}, [("norm", "step 1")]),
        ({"second_gradient": torch.zeros(3)}, [("gradient", "second")]),
        ({"first_weight": torch.zeros(3)}, [("weight", "first")]),
        ({"first_output": torch.zeros(1, 4, 2)}, [("activation", "first")]),
        ({"logits": torch.zeros(1, 4, 5)}, [("logits", "logits")]),
    ],
)
def test_each_kind_is_compared(changes: dict[str, torch.Tensor | float], failing: list[tuple[str, str]]) -> None:
    assert wrong(**changes) == failing


def test_missing_and_surplus_tensors_fail() -> None:
    other = outcome()
    other.gradients[0]["surplus"] = other.gradients[0].pop("second")
    failed = [check for check in compare(outcome(), other, 1e-9) if not check.passed]
    assert [(check.name, check.error) for check in failed] == [("second", math.inf), ("surplus", math.inf)]


def test_a_side_without_gradients_fails() -> None:
    other = outcome()
    other.gradients = []
    assert not all(check.passed for check in compare(outcome(), other, 1e-9))


def test_outputs_at_padding_are_ignored() -> None:
    other = outcome(first_output=torch.tensor([[[7.0, 7.0], [1, 1], [1, 1], [1, 1]]]))
    padding = torch.tensor([[True, False, False, False]])
    assert all(check.passed for check in compare(outcome(), other, 1e-9, padding=[padding]))
    assert not all(check.passed for check in compare(outcome(), other, 1e-9, padding=[~padding]))


def test_only_the_given_kinds_are_compared() -> None:
    other = RunOutcome(losses=[2.0], norms=[3.0], weights=outcome().weights)
    checks = compare(outcome(), other, 1e-9, kinds=("weight", "loss", "norm"))
    assert [check.kind for check in checks] == ["loss", "norm", "weight", "weight", "weight"]
    assert all(check.passed for check in checks)


@pytest.mark.parametrize(
    ("failing", "sentence"),
    [
        ([], None),
        ([("activation", "first"), ("activation", "second"), ("gradient", "first")], "that of first"),
        ([("logits", "logits"), ("gradient", "first")], "the layers agree, the logits don't"),
        ([("gradient", "first"), ("gradient", "second")], "second has the first gradient that differs"),
        ([("loss", "step 1"), ("gradient", "second")], "loss: step 1 is the first that differs"),
        ([("loss", "step 2"), ("gradient", "second")], "second has the first gradient that differs"),
        ([("weight", "second")], "weight: second is the first that differs"),
    ],
)
def test_the_first_difference_is_located(failing: list, sentence: str | None) -> None:
    names = [("activation", "first"), ("activation", "second"), ("logits", "logits")]
    names += [("loss", "step 1"), ("loss", "step 2"), ("gradient", "first"), ("gradient", "second")]
    names += [("weight", "first"), ("weight", "second")]
    located = first_difference(
        [Check(*name, error=float(name in failing), magnitude=1, tolerance=0.5) for name in names]
    )
    assert located is None if sentence is None else sentence in (located or "")


def test_a_report_is_printed_and_written(tmp_path: Path) -> None:
    checks = compare(outcome(), outcome(second_gradient=torch.zeros(2)), 1e-9)
    plan = Plan("nowhere")
    report = Report([PassReport("core", plan, MeshShape(2, 2, 2), 1e-9, ([2.0], [2.0]), ([3.0], [3.0]), checks)])
    assert not report.passed
    worst = report.passes[0].worst("gradient")
    assert worst is not None
    assert (worst.name, worst.error) == ("second", math.inf)

    console = Console(width=100)
    with console.capture() as capture:
        report.print(console)
    printed = capture.get()
    assert "mesh 2×2×2" in printed
    assert "✗ 1 of 12 checks fail" in printed
    assert "second has the first gradient that differs" in printed
    assert "stages" not in printed
    report.write(tmp_path / "new" / "report.json")
    written = json.loads((tmp_path / "new" / "report.json").read_text(encoding="utf-8"))
    assert written["passed"] is False
    assert "second has the first gradient that differs" in written["passes"][0]["first_difference"]
    assert [check["name"] for check in written["passes"][0]["checks"] if check["error"] is None] == ["second"]


def test_float64_stays_float64_inside_the_mode_only() -> None:
    x = torch.ones(2, dtype=torch.float64)
    with precision(keep_float64=True):
        assert x.float() is x
        assert x.to(torch.float32).dtype == x.to(dtype=torch.float32).dtype == torch.float64
        assert functional.softmax(x, dim=-1, dtype=torch.float32).dtype == torch.float64
        assert torch.ones(2).float().dtype == torch.ones(2, dtype=torch.int64).float().dtype == torch.float32
        assert torch.ones(2, dtype=torch.bfloat16).to(torch.float32).dtype == torch.float32
        assert x.to(torch.bfloat16).dtype == torch.bfloat16
    assert x.float().dtype == torch.float32
    with precision(keep_float64=False):
        assert x.float().dtype == torch.float32


def test_gradients_are_float64_under_the_mode() -> None:
    x = torch.full((1,), 1 / 3, dtype=torch.float64, requires_grad=True)
    with KeepFloat64():
        (x.float() ** 2).sum().backward()
    assert x.grad is not None
    assert x.grad.item() == 2 / 3


def test_parts_of_the_residual_stream_are_assembled() -> None:
    topology = Topology(MeshShape(2, 3, 2), 12)
    full = torch.arange(2 * 7 * 4).view(2, 7, 4)
    padded = functional.pad(full, (0, 0, 0, 2))
    at = [topology.coordinate(rank) for rank in range(12)]
    parts = [padded[c.batch : c.batch + 1, c.sequence * 3 : c.sequence * 3 + 3, c.hidden * 2 :][..., :2] for c in at]
    assert torch.equal(assemble(parts, at, topology.shape)[:, :7], full)


def test_every_kind_of_row_occurs() -> None:
    batch = Plan("nowhere", batch=4, sequence_length=16).micro_batches(0, 0, 50)[0]
    mask, labels = batch["attention_mask"], batch["labels"]
    assert mask.sum(1).tolist() == [12, 12, 16, 16]
    assert mask[0, 0] == 0
    assert mask[1, -1] == 0
    assert (labels[3] == -100).all()
    assert (labels[mask == 0] == -100).all()
    assert (labels[2] == -100).any()
    assert (labels[2] != -100).any()


def test_padding_is_on_the_right_only_if_left_padding_is_off() -> None:
    mask = Plan("nowhere", batch=4, sequence_length=16, left_padding=False).micro_batches(0, 0, 50)[0]["attention_mask"]
    assert mask.sum(1).tolist() == [12, 16, 16, 12]
    assert mask[:, 0].all()


def test_packed_rows_restart_positions_and_have_no_padding() -> None:
    batch = Plan("nowhere", batch=4, sequence_length=48, packed=True).micro_batches(0, 0, 50)[0]
    positions = batch["position_ids"]
    assert "attention_mask" not in batch
    assert (positions[:, 0] == 0).all()
    assert ((positions[:, 1:] == positions[:, :-1] + 1) | (positions[:, 1:] == 0)).all()
    assert ((positions == 0).sum(1) > 2).all()
    assert (batch["labels"][0, -12:] != -100).any()


def test_lengths_vary_by_micro_batch() -> None:
    plan = Plan("nowhere", sequence_length=32, accumulate=2, data_parallel=2, varying=True)
    lengths = [[batch["labels"].shape[1] for batch in plan.micro_batches(0, r, 50)] for r in (0, 1)]
    assert lengths == [[32, 28], [24, 20]]
    assert plan.label_tokens(0, 50) < Plan("nowhere", accumulate=2, data_parallel=2).label_tokens(0, 50)


def test_replicas_and_steps_see_different_data_and_both_sides_the_same() -> None:
    plan = Plan("nowhere", data_parallel=2, accumulate=2)
    seen = [
        batch["input_ids"] for step in (0, 1) for replica in (0, 1) for batch in plan.micro_batches(step, replica, 50)
    ]
    assert len({tuple(ids.flatten().tolist()) for ids in seen}) == 8
    assert torch.equal(plan.micro_batches(1, 1, 50)[1]["input_ids"], seen[-1])
    tokens = sum((plan.micro_batches(0, r, 50)[i]["labels"][:, 1:] != -100).sum() for r in (0, 1) for i in (0, 1))
    assert plan.label_tokens(0, 50) == tokens


@pytest.mark.parametrize("change", [{"batch": 0}, {"steps": 0}, {"data_parallel": 0}, {"sequence_length": 1}])
def test_invalid_plans_are_rejected(change: dict[str, int]) -> None:
    with pytest.raises(CuboidError, match=next(iter(change))):
        Plan("nowhere", **change)


def test_the_engine_config_has_the_sections_that_affect_results() -> None:
    config = {
        "tensor_parallel": {"mode": "3d_tensor", "mesh": {"hidden": 2}},
        "zero_optimization": {"stage": 2},
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.8, 0.9], "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupLR"},
        "tensorboard": {"enabled": True},
        "train_micro_batch_size_per_gpu": 64,
    }
    plan = engine_plan_of(Plan("nowhere", batch=4, accumulate=3), config)
    assert (plan.dtype, plan.mean_over, plan.clipping) == ("float32", "micro_batches", 0.5)
    assert (plan.learning_rate, plan.betas, plan.weight_decay) == (0.01, (0.8, 0.9), Plan("nowhere").weight_decay)
    engine_config = engine_config_of(plan, config)
    assert engine_config["zero_optimization"] == {"stage": 2}
    assert engine_config["optimizer"]["params"]["lr"] == 0.01
    assert (engine_config["train_micro_batch_size_per_gpu"], engine_config["gradient_accumulation_steps"]) == (4, 3)
    assert not {"scheduler", "tensorboard"} & engine_config.keys()


def test_the_mean_of_a_pipeline_is_over_tokens() -> None:
    config = {"pipeline": {"engine": "seq1f1b", "stages": 2}}
    plan = engine_plan_of(Plan("nowhere"), config)
    assert plan.mean_over == "tokens"
    assert engine_config_of(plan, config)["pipeline"] == config["pipeline"]


def test_deepspeeds_default_clipping_is_used() -> None:
    # DeepSpeed clips at 1 by default.
    assert engine_plan_of(Plan("nowhere"), {}).clipping == 1.0
    assert engine_plan_of(Plan("nowhere"), {"gradient_clipping": 0}).clipping == 0


def test_auto_values_are_taken_from_the_plan() -> None:
    config = {"optimizer": {"params": {"lr": "auto", "betas": "auto"}}, "gradient_clipping": "auto"}
    parsed, plan = engine_plan_of(Plan("nowhere"), config), Plan("nowhere")
    assert (parsed.learning_rate, parsed.betas, parsed.clipping) == (plan.learning_rate, plan.betas, plan.clipping)


def test_tolerances_follow_the_precision() -> None:
    assert default_tolerance(Plan("nowhere")) == 1e-9
    assert default_tolerance(Plan("nowhere", keep_float64=False)) == 1e-6
    assert default_tolerance(Plan("nowhere", dtype="float32")) == 1e-5


# --- half precision ----------------------------------------------------------------------------------------------


def noisy(
    seed: int, noise: float = 0.01, factor: float = 1.0, changed: tuple[str, ...] = ("a", "b", "c")
) -> RunOutcome:
    """Gradients of three parameters with rounding noise, some of them scaled by a factor."""
    exact = torch.Generator().manual_seed(0)
    chance = torch.Generator().manual_seed(seed)
    gradients = {}
    for name, size in (("a", (64, 32)), ("b", (64,)), ("c", (8,))):
        true = torch.randn(size, generator=exact)
        rounded = true * (1 + noise * torch.randn(size, generator=chance))
        gradients[name] = rounded * (factor if name in changed else 1.0)
    return RunOutcome(losses=[2.0 * (1 + noise / 50)], norms=[3.0], gradients=[gradients])


def failing(other: RunOutcome, plain: RunOutcome | None = None) -> set[tuple[str, str]]:
    checks = compare_noisy(noisy(0, 0.0), plain or noisy(1), other, kinds=("loss", "norm", "gradient"))
    return {(check.kind, check.name) for check in checks if not check.passed}


@pytest.mark.parametrize("seed", range(2, 12))
def test_rounding_noise_passes(seed: int) -> None:
    assert failing(noisy(seed)) == set()


@pytest.mark.parametrize("factor", [1.02, 0.98])
def test_a_scale_error_smaller_than_the_noise_is_found(factor: float) -> None:
    assert {("scale", ALL), ("scale", "a"), ("scale", "b")} <= failing(noisy(2, 0.02, factor), noisy(1, 0.02))
    # An error in one tensor is reported for that tensor only.
    assert ("scale", "b") in failing(noisy(2, 0.01, factor, ("b",)))
    assert not {name for _, name in failing(noisy(2, 0.01, factor, ("b",)))} & {"a", "c"}


def test_more_noise_than_plain_half_precision_has_is_found() -> None:
    assert {("gradient", name) for name in "abc"} <= failing(noisy(2, 0.1))


def test_losses_and_norms_in_half_precision() -> None:
    other = noisy(2)
    other.losses, other.norms = [2.02], [3.06]
    assert failing(other) == {("loss", "step 1"), ("norm", "step 1")}
    other.losses, other.norms = [math.nan], [math.inf]
    assert failing(other) == {("loss", "step 1"), ("norm", "step 1")}


@pytest.mark.parametrize("broken", ["ours", "plain"])
@pytest.mark.parametrize("value", [None, torch.full((64,), math.nan), torch.ones(3)])
def test_missing_and_nonfinite_tensors_fail_in_half_precision(value: torch.Tensor | None, broken: str) -> None:
    ours, plain = noisy(2), noisy(1)
    gradients = (ours if broken == "ours" else plain).gradients[0]
    gradients.pop("b")
    if value is not None:
        gradients["b"] = value
    assert ("gradient", "b") in failing(ours, plain)


def test_surplus_tensors_fail_in_half_precision_too() -> None:
    other = noisy(2)
    other.gradients[0]["more"] = torch.ones(2)
    assert ("gradient", "more") in failing(other)


# --- what a plan is by default -----------------------------------------------------------------------------------


def test_by_default_micro_batches_cross_the_models_thresholds(tmp_path: Path) -> None:
    SmallModel("mistral", sliding_window=64, rope="dynamic").write(tmp_path)
    plan = complete(Plan(str(tmp_path), batch=4, accumulate=2), None)
    config = plan.model_config()
    assert config.sliding_window < config.max_position_embeddings < plan.longest == 31
    lengths = [[x["input_ids"].shape[1] for x in plan.micro_batches(step, 0, 50)] for step in range(2)]
    assert lengths[0][0] == 31
    assert lengths[1][1] < config.sliding_window
    assert plan.chunk_bytes(0, 50, 1) == 4 * 4 * 3 * 50
    assert plan.chunk_bytes(1, 50, 1) is None
    completed = complete(Plan(str(tmp_path), sequence_length=64), None)
    assert (completed.cases, completed.model_config().sliding_window) == (None, 64)


def test_positions_reach_the_end_of_the_table_and_stop_there(tmp_path: Path) -> None:
    SmallModel("gpt2", positions=40).write(tmp_path)
    plan = complete(Plan(str(tmp_path), accumulate=2), None)
    positions = [batch["position_ids"] for batch in plan.micro_batches(0, 0, 50) if "position_ids" in batch]
    assert [int(x.max()) for x in positions] == [39]
    with pytest.raises(CuboidError, match="sequence_length is 41, beyond the model's 40 positions"):
        complete(Plan(str(tmp_path), sequence_length=41), None)


def test_the_pad_token_is_in_the_padding_and_once_in_each_row(tmp_path: Path) -> None:
    small = SmallModel("llama", pad_token=7)
    small.write(tmp_path)
    case = Case("", 16, "rows")
    batch = Plan(str(tmp_path), batch=4, cases=(case,)).micro_batches(0, 0, 50, 7)[0]
    ids, mask = batch["input_ids"], batch["attention_mask"]
    assert (ids[mask == 0] == 7).all()
    assert ((ids == 7) & (mask == 1)).sum(1).tolist() == [1] * 4
    packed = Plan(str(tmp_path), batch=3, cases=(Case("", 12, packed=(6, 4, 2)),)).micro_batches(0, 0, 50, 7)[0]
    assert (packed["position_ids"][packed["input_ids"] == 7] > 0).all()
    assert tokens_of(AutoModelForCausalLM.from_config(small.config())) == (131, 7)


def test_scaled_rotary_embeddings_need_an_architecture_that_has_them() -> None:
    assert SmallModel("llama", rope="longrope").config().rope_parameters["rope_type"] == "longrope"
    with pytest.raises(CuboidError, match=r"rope goes with arch llama, .*, not with gpt2"):
        SmallModel("gpt2", rope="yarn").config()


def test_only_parts_of_the_residual_stream_are_put_together() -> None:
    shape = MeshShape(1, 2, 1)
    outputs = {
        "part": [torch.zeros(2, 3, 8), torch.zeros(2, 2, 8)],
        "filled up": [torch.zeros(2, 3, 8), torch.zeros(2, 3, 8)],
        # As inside of a block that is computed whole, of two segments.
        "whole": [torch.zeros(2, 6, 8), torch.zeros(2, 4, 8)],
        "heads": [torch.zeros(2, 6, 4), torch.zeros(2, 4, 4)],
    }
    assert list(residual_part(outputs, shape, batch=2, length=10, hidden=8)) == ["part", "filled up"]


def test_an_error_without_a_size_is_said_in_words():
    assert words_of_error("the loss", 0.25) == "the loss differs by 2.5e-01"
    assert words_of_error("the loss", relative_error(torch.ones(2), torch.ones(3))) == (
        "the loss isn't finite, or of another shape"
    )
