"""Compiled layers of a pipeline's stages: all segments share a layer's graphs, whose gradients are plain ones."""

import warnings
from types import MappingProxyType

import pytest
import torch
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from transformers import AutoModelForCausalLM

import cuboid
from cuboid.distributed.topology import MeshShape
from cuboid.tensor3d.compiled import layers as compiled_layers
from cuboid.verify import SmallModel

ROWS, LENGTH, STEPS = 2, 16, 3
#: Inductor may take minutes for the first graph on a machine.
TIMEOUT_S = 600
#: As Inductor, with its partition into forward and backward, but what is in them runs uncompiled.
PARTITION_ONLY, INDUCTOR = "partition only", "inductor"
LAYERS_AGAIN = {"activation_checkpointing": {"mode": "layers"}}
ATTENTION_ONCE = {"activation_checkpointing": {"mode": "attention"}}
STEP = {"tensor_parallel": {"weight_gather": "step", "gradient_sync": "step"}}
UNEVEN = {"partition": [6, 5, 3, 2]}
NOTHING = MappingProxyType({})


@pytest.fixture(scope="module")
def path(checkpoint):
    return checkpoint(SmallModel("llama", heads=8, kv_heads=4, layers=2))


def micro_batch(padded=0, shift=0):
    ids = (torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) * 7 + shift) % 61
    batch = {"input_ids": ids, "labels": ids.clone()}
    if padded:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][0, :padded] = 0
        batch["labels"][0, : padded + 1] = -100
    return batch


def config_of(axes, pipeline=NOTHING, sections=NOTHING, *, compiles=True):
    mesh = dict(zip(("batch", "sequence", "hidden"), axes, strict=True))
    tensor_parallel = {"mode": "3d_tensor", "mesh": mesh, "compile": compiles, **sections.get("tensor_parallel", {})}
    keys = {"engine": "seq1f1b", "stages": 1, "segments": 4, **pipeline}
    return {**sections, "tensor_parallel": tensor_parallel, "pipeline": keys}


def staged(plain, config, compiler):
    torch._dynamo.reset()
    counters.clear()
    if compiler == PARTITION_ONLY:
        compiled_layers.compile_graph = lambda graph, _, **__: make_boxed_func(graph.forward)
    return cuboid.shard(plain, config).train()


def train(path, axes, pipeline, sections, compiler, padded, attention):
    """Graphs after each step, breaks, and the loss and gradients of the last step."""
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=attention)
    model = staged(plain, config_of(axes, pipeline, sections), compiler)
    runs, after_step = cuboid.Pipeline(model), []
    for _ in range(STEPS):
        model.zero_grad()
        batches = [micro_batch(padded, shift) for shift in (0, 3)]
        loss = runs.train(iter(batches), len(batches))
        after_step.append(model.cuboid.state.compiled.graphs)
    assert model.cuboid.state.compiled.reason is None
    return after_step, sum(counters["graph_break"].values()), float(loss), cuboid.full_gradients(model)


def plain_gradients(path, padded, attention):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=attention).train()
    batches = [micro_batch(padded, shift) for shift in (0, 3)]
    items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    loss = sum(model(**batch, num_items_in_batch=items).loss for batch in batches)
    loss.backward()
    return float(loss.detach()), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.sample(0, ci="others")
@pytest.mark.parametrize(
    ("axes", "pipeline", "sections", "compiler", "padded", "attention", "graphs"),
    [
        ((1, 1, 1), NOTHING, ATTENTION_ONCE, PARTITION_ONLY, 2, "sdpa", 2),
        ((1, 1, 1), {"stages": 2, "schedule": "zero_bubble"}, LAYERS_AGAIN, PARTITION_ONLY, 0, "sdpa", 1),
        ((1, 2, 1), {"stages": 2, "schedule": "zero_bubble"}, NOTHING, PARTITION_ONLY, 0, "sdpa", 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ((1, 2, 1), {"stages": 2}, NOTHING, PARTITION_ONLY, 0, "sdpa", 1),
                ((1, 1, 1), UNEVEN, NOTHING, INDUCTOR, 0, "sdpa", 2),
                ((1, 1, 1), NOTHING, LAYERS_AGAIN, PARTITION_ONLY, 0, "sdpa", 1),
                ((1, 1, 1), NOTHING, ATTENTION_ONCE, PARTITION_ONLY, 0, "sdpa", 1),
                ((1, 1, 1), NOTHING, NOTHING, PARTITION_ONLY, 2, "sdpa", 2),
                ((1, 1, 1), {"segments": 1}, NOTHING, PARTITION_ONLY, 0, "sdpa", 1),
                ((1, 1, 1), {"stages": 2, "schedule": "zero_bubble"}, NOTHING, INDUCTOR, 0, "sdpa", 1),
                ((1, 1, 1), {"stages": 2, "schedule": "zero_bubble"}, ATTENTION_ONCE, INDUCTOR, 2, "sdpa", 2),
                ((1, 2, 1), {"stages": 2, "schedule": "zero_bubble"}, LAYERS_AGAIN, INDUCTOR, 0, "sdpa", 1),
                ((2, 1, 1), {"stages": 2, "schedule": "zero_bubble"}, STEP, INDUCTOR, 0, "sdpa", 1),
                ((1, 1, 2), {"stages": 2, "schedule": "zero_bubble"}, ATTENTION_ONCE, PARTITION_ONLY, 2, "sdpa", 2),
                ((1, 2, 2), {"stages": 2, "schedule": "zero_bubble"}, NOTHING, PARTITION_ONLY, 0, "sdpa", 1),
                ((2, 2, 1), {"stages": 2, "schedule": "zero_bubble"}, NOTHING, PARTITION_ONLY, 0, "sdpa", 1),
                ((2, 1, 1), NOTHING, STEP, PARTITION_ONLY, 0, "sdpa", 1),
                ((1, 2, 1), {"stages": 2}, NOTHING, INDUCTOR, 2, "sdpa", 2),
                ((2, 1, 1), {"stages": 2}, LAYERS_AGAIN, INDUCTOR, 0, "sdpa", 1),
                ((1, 1, 2), {"stages": 2, "partition": [6, 4, 4, 2]}, ATTENTION_ONCE, INDUCTOR, 0, "sdpa", 2),
            ]
        ),
    ],
    ids=str,
)
def test_segments_share_a_layers_graphs_and_give_the_gradients_of_plain_transformers(
    pool, path, axes, pipeline, sections, compiler, padded, attention, graphs
):
    size = MeshShape(*axes).size * pipeline.get("stages", 1)
    arguments = path, axes, dict(pipeline), dict(sections), compiler, padded, attention
    ranks = pool.run(size, train, *arguments, timeout_s=TIMEOUT_S)
    for after_step, breaks, _, _ in ranks:
        assert (after_step, breaks) == ([graphs] * STEPS, 0)
    expected_loss, expected = plain_gradients(path, padded, attention)
    _, _, loss, gradients = ranks[0]
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).abs().max() <= 1e-6 * max(1, gradient.abs().max()), name


@pytest.mark.slow
def test_a_layer_that_two_stages_share_has_graphs_of_its_own(pool, checkpoint):
    """Of its halves and of whole layers, each stage has two."""
    path = checkpoint(SmallModel("llama", heads=8, kv_heads=4, layers=3))
    pipeline = {"stages": 2, "schedule": "zero_bubble", "stage_balance": [1.5, 1.5]}
    ranks = pool.run(4, train, path, (1, 2, 1), pipeline, {}, PARTITION_ONLY, 0, "sdpa", timeout_s=TIMEOUT_S)
    for after_step, breaks, _, _ in ranks:
        assert (after_step, breaks) == ([2] * STEPS, 0)
    expected_loss, expected = plain_gradients(path, 0, "sdpa")
    _, _, loss, gradients = ranks[0]
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for name, gradient in expected.items():
        assert (gradients.pop(name) - gradient).abs().max() <= 1e-6 * max(1, gradient.abs().max()), name
    assert not gradients


def sent(path, axes, pipeline):
    """Bytes that a step sends over the mesh, uncompiled and compiled."""
    snapshots = []
    for compiles in (False, True):
        plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        model = staged(plain, config_of(axes, pipeline, compiles=compiles), PARTITION_ONLY)
        runs, counter = cuboid.Pipeline(model), cuboid.mesh_of(model).comm_counter
        for _ in range(2):
            counter.reset()
            runs.train(iter([micro_batch(), micro_batch(shift=3)]), 2)
        snapshots.append(counter.snapshot())
    return snapshots


@pytest.mark.sample(0, ci=1)
@pytest.mark.parametrize("axes", [(1, 2, 1), (2, 1, 1), (1, 1, 2), (1, 2, 2)], ids=str)
def test_split_backwards_in_graphs_send_what_uncompiled_ones_do(pool, path, axes):
    pipeline = {"stages": 2, "schedule": "zero_bubble"}
    for uncompiled, compiled in pool.run(2 * MeshShape(*axes).size, sent, path, axes, pipeline, timeout_s=TIMEOUT_S):
        assert compiled == uncompiled


# --- what stays uncompiled, and says so ---------------------------------------------------------------------------


def named(path, axes, pipeline):
    """The warnings of stages whose layers can't be one graph, and the losses of uncompiled ones and of them."""
    said, losses = [], []
    for compiles in (False, True):
        plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = staged(plain, config_of(axes, pipeline, compiles=compiles), PARTITION_ONLY)
            runs = cuboid.Pipeline(model)
            losses.append([float(runs.train(iter([micro_batch()] * 2), 2)) for _ in range(2)])
        said += [str(warning.message) for warning in caught if "compiling" in str(warning.message)]
    return said, losses


@pytest.mark.sample(0, ci="others")
@pytest.mark.parametrize(
    ("architecture", "axes", "pipeline", "reason"),
    [
        # Found in a unit, while other modules are in the places of the other stage's layers.
        ("falcon_h1", (1, 1, 1), {"stages": 2}, "FalconH1DecoderLayer isn't one graph: "),
        ("gpt_neo", (1, 1, 1), {"stages": 2, "segments": 4}, "no form in a graph with segments: it reads its cache"),
    ],
)
def test_stages_whose_layers_are_no_graph_run_uncompiled_and_are_named_once(
    pool, checkpoint, architecture, axes, pipeline, reason
):
    size = MeshShape(*axes).size * pipeline.get("stages", 1)
    path = checkpoint(SmallModel.fitting(architecture, size, layers=2))
    for (message,), losses in pool.run(size, named, path, axes, pipeline, timeout_s=TIMEOUT_S):
        assert message.startswith("compiling was asked for, but the layers of")
        assert reason in message
        assert losses[0] == losses[1]
