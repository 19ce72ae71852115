"""Compiled layers: how many graphs there are after many steps, and what they compute."""

import copy
import warnings
from types import MappingProxyType

import pytest
import torch
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

import cuboid
from cuboid.distributed.topology import MeshShape
from cuboid.errors import UnsupportedModelError
from cuboid.seq1f1b.runtime.memory import LiveActivations
from cuboid.tensor3d.compiled import layers as compiled_layers
from cuboid.verify import SmallModel

BATCH, LENGTH, STEPS = 4, 8, 10
#: Inductor may take minutes for the first graph on a machine.
TIMEOUT_S = 600


@pytest.fixture(scope="module")
def path(checkpoint):
    return checkpoint(SmallModel("llama", heads=8, kv_heads=4, layers=2))


def tokens(shift=0, length=LENGTH):
    return (torch.arange(BATCH * length).view(BATCH, length) * 7 + shift) % 131


def plain_gradients(path):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    loss = model(input_ids=tokens(), labels=tokens()).loss
    loss.backward()
    return float(loss.detach()), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_as_plain(path, loss, gradients):
    expected_loss, expected = plain_gradients(path)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).abs().max() <= 1e-6 * max(1, gradient.abs().max()), name


class Graphs:
    """A backend that counts what it is given, and hands it on to Inductor or runs it as it is."""

    def __init__(self, compiler):
        self.compiler, self.count = compiler, 0

    def __call__(self, graph, inputs):
        self.count += 1
        return compile_fx(graph, inputs) if self.compiler == "inductor" else graph


def train_with_compiled_code(path, axes, compiler):
    """Graphs after each of ten steps of ``layer.compile()``, and the loss and gradients of the last."""
    torch._dynamo.reset()
    section = {"mode": "3d_tensor", "mesh": dict(zip(("batch", "sequence", "hidden"), axes, strict=True))}
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = cuboid.shard(plain, {"tensor_parallel": section}).train()
    graphs, after_step = Graphs(compiler), []
    for layer in model.model.layers:
        layer.compile(backend=graphs)
    for _ in range(STEPS):
        model.zero_grad()
        loss = model(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        after_step.append(graphs.count)
    return after_step, float(loss.detach()), cuboid.full_gradients(model)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("axes", "compiler"),
    [
        # What one rank compiles, it compiles on two as well.
        pytest.param((1, 1, 1), "none", marks=pytest.mark.slow),
        ((1, 2, 1), "none"),
        pytest.param((2, 1, 1), "none", marks=pytest.mark.slow),
        pytest.param((2, 2, 2), "none", marks=pytest.mark.slow),
        pytest.param((1, 1, 1), "inductor", marks=pytest.mark.slow),
        pytest.param((1, 2, 1), "inductor", marks=pytest.mark.slow),
        pytest.param((2, 1, 1), "inductor", marks=pytest.mark.slow),
        pytest.param((2, 2, 2), "inductor", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_layers_that_a_script_compiles_have_the_graphs_of_the_first_step(pool, path, axes, compiler):
    ranks = pool.run(MeshShape(*axes).size, train_with_compiled_code, path, axes, compiler, timeout_s=TIMEOUT_S)
    for after_step, _, _ in ranks:
        assert after_step[0] > 0
        assert after_step == after_step[:1] * STEPS
    _, loss, gradients = ranks[0]
    assert_as_plain(path, loss, gradients)


# --- each kind of layer as one graph -------------------------------------------------------------------------------

#: As Inductor, with its partition into forward and backward, but what is in them runs uncompiled.
PARTITION_ONLY = "partition only"
LAYERS_AGAIN = {"activation_checkpointing": {"mode": "layers"}}
ATTENTION_ONCE = {"activation_checkpointing": {"mode": "attention"}}
KEPT = {"tensor_parallel": {"weight_gather": "step"}}


def compiled(path, axes, compiler=PARTITION_ONLY, sections=MappingProxyType({}), frozen=()):
    """A model with compiled layers, in training."""
    torch._dynamo.reset()
    counters.clear()
    if compiler == PARTITION_ONLY:
        compiled_layers.compile_graph = lambda graph, _, **__: make_boxed_func(graph.forward)
    # Scalar code: which vectors a C++ compiler has is asked by six compilations, and they make the kernels' longer.
    inductor_config.cpp.vec_isa_ok = False
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    section = {"mode": "3d_tensor", "mesh": dict(zip(("batch", "sequence", "hidden"), axes, strict=True))}
    section = {"compile": True, **section, **sections.get("tensor_parallel", {})}
    return cuboid.shard(plain, {**sections, "tensor_parallel": section}).train()


def step(model, ids):
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return float(loss.detach())


def train_compiled(path, axes, compiler, sections):
    """Graphs after each of ten steps, breaks, and the loss and gradients of the last step."""
    model, after_step = compiled(path, axes, compiler, sections), []
    for _ in range(STEPS):
        loss = step(model, tokens())
        after_step.append(model.cuboid.state.compiled.graphs)
    assert model.cuboid.state.compiled.reason is None
    return after_step, sum(counters["graph_break"].values()), loss, cuboid.full_gradients(model)


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(
    ("axes", "compiler", "sections"),
    [
        ((1, 1, 2), PARTITION_ONLY, ATTENTION_ONCE),
        ((1, 2, 1), "inductor", {}),
        # Among the steps of other lengths, too, and in every combination with sections.
        pytest.param((2, 1, 1), PARTITION_ONLY, {}, marks=pytest.mark.slow),
        ((2, 1, 1), PARTITION_ONLY, KEPT),
        pytest.param((2, 1, 1), PARTITION_ONLY, LAYERS_AGAIN, marks=pytest.mark.slow),
        *(
            pytest.param(axes, "inductor", sections, marks=pytest.mark.slow)
            for axes in [(1, 1, 1), (2, 1, 1), (1, 1, 2), (2, 2, 2)]
            for sections in ({}, LAYERS_AGAIN, ATTENTION_ONCE)
        ),
    ],
    ids=str,
)
def test_a_kind_of_layer_is_one_graph_and_gives_the_gradients_of_plain_transformers(
    pool, path, axes, compiler, sections
):
    ranks = pool.run(MeshShape(*axes).size, train_compiled, path, axes, compiler, sections, timeout_s=TIMEOUT_S)
    for after_step, breaks, _, _ in ranks:
        assert (after_step, breaks) == ([1] * STEPS, 0)
    assert_as_plain(path, *ranks[0][2:])


def saved_and_sent(path, axes):
    """Bytes that a step saves for backward and sends by axes, uncompiled and compiled."""
    measured = []
    for compiles in (False, True):
        model = compiled(path, axes, sections={"tensor_parallel": {"compile": compiles}})
        sent = cuboid.mesh_of(model).comm_counter
        step(model, tokens())
        sent.reset()
        with LiveActivations(model.parameters()) as live:
            loss = model(input_ids=tokens(), labels=tokens()).loss
            saved_bytes = live.live_bytes
            loss.backward()
        measured.append((saved_bytes, sent.snapshot()))
    return measured


@pytest.mark.sample(1)
@pytest.mark.parametrize("axes", [(1, 2, 1), (1, 1, 2), (2, 2, 2)], ids=str)
def test_compiled_layers_send_what_uncompiled_ones_do_and_save_no_more(pool, path, axes):
    ranks = pool.run(MeshShape(*axes).size, saved_and_sent, path, axes, timeout_s=TIMEOUT_S)
    for (saved_bytes, sent), (saved_by_graphs, sent_by_graphs) in ranks:
        assert sent_by_graphs == sent
        if axes[0] == 1:
            # Over `batch`, blocks are among what a graph saves; their storage is freed.
            assert saved_by_graphs <= saved_bytes


def other_steps(path, axes):
    """Graphs after steps of several lengths; the losses of an evaluation and of frozen weights; gradients' errors."""
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model, by_length = compiled(path, axes), []
    for length in (8, 12, 10, 7, 16, 9):
        step(model, tokens(length=length))
        by_length.append(model.cuboid.state.compiled.graphs)
    with torch.no_grad():
        losses = [float(evaluated.eval()(input_ids=tokens(), labels=tokens()).loss) for evaluated in (model, plain)]
    model.zero_grad()
    for trained in (model.train(), plain.train()):
        # The first graph's blocks are freed and filled again for the second one.
        sum(trained(input_ids=tokens(shift), labels=tokens(shift)).loss for shift in (0, 3)).backward()
    gradients = cuboid.full_gradients(model)
    errors = [
        float((gradients[name] - p.grad).abs().max()) for name, p in plain.named_parameters() if name in gradients
    ]
    frozen = compiled(path, axes, frozen=("layers.0", "embed_tokens", "self_attn"))
    losses.append(step(frozen, tokens()))
    assert all((p.grad is not None) == p.requires_grad for p in frozen.parameters())
    return by_length, losses, max(errors, default=0.0)


@pytest.mark.sample(0, ci=1)
@pytest.mark.parametrize("axes", [(2, 1, 1), (1, 2, 1)], ids=str)
def test_other_lengths_make_one_more_graph_and_several_forwards_share_blocks(pool, path, axes):
    for by_length, losses, error in pool.run(2, other_steps, path, axes, timeout_s=TIMEOUT_S):
        assert by_length == [1, 2, 2, 2, 2, 2]
        assert losses == pytest.approx(losses[1:2] * 3, rel=1e-6)
        assert error < 1e-6


# --- what stays uncompiled, and says so ---------------------------------------------------------------------------


def many_graphs(path):
    """The graphs of nine forwards, each of which has a constant of its own."""
    model = compiled(path, (1, 1, 1))
    for number in range(9):
        for layer in model.model.layers:
            layer.self_attn.scaling = 0.3 + number / 100
        with torch.no_grad():
            model.base_model(input_ids=tokens())
    return model.cuboid.state.compiled.graphs, model.cuboid.state.compiled.reason


@pytest.mark.slow
def test_a_model_may_have_more_graphs_than_torch_allows_a_function_by_itself(pool, path):
    assert torch._dynamo.config.recompile_limit == 8
    ((graphs, reason),) = pool.run(1, many_graphs, path, timeout_s=TIMEOUT_S)
    assert graphs > 8
    assert reason is None


def named(axes):
    """The warnings of models whose layers can't be one graph, and their losses in two steps."""
    sizes = {"vocab_size": 131, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    mixture = {"intermediate_size": 32, "num_key_value_heads": 2, "num_local_experts": 2}
    configs = {
        "jitter": AutoConfig.for_model("mixtral", **sizes, **mixture, router_jitter_noise=0.1),
        "tagger": AutoConfig.for_model("llama", **sizes, intermediate_size=64, num_labels=131, pad_token_id=0),
    }
    section = {"mode": "3d_tensor", "mesh": dict(zip(("batch", "sequence", "hidden"), axes, strict=True))}
    said = {}
    for name, config in configs.items():
        torch._dynamo.reset()
        torch.manual_seed(0)
        auto_class = AutoModelForTokenClassification if name == "tagger" else AutoModelForCausalLM
        model = auto_class.from_config(config, dtype=torch.float32)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = cuboid.shard(model, {"tensor_parallel": {**section, "compile": True}}).train()
            losses = [step(model, tokens()) for _ in range(2)]
        said[name] = [str(warning.message) for warning in caught if "compiling" in str(warning.message)], losses
    return said


def test_layers_that_are_no_graph_run_uncompiled_and_are_named_once(pool):
    for said in pool.run(2, named, (1, 2, 1), timeout_s=TIMEOUT_S):
        for (message,), losses in said.values():
            assert message.startswith("compiling was asked for, but the layers of")
            assert all(loss > 0 for loss in losses)
        assert "draws random numbers in training (uniform_), for which graphs have no seeds" in said["jitter"][0][0]
        assert said["tagger"][0][0].endswith("for causal language modelling, not for token classification")


def found_later(path, axes):
    """Losses and gradients of steps, in the first of which the second layer turns out to be no graph; then of others.

    The others are a copy, and a model with a hook inside of a layer, which must run.
    """
    model, called = compiled(path, axes), []
    twin = copy.deepcopy(model)
    attention = model.base_model.layers[1].self_attn
    attention.attention_dropout = 0.5
    step(model, tokens())
    attention.attention_dropout = 0.0
    hooked = compiled(path, axes)
    runs = [(step(trained, tokens()), cuboid.full_gradients(trained)) for trained in (model, twin, hooked)]
    hooked.base_model.layers[1].mlp.register_forward_hook(cuboid.local_hook(lambda *_: called.append(1)))
    runs.append((step(hooked, tokens()), cuboid.full_gradients(hooked)))
    return [trained.cuboid.state.compiled.reason for trained in (model, twin, hooked)], called, runs


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:compiling was asked for")
def test_layers_that_are_found_to_be_no_graph_later_go_on_uncompiled(pool, path):
    ranks = pool.run(2, found_later, path, (2, 1, 1), timeout_s=TIMEOUT_S)
    for (drawing, copied, hooked), called, _ in ranks:
        assert drawing.startswith("LlamaDecoderLayer draws random numbers in training")
        assert copied is None
        assert hooked == "a LlamaMLP has a hook, which a graph would leave out"
        assert called == [1]
    for loss, gradients in ranks[0][2]:
        assert_as_plain(path, loss, gradients)


def test_a_graph_that_draws_is_refused_and_one_that_drops_nothing_is_not():
    def dropping(p, attention_p):
        def forward(x):
            dropped = torch.nn.functional.dropout(x, p, training=True)
            return torch.nn.functional.scaled_dot_product_attention(dropped, x, x, dropout_p=attention_p)

        return torch.fx.symbolic_trace(forward)

    compiled_layers.check_draws_nothing(dropping(0.0, 0.0))
    for drawing in (dropping(0.5, 0.0), dropping(0.0, 0.5)):
        with pytest.raises(Exception, match="draws random numbers in training"):
            compiled_layers.check_draws_nothing(drawing)


def test_compile_of_a_sharded_model_compiles_its_layers(path):
    section = {"mode": "3d_tensor", "mesh": {}}
    model = cuboid.shard(AutoModelForCausalLM.from_pretrained(path), {"tensor_parallel": section})
    with pytest.raises(UnsupportedModelError, match="backend='aot_eager' has no rule"):
        model.compile(backend="aot_eager")
    with pytest.raises(UnsupportedModelError, match="mode='reduce-overhead' has no rule"):
        model.compile(mode="reduce-overhead")
    model.compile(backend="inductor", dynamic=False)
    assert model.cuboid.state.compiled.reason is None
    assert "forward" in vars(model.base_model.layers[0])


MESH_OF_ONE = {"mode": "3d_tensor", "mesh": {}}
SEGMENTS = {"engine": "seq1f1b", "stages": 1, "segments": 2, "certification": "verified"}


def run_whole(model):
    model(input_ids=tokens(), labels=tokens())


def run_segments(model):
    cuboid.Pipeline(model).train(iter([{"input_ids": tokens(), "labels": tokens()}]), 1)


@pytest.mark.parametrize(
    ("what", "config", "run", "message"),
    [
        # Compiled twice, weights' gradients would not be numbers on a mesh with `batch`.
        (
            "layers.0",
            {"tensor_parallel": {**MESH_OF_ONE, "compile": True}},
            run_whole,
            r"compiles LlamaDecoderLayer, or",
        ),
        ("", {"tensor_parallel": MESH_OF_ONE}, run_whole, "torch.compile can't compile LlamaModel as a whole"),
        ("layers.0", {"pipeline": SEGMENTS}, run_segments, "compiles the layer of LlamaAttention, whose segments keep"),
    ],
    ids=["layer of the key", "base model", "layer of a stage"],
)
def test_what_a_script_compiles_itself_and_cannot_is_named(path, what, config, run, message):
    torch._dynamo.reset()
    model = cuboid.shard(AutoModelForCausalLM.from_pretrained(path), config).train()
    model.base_model.get_submodule(what).compile(backend="eager")
    with pytest.raises(Exception, match=message):
        run(model)


def test_a_model_that_is_compiled_before_it_is_sharded_is_refused(path):
    model = AutoModelForCausalLM.from_pretrained(path)
    model.compile()
    with pytest.raises(UnsupportedModelError, match="can't compile LlamaForCausalLM as a whole"):
        cuboid.shard(model, {"tensor_parallel": MESH_OF_ONE})


def test_layers_run_uncompiled_where_torchs_compiler_is_switched_off(path, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with pytest.warns(UserWarning, match=r"run uncompiled.*switched off \(TORCH_COMPILE_DISABLE=1"):
        model = cuboid.shard(
            AutoModelForCausalLM.from_pretrained(path), {"tensor_parallel": {**MESH_OF_ONE, "compile": True}}
        )
    assert step(model.train(), tokens()) > 0


@pytest.mark.filterwarnings("ignore:compiling was asked for")
def test_graphs_keep_only_torchs_own_attention(path):
    section = {"mode": "3d_tensor", "mesh": {}, "compile": True}
    for implementation, stays in (("eager", True), ("sdpa", False)):
        plain = AutoModelForCausalLM.from_pretrained(path, attn_implementation=implementation)
        model = cuboid.shard(plain, {"tensor_parallel": section, **ATTENTION_ONCE})
        assert (model.cuboid.state.compiled.reason is not None) == stays
