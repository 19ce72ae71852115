"""Stages that begin between a layer's attention and its MLP compute what plain transformers computes."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import nn
from transformers import AutoConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

import cuboid
from comparing import describe, mesh_section
from conftest import TIMEOUT_S
from cuboid import ConfigError, MeshShape, UnsupportedModelError
from cuboid.config.schema import PipelineConfig, parse_config
from cuboid.models.certification.default_models import default_model
from cuboid.models.certification.layer_halves import layer_halves
from cuboid.models.certification.layer_kinds import on_meta
from cuboid.models.stages.model_costs import sizes_of
from cuboid.models.stages.outline import Halves
from cuboid.models.stages.stage_cut import plan_stages
from cuboid.seq1f1b.schedule.actions import Action, Op
from cuboid.seq1f1b.schedule.partition import balance_by_flops, balance_halves, stage_flops
from cuboid.seq1f1b.schedule.unit_costs import LayerSizes, ModelSizes, kept_bytes, unit_flops
from cuboid.verify import Plan, SmallModel, WorkerPool, verify

ALONE = "1x1x1"
HALVES = [1.5, 1.5]
ZERO_1 = {"zero_optimization": {"stage": 1}}


MIXTRAL = SmallModel("mixtral", layers=3, router_loss=0.5)
SPLIT = {"segments": 3, "schedule": "zero_bubble"}
KEPT = {"activation_checkpointing": {"mode": "attention"}}


def name_of(value: Any) -> str:
    return f"{value.architecture}{'-tied' if value.tied else ''}" if isinstance(value, SmallModel) else str(value)


@pytest.mark.sample(0, ci=3)
@pytest.mark.parametrize(
    ("small", "balance", "mesh", "keys", "name", "options"),
    [
        (SmallModel("llama", tied=True), HALVES, "1x2x2", {"segments": 2}, "core", {}),
        (SmallModel("gemma2"), [1.5, 2.5, 1], ALONE, {"segments": 3}, "core", {"checkpointing": True}),
        (MIXTRAL, HALVES, ALONE, SPLIT, "core", {}),
        (SmallModel("qwen3"), HALVES, "2x1x1", {"segments": 1}, "core", {}),
        (SmallModel("gpt2"), [1.5, 1.5, 2], ALONE, {**SPLIT, "memory_limit": 1.0}, "core", {}),
        (SmallModel("llama"), [1, 1.5, 1.5], "1x1x2", {**SPLIT, "head": "spread"}, "core", {}),
        (SmallModel("qwen3"), [1.5] * 4, ALONE, {"chunks": 2, "schedule": "zero_bubble-v"}, "core", {}),
        (SmallModel("llama"), [1.5, 1, 1, 1.5], ALONE, {"chunks": 2, "schedule": "seq1f1b-interleaved"}, "core", {}),
        (MIXTRAL, HALVES, "1x2x1", {"segments": 2}, "core", {"checkpointing": True}),
        (SmallModel("gemma3"), HALVES, "1x2x1", {"segments": 3}, "core", {"settings": KEPT}),
        (SmallModel("llama"), HALVES, ALONE, {"segments": 3}, "engine", {"settings": ZERO_1, "data_parallel": 2}),
        (SmallModel("llama"), HALVES, "2x1x2", SPLIT, "engine", {"settings": {**ZERO_1, **KEPT}}),
        (SmallModel("mistral", sliding_window=8), HALVES, "2x2x1", SPLIT, "core", {"gradient_sync": "step"}),
    ],
    ids=name_of,
)
def test_a_stage_that_begins_inside_a_layer(
    pool: WorkerPool,
    checkpoint: Callable[[SmallModel], str],
    small: SmallModel,
    balance: list[float],
    mesh: str,
    keys: dict[str, Any],
    name: Literal["core", "engine"],
    options: dict[str, Any],
) -> None:
    shape, changes = MeshShape.parse(mesh), dict(options)
    small = dataclasses.replace(small, layers=int(sum(balance)))
    settings, sync = changes.pop("settings", {}), changes.pop("gradient_sync", "unit")
    plan = dataclasses.replace(Plan(checkpoint(small), batch=2 * shape.batch, accumulate=2), **changes)
    stages = len(balance) // keys.get("chunks", 1)
    pipeline = {"engine": "seq1f1b", "stages": stages, "segments": 2, "stage_balance": balance, **keys}
    config = {**settings, "tensor_parallel": {**mesh_section(mesh), "gradient_sync": sync}, "pipeline": pipeline}
    report = verify(plan, config, passes=(name,), pool=pool, timeout_s=TIMEOUT_S).passes[0]
    assert report.passed, describe(report)
    assert report.tolerance == (1e-9 if name == "core" else 1e-5)
    if name == "core":
        # The layer that two stages share is compared too, as the second one's output.
        prefix = "transformer.h" if small.architecture == "gpt2" else "model.layers"
        names = {check.name for check in report.checks if check.kind == "activation"}
        assert {f"{prefix}.{layer}" for layer in range(small.layers)} <= names


# --- which layers can be cut ----------------------------------------------------------------------------------------


def halves_of(model_type: str, **changes: Any) -> tuple[Halves | str, ...]:
    cls, config = default_model(model_type)
    for key, value in changes.items():
        setattr(config, key, value)
    return layer_halves(cls, config, config.num_hidden_layers)


@pytest.mark.sample(2, ci=2)
@pytest.mark.parametrize(
    ("model_type", "second"),
    [
        ("llama", {"post_attention_layernorm", "mlp"}),
        ("gpt2", {"ln_2", "mlp"}),
        # A norm around each branch, also without one in front.
        ("gemma2", {"pre_feedforward_layernorm", "mlp", "post_feedforward_layernorm"}),
        ("olmo2", {"mlp", "post_feedforward_layernorm"}),
        # A projection by itself, and mixtures.
        ("opt", {"final_layer_norm", "fc1", "fc2"}),
        ("mixtral", {"post_attention_layernorm", "mlp"}),
        ("deepseek_v3", {"post_attention_layernorm", "mlp"}),
        # Linear attention, as long as the MLP sees each token by itself.
        ("qwen3_next", {"post_attention_layernorm", "mlp"}),
    ],
)
def test_layers_that_add_attention_and_mlp_one_by_one_have_halves(model_type: str, second: set[str]) -> None:
    for halves in halves_of(model_type):
        assert isinstance(halves, Halves)
        assert set(halves.second) == second
        assert "input_layernorm" not in halves.second


@pytest.mark.sample(1, ci=3)
@pytest.mark.parametrize(
    "model_type",
    # Parallel branches; norms after the sum; a residual that is scaled; a module that adds the residual itself.
    ["gptj", "gpt_neox", "cohere", "phi", "falcon", "bert", "minimax", "bloom", "mpt"],
)
def test_other_layers_have_none(model_type: str) -> None:
    assert all("isn't a residual sum of attention" in half for half in halves_of(model_type) if isinstance(half, str))
    assert not any(isinstance(half, Halves) for half in halves_of(model_type))


class ScaledLayer(modeling_llama.LlamaDecoderLayer):
    """Scales its output, as some models do by a buffer that is 1 until weights are loaded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(*args, **kwargs) * self.scale


class SumLayer(modeling_llama.LlamaDecoderLayer):
    """Its MLP's branch looks at what the layer was given, too."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return super().forward(hidden_states, **kwargs) + 0.01 * nn.functional.silu(hidden_states)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [(ScaledLayer, "has tensors of its own, such as scale"), (SumLayer, "isn't a residual sum of attention")],
)
def test_a_layer_of_changed_code_is_tried_as_it_is(
    monkeypatch: pytest.MonkeyPatch, layer: type[nn.Module], reason: str
) -> None:
    monkeypatch.setattr(modeling_llama, "LlamaDecoderLayer", layer)
    config = AutoConfig.for_model("llama", num_hidden_layers=3, vocab_size=60 + len(reason))
    assert all(reason in half for half in layer_halves(LlamaForCausalLM, config, 3) if isinstance(half, str))
    assert not any(isinstance(half, Halves) for half in layer_halves(LlamaForCausalLM, config, 3))


# --- costs and balance ----------------------------------------------------------------------------------------------


def llama_3_8b() -> ModelSizes:
    config = AutoConfig.for_model(
        "llama", hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
        num_hidden_layers=32, vocab_size=128256,
    )  # fmt: skip
    return sizes_of(on_meta(LlamaForCausalLM, config), layer_halves(LlamaForCausalLM, config, 32))


def test_halves_add_up_to_their_layers() -> None:
    sizes = llama_3_8b()
    attention, mlp = sizes.layers[0].halves
    assert (attention.weights, mlp.weights) == (4096 * (2 * 4096 + 2 * 1024), 3 * 4096 * 14336)
    assert (attention.query, mlp.query, mlp.value) == (4096, 0, 0)
    for op in (Op.FORWARD, Op.BACKWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT):
        actions = [Action(op, stage, 0, segment) for stage in (0, 1) for segment in (0, 1)]
        for cost in (unit_flops, kept_bytes):
            totals = [sum(map(cost(sizes, counts, (100, 60)), actions)) for counts in ((13, 19), (12.5, 19.5))]
            assert totals[0] == totals[1]


@pytest.mark.parametrize(("stages", "gain"), [(5, 1.07), (6, 1.08), (10, 1.14)])
def test_stages_of_halves_are_more_even(stages: int, gain: float) -> None:
    """With the head spread; at 32,768 tokens attention and MLP cost the same."""
    sizes, placement = llama_3_8b(), range(stages)
    uncut = balance_by_flops(sizes, stages, 32768, has_head=False)
    halves = balance_halves(sizes, placement, 32768, has_head=False)
    assert sum(halves) == 32
    assert max(stage_flops(sizes, uncut, 32768)) >= gain * max(stage_flops(sizes, halves, 32768))


def test_a_cut_that_gains_nothing_stays_between_layers() -> None:
    even = ModelSizes((LayerSizes(100, 0, 0, second_weights=50),) * 8, head=0)
    assert balance_halves(even, range(4), 10) == (2, 2, 2, 2)
    assert balance_halves(ModelSizes(even.layers[:7], 0), range(2), 10) == (3.5, 3.5)
    # No rank has both halves of a layer.
    assert all(isinstance(count, int) for count in balance_halves(ModelSizes(even.layers[:7], 0), (0, 0), 10))
    uncut = ModelSizes((LayerSizes(100, 0, 0),) * 7, head=0)
    assert balance_halves(uncut, range(2), 10) == balance_by_flops(uncut, 2, 10)


# --- refusals -------------------------------------------------------------------------------------------------------


def pipeline_of(**keys: Any) -> PipelineConfig:
    pipeline = parse_config({"pipeline": {"engine": "seq1f1b", **keys}}).pipeline
    assert pipeline is not None
    return pipeline


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"stages": 2, "stage_balance": [1.25, 1.75]}, r"multiple of 0\.5"),
        ({"stages": 2, "stage_balance": [0.5, 2.5]}, "greater than or equal to 1"),
        ({"stages": 2, "stage_balance": [1.5, 1]}, "with the sum 3, the model's number of layers"),
        (
            {"stages": 1, "chunks": 2, "schedule": "seq1f1b-interleaved", "stage_balance": [1.5, 1.5]},
            "begins inside layer 1, whose other half is in stage 0 on the same pipeline rank",
        ),
    ],
)
def test_a_list_that_cannot_be_is_rejected_by_name(keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        plan_stages(3, pytest.fail, pipeline_of(**keys), lambda: halves_of("llama"))


@pytest.mark.parametrize("balance", [[1.5, 1.5], "halves"])
def test_a_model_without_halves_is_refused_before_weights_are_read(
    checkpoint: Callable[[SmallModel], str], monkeypatch: pytest.MonkeyPatch, balance: Any
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("transformers.modeling_utils.load_state_dict", None)
    section = {"engine": "seq1f1b", "stages": 2, "segments": 1, "stage_balance": balance}
    with pytest.raises(UnsupportedModelError, match=r"can('t)? be cut: GPTNeoXLayer isn't a residual"):
        cuboid.from_pretrained(checkpoint(SmallModel("gpt_neox", layers=3)), {"pipeline": section})
