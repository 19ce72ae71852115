"""Which types of models have one graph for each kind of layer: their modules' forms, dropout, and adapters."""

import re

import pytest
import torch
import transformers
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from transformers import AutoModelForCausalLM

import cuboid
from cuboid.distributed.topology import MeshShape
from cuboid.models.certification.float64 import KeepFloat64
from cuboid.tensor3d.compiled import layers as compiled_layers
from cuboid.verify import SmallModel

ROWS, LENGTH = 4, 16
#: Inductor may take minutes for the first graph on a machine.
TIMEOUT_S = 600
LAYERS_AGAIN = {"activation_checkpointing": {"mode": "layers"}}
ATTENTION_ONCE = {"activation_checkpointing": {"mode": "attention"}}
#: By type, the most graphs of a pass over the layers: a kind of layer may have one of its own.
TYPES = {
    # Dense.
    **dict.fromkeys(("apertus", "arcee", "cohere", "cohere2", "cwm", "ernie4_5", "exaone4", "fuyu", "gemma"), 2),
    **dict.fromkeys(("gemma2", "gemma3", "glm", "glm4", "gpt2", "gpt_neox", "gptj", "granite", "helium"), 2),
    **dict.fromkeys(("hunyuan_v1_dense", "hyperclovax", "internlm3", "iquestcoder", "jais2", "llama"), 1),
    **dict.fromkeys(("mistral", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "persimmon", "phi"), 2),
    **dict.fromkeys(("qwen2", "qwen3", "stablelm", "starcoder2"), 1),
    # Attention that all ranks compute, recurrent layers, cross-attention without another sequence.
    **dict.fromkeys(("bamba", "biogpt", "bloom", "codegen", "diffllama", "falcon", "gpt_bigcode", "gpt_neo"), 2),
    **dict.fromkeys(("jamba", "lfm2", "modernbert-decoder", "mpt", "opt", "phi3"), 3),
    # Experts and latents.
    **dict.fromkeys(("aria_text", "deepseek_v2", "deepseek_v3", "gpt_oss", "granitemoe", "llama4_text"), 2),
    **dict.fromkeys(("mixtral", "olmoe", "qwen3_moe"), 1),
    **dict.fromkeys(("afmoe", "lfm2_moe"), 4),
}
#: Recurrent states, and attention in a layer's own code, have no form in a graph with segments.
NO_SEGMENTS = (
    *("bamba", "jamba", "lfm2", "lfm2_moe"),
    *("bloom", "codegen", "falcon", "gpt_neo", "gptj", "llama4_text", "mpt"),
)


@pytest.fixture(scope="module")
def path(checkpoint):
    return lambda architecture: checkpoint(SmallModel.fitting(architecture, 8, layers=2))


def tokens(shift=0):
    return (torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) * 7 + shift) % 61


def sharded(path, axes, *, compiles, inductor=False, sections=None, pipeline=None, **options):
    torch._dynamo.reset()
    counters.clear()
    if not inductor:
        # As Inductor, with its partition into forward and backward, but what is in them runs uncompiled.
        compiled_layers.compile_graph = lambda graph, _, **__: make_boxed_func(graph.forward)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
    mesh = dict(zip(("batch", "sequence", "hidden"), axes, strict=True))
    config = {"tensor_parallel": {"mode": "3d_tensor", "mesh": mesh, "compile": compiles}, **(sections or {})}
    if pipeline:
        config["pipeline"] = {"engine": "seq1f1b", **pipeline}
    return cuboid.shard(plain, config).train()


def step(model, pipeline=None):
    model.zero_grad()
    if pipeline:
        batches = [{"input_ids": tokens(shift), "labels": tokens(shift)} for shift in (0, 3)]
        return float(cuboid.Pipeline(model).train(iter(batches), 2))
    loss = model(input_ids=tokens(), labels=tokens(), use_cache=False).loss
    loss.backward()
    return float(loss.detach())


def errors_of(gradients, others):
    """Of each tensor's gradient, the largest difference, in units of its largest element if that is above one."""
    assert gradients.keys() == others.keys()
    pairs = ((gradients[name], others[name]) for name in others)
    errors = (float((mine - other).abs().max() / max(1, other.abs().max())) for mine, other in pairs)
    # The first rank has all gradients.
    return max(errors, default=0.0)


def train(path, axes, pipeline, inductor, steps):
    """Graphs after each step, breaks, and the difference from uncompiled layers' loss and gradients."""
    # Dropout has a test of its own.
    options = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0} if "gpt2" in path else {}
    uncompiled = sharded(path, axes, compiles=False, pipeline=pipeline, **options)
    loss, gradients = step(uncompiled, pipeline), cuboid.full_gradients(uncompiled)
    model, after_step = sharded(path, axes, compiles=True, inductor=inductor, pipeline=pipeline, **options), []
    for _ in range(steps):
        compiled_loss = step(model, pipeline)
        after_step.append(model.cuboid.state.compiled.graphs)
    assert model.cuboid.state.compiled.reason is None, model.cuboid.state.compiled.reason
    compiled_gradients = cuboid.full_gradients(model)
    return (
        after_step,
        sum(counters["graph_break"].values()),
        compiled_loss - loss,
        errors_of(compiled_gradients, gradients),
    )


@pytest.mark.ci
@pytest.mark.parametrize(
    ("architecture", "axes", "pipeline", "inductor", "steps"),
    [
        # Attention that all ranks compute.
        ("bloom", (2, 1, 1), None, False, 3),
        # Latents, routers, experts and a layer without them.
        pytest.param(
            *("deepseek_v3", (1, 2, 1), None, False, 3),
            # transformers' experts of before have values in their code that a graph can't have.
            marks=pytest.mark.skipif(Version(transformers.__version__) < Version("5.18"), reason="transformers 5.18"),
        ),
        *(
            pytest.param(architecture, axes, pipeline, False, 10, marks=pytest.mark.slow)
            for architecture in TYPES
            for axes, pipeline in [
                ((1, 1, 1), None),
                ((1, 2, 1), None),
                ((2, 1, 1), None),
                ((2, 2, 2), None),
            ]
        ),
        *(
            pytest.param(architecture, (1, 1, 1), {"stages": 2, "segments": 4}, False, 10, marks=pytest.mark.slow)
            for architecture in TYPES
            if architecture not in NO_SEGMENTS
        ),
        *(
            pytest.param(architecture, axes, None, True, 10, marks=pytest.mark.slow)
            for architecture in ("mixtral", "deepseek_v3", "gpt_oss", "bloom", "phi3")
            for axes in [(1, 2, 1), (2, 2, 2)]
        ),
    ],
    ids=str,
)
def test_a_kind_of_layer_is_one_graph(pool, path, architecture, axes, pipeline, inductor, steps):
    size = MeshShape(*axes).size * (pipeline or {}).get("stages", 1)
    arguments = path(architecture), axes, pipeline, inductor, steps
    for after_step, breaks, loss_error, error in pool.run(size, train, *arguments, timeout_s=TIMEOUT_S):
        assert after_step == after_step[:1] * steps
        assert 0 < after_step[0] <= TYPES[architecture]
        assert breaks == 0
        assert abs(loss_error) < 1e-5
        # Of granite, whose multipliers are large, plain transformers' gradients in float32 are 8e-5 from those in
        # float64, uncompiled layers' 6e-5 and compiled layers' 4e-5.
        assert error < (3e-5 if architecture == "granite" else 5e-6)


def gradients_beside_float64(path, axes):
    """How far gradients are from float64's in plain transformers, eager and with compiled layers, and on a mesh."""
    with KeepFloat64():
        plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).train()
        step(plain)
        exact = gradients_of(plain)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    step(plain)
    eager = gradients_of(plain)
    for layer in plain.model.layers:
        layer.compile(fullgraph=True)
    step(plain)
    model = sharded(path, axes, compiles=True, inductor=True)
    step(model)
    assert model.cuboid.state.compiled.reason is None
    # Only the first rank is given those of the mesh.
    mesh = cuboid.full_gradients(model)
    return [errors_of(gradients, exact) for gradients in (eager, gradients_of(plain), mesh) if gradients]


def gradients_of(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("axes", [(1, 1, 1), (1, 2, 1)], ids=str)
def test_granites_gradients_are_as_near_to_float64_as_plain_ones(pool, path, axes):
    arguments = path("granite"), axes
    eager, compiled, mesh = pool.run(MeshShape(*axes).size, gradients_beside_float64, *arguments, timeout_s=TIMEOUT_S)[
        0
    ]
    # 7.9e-5 and 7.5e-5 in plain transformers.
    assert eager > 1e-5
    assert compiled > 1e-5
    assert mesh < 1.2 * eager


# --- dropout --------------------------------------------------------------------------------------------------------


def dropped(path, axes, inductor, sections, options):
    """Losses and the last gradients of steps of uncompiled and of compiled layers, and the generators' last states."""
    runs = []
    for compiles in (False, True):
        model = sharded(path, axes, compiles=compiles, inductor=inductor, sections=sections, **options)
        torch.manual_seed(1)
        losses = [step(model) for _ in range(3)]
        runs.append((losses, cuboid.full_gradients(model), torch.get_rng_state()))
    assert model.cuboid.state.compiled.reason is None
    assert model.cuboid.state.compiled.graphs == 1
    return runs


@pytest.mark.ci
@pytest.mark.parametrize(
    ("architecture", "options", "axes", "inductor", "sections"),
    [
        # In its code, its modules and its attention.
        ("gpt2", {}, (1, 2, 1), False, LAYERS_AGAIN),
        pytest.param("gpt2", {"attn_implementation": "eager"}, (2, 2, 2), False, {}, marks=pytest.mark.slow),
        # In blocks that all ranks of sequence × hidden compute, which must draw the same.
        ("opt", {"dropout": 0.2, "attention_dropout": 0.2}, (1, 2, 1), False, {}),
        pytest.param("opt", {"dropout": 0.2}, (2, 2, 2), False, {}, marks=pytest.mark.slow),
        pytest.param("gpt_neo", {"resid_dropout": 0.2}, (1, 2, 1), False, {}, marks=pytest.mark.slow),
        pytest.param("bloom", {"hidden_dropout": 0.2}, (1, 2, 1), False, {}, marks=pytest.mark.slow),
        pytest.param("falcon", {"hidden_dropout": 0.2}, (1, 2, 1), False, {}, marks=pytest.mark.slow),
        pytest.param("llama", {"attention_dropout": 0.2}, (2, 1, 1), True, {}, marks=pytest.mark.slow),
        pytest.param("gpt2", {}, (1, 2, 1), True, {}, marks=pytest.mark.slow),
        pytest.param("gpt2", {}, (1, 2, 1), False, {}, marks=pytest.mark.slow),
        *(
            pytest.param("gpt2", {}, (1, 2, 1), True, sections, marks=pytest.mark.slow)
            for sections in (LAYERS_AGAIN, ATTENTION_ONCE)
        ),
        pytest.param("gpt2", {"attn_implementation": "eager"}, (2, 2, 2), False, LAYERS_AGAIN, marks=pytest.mark.slow),
        pytest.param("opt", {"dropout": 0.2}, (1, 2, 1), False, LAYERS_AGAIN, marks=pytest.mark.slow),
        pytest.param("llama", {"attention_dropout": 0.2}, (2, 1, 1), True, LAYERS_AGAIN, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_graphs_drop_what_uncompiled_layers_drop(pool, path, architecture, options, axes, inductor, sections):
    arguments = path(architecture), axes, inductor, sections, options
    ranks = pool.run(MeshShape(*axes).size, dropped, *arguments, timeout_s=TIMEOUT_S)
    for (losses, gradients, state), (compiled_losses, compiled_gradients, compiled_state) in ranks:
        assert compiled_losses == pytest.approx(losses, rel=1e-6)
        assert len(set(losses)) == len(losses)
        if gradients:
            assert errors_of(compiled_gradients, gradients) < 5e-6
        # What is drawn next is the same, too.
        assert torch.equal(state, compiled_state)


def slope(path, axes, options):
    """The loss, a rank's part of the gradients' squared norm, and how fast the loss rises along them, with one mask."""
    model = sharded(path, axes, compiles=True, **options).double()

    def loss(distance):
        with torch.no_grad():
            for parameter, gradient in gradients.items():
                parameter += distance * gradient
        torch.manual_seed(1)
        return step(model)

    # Of layers alone: a tied embedding's row of padding takes no gradient as an embedding.
    moved = [parameter for name, parameter in model.named_parameters() if re.search(r"\.\d+\.", name)]
    gradients = dict.fromkeys(moved, 0)
    before = loss(0)
    gradients = {parameter: parameter.grad.clone() for parameter in moved}
    squared_norm = sum(float((gradient**2).sum()) for gradient in gradients.values())
    distance = 1e-6
    rise = loss(distance) - loss(-2 * distance)
    assert model.cuboid.state.compiled.reason is None
    return before, squared_norm, rise / (2 * distance)


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("gpt_bigcode", {"attn_pdrop": 0.2, "resid_pdrop": 0.2}),
        ("biogpt", {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}),
        ("modernbert-decoder", {"attention_dropout": 0.2, "mlp_dropout": 0.2}),
        ("phi3", {"resid_pdrop": 0.2, "attention_dropout": 0.2}),
    ],
)
@pytest.mark.parametrize("axes", [(1, 2, 1), (1, 1, 2)], ids=str)
@pytest.mark.slow
def test_modules_of_whole_blocks_drop_the_same_on_all_ranks(pool, path, architecture, options, axes):
    # Their masks aren't those of uncompiled layers. Were they others on another rank, gradients would be no derivative.
    ranks = pool.run(2, slope, path(architecture), axes, options, timeout_s=TIMEOUT_S)
    losses, squared_norms, rises = zip(*ranks, strict=True)
    assert losses[0] == losses[1]
    # Rotary angles are rounded to 32 bits.
    assert rises[0] == pytest.approx(sum(squared_norms), rel=1e-4)


# --- adapters -------------------------------------------------------------------------------------------------------


def adapted(path, axes, options, inductor):
    """Graphs after each step of a compiled model with an adapter, and its loss's and gradients' differences."""
    runs = []
    for compiles in (False, True):
        model = sharded(path, axes, compiles=compiles, inductor=inductor)
        torch.manual_seed(1)
        names = ["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"]
        config = LoraConfig(**{"r": 4, "target_modules": names, "init_lora_weights": False, **options})
        adapted_model, after_step = get_peft_model(model, config), []
        for _ in range(3):
            loss = step(adapted_model)
            after_step.append(compiles and model.cuboid.state.compiled.graphs)
        gradients = {name: p.grad for name, p in adapted_model.named_parameters() if p.grad is not None}
        runs.append((loss, gradients))
        assert any("magnitude" in name for name in gradients) == ("use_dora" in options)
        if compiles:
            assert model.cuboid.state.compiled.reason is None
            # Without the adapter, the layers' graphs are others.
            adapted_model.unload()
            with torch.no_grad():
                model(input_ids=tokens(), use_cache=False)
            assert model.cuboid.state.compiled.reason is None
    (loss, gradients), (compiled_loss, compiled_gradients) = runs
    return after_step, compiled_loss - loss, errors_of(compiled_gradients, gradients)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("architecture", "axes", "options", "inductor"),
    [
        # DoRA's layers have LoRA's factors and a magnitude.
        ("qwen2", (1, 2, 1), {"use_dora": True}, False),
        pytest.param("llama", (1, 2, 1), {}, False, marks=pytest.mark.slow),
        *(
            pytest.param("llama", axes, {"lora_dropout": 0.1}, False, marks=pytest.mark.slow)
            for axes in [(1, 1, 2), (2, 1, 1), (2, 2, 2)]
        ),
        *(
            pytest.param("qwen2", axes, {"use_dora": True}, inductor, marks=pytest.mark.slow)
            for axes, inductor in [((1, 1, 1), True), ((2, 1, 1), True), ((1, 1, 2), False), ((2, 2, 2), False)]
        ),
        # Factors in blocks that each rank computes whole.
        *(
            pytest.param("phi3", axes, {"target_modules": "all-linear"}, inductor, marks=pytest.mark.slow)
            for axes, inductor in [((1, 2, 1), True), ((2, 2, 2), False)]
        ),
    ],
    ids=str,
)
def test_layers_with_adapters_are_compiled(pool, path, architecture, axes, options, inductor):
    arguments = path(architecture), axes, options, inductor
    for after_step, loss_error, error in pool.run(MeshShape(*axes).size, adapted, *arguments, timeout_s=TIMEOUT_S):
        # The input of the first layer needs no gradient, the others' do.
        assert after_step == [2] * 3
        assert abs(loss_error) < 1e-6
        assert error < 2e-6
