"""Split backwards compute what whole ones do: to the bit where sums have one order, nearly so elsewhere."""

import weakref
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute
from transformers.pytorch_utils import Conv1D

import cuboid
from conftest import TIMEOUT_S
from cuboid import ConfigError
from cuboid.config.compatibility import check_layout
from cuboid.config.schema import parse_config
from cuboid.models.pipeline.step_trace import StepTrace
from cuboid.models.pipeline.training_pipeline import Pipeline
from cuboid.models.stages.deferred_linear import defer_weight_gradients
from cuboid.seq1f1b.runtime.executor import Interpreter
from cuboid.seq1f1b.schedule.actions import Action
from cuboid.seq1f1b.schedule.schedules import PipelineShape
from cuboid.seq1f1b.schedule.simulator import Span, Timeline
from cuboid.tensor3d.sharding.weight_gradients import WeightGradientStore
from cuboid.verify import Architecture, PassReport, SmallModel, WorkerPool
from test_pipeline_parity import ALONE, Compare, compare
from traces import parse_action

SPLIT = {"stages": 2, "segments": 3, "schedule": "zero_bubble", "memory_limit": 2}


@pytest.fixture
def parity(pool: WorkerPool, checkpoint: Callable[[SmallModel], str]) -> Compare:
    """Verifies a small model under the generated schedule and asserts that it passed."""

    def run(
        small: SmallModel | Architecture = "llama", changes: dict[str, Any] | None = None, **options: Any
    ) -> PassReport:
        return compare(pool, checkpoint, {**SPLIT, **(changes or {})}, small, accumulate=3, **options)

    return run


# Layers by themselves


class Plain(nn.Module):
    """Linear layers of both kinds, with and without bias, one of them frozen and one called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, bias=False)
        self.second = Conv1D(10, 8)
        self.frozen = nn.Linear(10, 8).requires_grad_(False)
        self.twice = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(torch.tanh(self.second(self.first(x))))
        return self.norm(self.twice(torch.tanh(self.twice(hidden))))


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def two_models(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Module, WeightGradientStore]:
    torch.manual_seed(0)
    plain, split, store = Plain().to(dtype), Plain().to(dtype), WeightGradientStore()
    split.load_state_dict(plain.state_dict())
    defer_weight_gradients([split], store)
    return plain, split, store


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("leaf", [False, True], ids=["data", "hidden"])
def test_deferred_gradients_are_the_same_to_the_bit(dtype: torch.dtype, checkpointed: bool, leaf: bool) -> None:
    plain, split, store = two_models(dtype)
    inputs = [torch.randn(2, 5, 6, dtype=dtype) for _ in range(3)]
    expected_dx, dx = [], []
    for x in inputs:
        x = x.clone().requires_grad_(leaf)
        plain(x).pow(2).sum().backward()
        expected_dx.append(x.grad)
    for number, x in enumerate(inputs):
        x = x.clone().requires_grad_(leaf)
        with store.open():
            out = recompute(split, x, use_reentrant=False) if checkpointed else split(x)
        before = gradients(split)
        with store.filling(number):
            out.pow(2).sum().backward()
        # Everything but the weights of linear layers has its gradient by now, and these have nothing new.
        after = gradients(split)
        assert "norm.weight" in after
        assert all(
            torch.equal(before[name], after[name])
            for name in before
            if name.split(".")[0] in ("first", "twice") and "weight" in name
        )
        dx.append(x.grad)
    for number in range(len(inputs)):
        store.run([number])
    store.check_empty()
    expected, actual = gradients(plain), gradients(split)
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected if name != "twice.weight")
    # Autograd adds the two calls up before it accumulates them; here each is accumulated.
    tolerance = torch.finfo(dtype).eps * 100
    torch.testing.assert_close(actual["twice.weight"], expected["twice.weight"], rtol=tolerance, atol=tolerance)
    if leaf:
        assert all(torch.equal(*pair) for pair in zip(dx, expected_dx, strict=True))


def test_units_together_are_one_product_and_one_call_of_the_hooks() -> None:
    plain, split, store = two_models()
    inputs = torch.randn(3, 4, 6, dtype=torch.float64)
    seen: list[torch.Tensor] = []
    split.first.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for number, x in enumerate(inputs):
        with store.open():
            out = split(x)
        with store.filling(number):
            out.pow(2).sum().backward()
        plain(x).pow(2).sum().backward()
    # A hook that is called without a gradient would have counted.
    assert not seen
    store.run([2, 1, 0])
    assert len(seen) == 1
    torch.testing.assert_close(gradients(split), gradients(plain), rtol=1e-13, atol=1e-13)


def test_only_the_linear_layers_inputs_are_kept_for_later() -> None:
    _, split, store = two_models()
    kept = []
    for layer in (split.first, split.second):
        layer.register_forward_hook(lambda _, args, out: kept.append(weakref.ref(out.grad_fn)))
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    with store.open():
        loss = split(x * 2).sum()
    with store.filling(0):
        loss.backward()
    del loss
    # Nobody holds the graph through an input.
    assert [node() for node in kept] == [None, None]
    store.run([0])


def test_nothing_is_deferred_while_the_store_is_closed_or_nothing_is_trained() -> None:
    plain, split, store = two_models()
    x = torch.randn(4, 6, dtype=torch.float64)
    for model in (plain, split):
        model(x).sum().backward()
    assert all(torch.equal(*pair) for pair in zip(gradients(plain).values(), gradients(split).values(), strict=True))
    with store.open(), torch.no_grad():
        assert torch.equal(split(x), plain(x))
        assert not split(x).requires_grad
    assert type(split.first).__name__ == "Linear"
    assert isinstance(split.first, nn.Linear)


def test_autocast_is_that_of_the_plain_layers() -> None:
    plain, split, store = two_models(torch.float32)
    x = torch.randn(4, 6)
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(x)
        with store.open():
            actual = split(x)
    assert torch.equal(actual, expected)
    assert actual.dtype == expected.dtype
    expected.sum().backward()
    with store.filling(0):
        actual.sum().backward()
    store.run([0])
    assert gradients(split)["first.weight"].dtype == torch.float32
    assert torch.equal(gradients(split)["second.weight"], gradients(plain)["second.weight"])


# The interpreter


def test_weight_gradients_of_a_micro_batch_that_follow_one_another_are_one_call() -> None:
    calls: list[str] = []

    class Stage:
        def forward(self, micro_batch: int, segment: int, hidden: None) -> None:
            calls.append(f"F{micro_batch}.{segment}")

        def backward(self, micro_batch: int, segment: int, gradient: None) -> None:
            calls.append(f"B{micro_batch}.{segment}")

        def input_gradient(self, micro_batch: int, segment: int, gradient: None) -> None:
            calls.append(f"I{micro_batch}.{segment}")

        def weight_gradients(self, micro_batch: int, segments: list[int]) -> None:
            calls.append(f"W{micro_batch}.{segments}")

    noted: list[Action] = []

    class Observed:
        def __init__(self, action: Action) -> None:
            noted.append(action)

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    text = "F0.0.0 F0.0.1 I0.0.1 I0.0.0 W0.0.1 W0.0.0 F0.1.0 F0.1.1 I0.1.1 W0.1.1 B0.1.0"
    program = tuple(map(parse_action, text.split()))
    Interpreter({0: Stage()}, {}, Observed).run(program, PipelineShape(1, 2, 2))  # type: ignore[dict-item]
    assert " ".join(calls) == "F0.0 F0.1 I0.1 I0.0 W0.[1, 0] F1.0 F1.1 I1.1 W1.[1] B1.0"
    assert tuple(noted) == program


def test_the_time_of_one_product_is_shared_by_its_segments() -> None:
    ends = {"F0.0.0": 3, "F0.0.1": 5, "I0.0.1": 6, "I0.0.0": 7, "W0.0.1": 11, "W0.0.0": 11}
    spans = [
        Span(parse_action(text), start_s, end_s)
        for (text, end_s), start_s in zip(ends.items(), [0, *ends.values()], strict=False)
    ]
    trace = StepTrace(PipelineShape(1, 1, 2), (), Timeline((tuple(spans),), (0,)), writes=False)
    assert trace.segment_times_s(0, (30, 10)) == (3 + 1 + 3, 2 + 1 + 1)


# Whole pipelines beside one process, in float64


@pytest.mark.sample(1, ci=1)
@pytest.mark.parametrize(
    ("mesh", "small", "name"),
    [
        (ALONE, SmallModel("llama"), "core"),
        ("2x1x1", SmallModel("qwen2"), "core"),
        ("1x2x2", SmallModel("llama", tied=True), "engine"),
        ("2x1x1", SmallModel("gpt2"), "core"),
        (ALONE, SmallModel("mixtral"), "core"),
        (ALONE, SmallModel("gpt_neox"), "core"),
        ("2x1x2", SmallModel("qwen3"), "engine"),
        (ALONE, SmallModel("gpt2", tied=True), "engine"),
    ],
    ids=str,
)
def test_a_split_backward_has_the_gradients_of_one_process(
    parity: Compare, mesh: str, small: SmallModel, name: Literal["core", "engine"]
) -> None:
    report = parity(small, mesh=mesh, name=name)
    assert report.tolerance == (1e-9 if name == "core" else 1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", [ALONE, "2x1x1", "1x2x1"])
def test_activation_checkpointing(parity: Compare, mesh: str) -> None:
    parity("llama", mesh=mesh, checkpointing=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", [ALONE, "2x1x1", "1x2x1", "1x1x2"])
def test_kept_attention(parity: Compare, mesh: str) -> None:
    parity("llama", mesh=mesh, settings={"activation_checkpointing": {"mode": "attention"}})


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", [ALONE, "1x2x1"])
def test_kept_attention_on_the_host(parity: Compare, mesh: str) -> None:
    parity("llama", mesh=mesh, settings={"activation_checkpointing": {"mode": "attention", "cpu_checkpointing": True}})


@pytest.mark.sample(1)
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("mesh", [ALONE, "2x1x1"])
def test_zero_and_clipping(parity: Compare, stage: int, mesh: str) -> None:
    settings = {"zero_optimization": {"stage": stage}, "gradient_clipping": 0.25}
    parity("llama", mesh=mesh, name="engine", settings=settings)


@pytest.mark.sample(0, ci=1)
@pytest.mark.parametrize("weight_gather", ["step", "layer"])
def test_gathered_weights_and_four_stages(parity: Compare, weight_gather: Literal["layer", "step"]) -> None:
    changes = {"stages": 2, "segments": 2, "memory_limit": 1}
    parity(SmallModel("llama", layers=4), changes, mesh="2x1x1", weight_gather=weight_gather)


@pytest.mark.sample(0, ci=1)
@pytest.mark.parametrize("changes", [{"memory_limit": 1}, {"stages": 1}], ids=str)
def test_gradients_that_are_reduced_once_a_step(parity: Compare, changes: dict[str, Any]) -> None:
    parity(SmallModel("gpt2", layers=4), changes, mesh="2x1x1", gradient_sync="step", weight_gather="step")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [ALONE, "2x1x1"])
def test_bfloat16(parity: Compare, mesh: str) -> None:
    settings = {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.25}
    parity("llama", mesh=mesh, name="engine", settings=settings, dtype="bfloat16")


@pytest.mark.slow
def test_auto_and_four_stages(parity: Compare) -> None:
    parity(SmallModel("llama", layers=4), {"stages": 4, "segments": 2, "schedule": "auto", "memory_limit": 1.5})


# Beside the other schedules


def trained_gradients(path: str, config: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one step of this rank's stage, and of three micro-batches."""
    pipeline = Pipeline(cuboid.from_pretrained(path, config, dtype=torch.float32))
    torch.manual_seed(0)
    ids = torch.randint(2, 100, (3, 2, 24))
    loss = pipeline.train(iter({"input_ids": rows, "labels": rows} for rows in ids), 3)
    return float(loss), {name: p.grad for name, p in pipeline._model.named_parameters()}


@pytest.mark.sample(1)
@pytest.mark.parametrize("small", [SmallModel("llama", layers=4), SmallModel("gpt2", layers=4, tied=True)], ids=str)
def test_schedules_that_add_up_in_the_same_order_have_the_same_bits(
    pool: WorkerPool, checkpoint: Callable[[SmallModel], str], small: SmallModel
) -> None:
    path = checkpoint(small)

    def train(schedule: str, **keys: Any) -> list[Any]:
        pipeline = {"engine": "seq1f1b", "stages": 2, "segments": 1, "schedule": schedule, **keys}
        settings = {"train_micro_batch_size_per_gpu": 2, "pipeline": pipeline}
        return pool.run(2, trained_gradients, path, settings, timeout_s=TIMEOUT_S)

    for (loss, expected), (split_loss, actual) in zip(train("1f1b"), train("zero_bubble", memory_limit=2), strict=True):
        assert loss == split_loss
        assert expected.keys() == actual.keys()
        assert all(torch.equal(expected[name], actual[name]) for name in expected)


# The config


def config(**keys: Any) -> dict[str, Any]:
    return {"pipeline": {"engine": "seq1f1b", "stages": 2, **keys}}


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"memory_limit": 2}, '"memory_limit" is for the schedules "zero_bubble", .*; "seq1f1b" keeps'),
        ({"schedule": "zero_bubble", "memory_limit": 0.5}, r"pipeline\.memory_limit: .*greater than or equal to 1"),
        ({"schedule": "zero_bubble", "memory_limit": float("inf")}, r"pipeline\.memory_limit"),
        ({"schedule": "zero_bubbles"}, "known: gpipe, 1f1b, seq1f1b, zero_bubble, .*auto"),
    ],
)
def test_what_cannot_be_run_is_rejected_by_name(keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_layout(parse_config(config(**keys)), {}, 2)
