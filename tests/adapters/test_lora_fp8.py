"""LoRA on meshes around layers in fp8: plain PEFT's around an emulation of them, and compiled as uncompiled."""

import copy
import functools
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from transformers import AutoModelForCausalLM, LlamaConfig

import cuboid
from cuboid.config.schema import CuboidConfig
from cuboid.distributed.thread_ranks import ThreadRanks
from cuboid.distributed.topology import AXES, MeshShape
from cuboid.models.architectures.certificate import MeshVerdict
from cuboid.models.sharded.parallel_plan import make_parallel_plan
from cuboid.models.sharded.sharded_model import shard_modules
from cuboid.tensor3d.compiled import layers as compiled_layers
from cuboid.tensor3d.sharding.sharding_spec import put_shard, take_shard
from cuboid.weights.state_dict_map import sharding_specs
from fp8_emulation import FP8, EmulatedLinear, counted_products, distance

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
LAYERS, ROWS, LENGTH = 2, 2, 32
TARGETS = ["q_proj", "o_proj", "gate_proj", "down_proj"]
#: Factors of each target.
FACTORS = LAYERS * 2 * len(TARGETS)
#: Inductor may take minutes for the first graph on a machine.
TIMEOUT_S = 600
SPLIT = {"engine": "seq1f1b", "stages": 1, "segments": 2, "partition": "even", "certification": "verified"}


def plain_model():
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_hidden_layers=LAYERS)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).bfloat16().train()


def adapted(model):
    torch.manual_seed(1)
    # Without PEFT's initial zeros in B, A would have no gradient. Factors in bf16, as the model is.
    config = LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False)
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def micro_batch(shift=0):
    ids = (torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) * 7 + shift) % 89
    return {"input_ids": ids, "labels": ids}


def gradients_of(model):
    named = ((name.removeprefix("base_model.model."), x.grad) for name, x in model.named_parameters())
    return {name: gradient for name, gradient in named if gradient is not None}


def section(axes, **keys):
    return {"tensor_parallel": {"mode": "3d_tensor", "mesh": dict(zip(AXES, axes, strict=True)), **keys}}


@functools.cache
def plain_gradients(emulated):
    """Of plain PEFT, around the emulation or in bf16."""
    model = plain_model()
    for module in model.model.layers.modules():
        if emulated and type(module) is nn.Linear:
            module.__class__ = EmulatedLinear
    model = adapted(model)
    loss = model(**micro_batch(), use_cache=False).loss
    loss.backward()
    return loss.detach(), gradients_of(model)


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("axes", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)], ids=str)
def test_a_mesh_trains_as_plain_peft_around_the_emulation(axes):
    plain, settings = plain_model(), CuboidConfig.model_validate(section(axes, fp8=FP8)).tensor_parallel
    plan = make_parallel_plan(plain, MeshShape(*axes), MeshVerdict())
    ranks = ThreadRanks(plan.mesh)
    models = [
        adapted(shard_modules(copy.deepcopy(plain), plan, mesh, settings, functools.partial(take_shard, mesh=mesh)))
        for mesh in ranks.meshes
    ]

    def step(mesh):
        loss = models[mesh.rank](**micro_batch(), use_cache=False).loss
        loss.backward()
        return loss.detach()

    with counted_products(emulated=False) as products:
        losses = ranks.run(step)
    assert products
    gradients = {}
    for mesh, model in zip(ranks.meshes, models, strict=True):
        specs = sharding_specs(model.get_base_model())
        for name, gradient in gradients_of(model).items():
            full = gradients.setdefault(name, gradient.new_zeros(specs[name].shape))
            put_shard(full, gradient, specs[name], mesh.shape, mesh.coordinate)
    expected_loss, expected = plain_gradients(True)
    _, wide = plain_gradients(False)
    assert gradients.keys() == expected.keys()
    assert len(gradients) == FACTORS
    torch.testing.assert_close(losses[0].float(), expected_loss.float(), rtol=1e-3, atol=0)
    # Sums are rounded to bf16 elsewhere, after which some elements are rounded to another number of fp8.
    noise = distance(wide.values(), [expected[name] for name in wide])
    assert distance([gradients[name] for name in expected], expected.values()) < 0.7 * noise


#: As Inductor, with its partition into forward and backward, but what is in them runs uncompiled.
PARTITION_ONLY, INDUCTOR = "partition only", "inductor"


def train(axes, pipeline, compiler, schedule):
    """Of uncompiled and compiled layers: loss, this rank's gradients, graphs after each step, and breaks."""
    runs = []
    uncompiled = mock.patch.object(
        compiled_layers, "compile_graph", lambda graph, _, **__: make_boxed_func(graph.forward)
    )
    for compiles in (False, True):
        torch._dynamo.reset()
        counters.clear()
        config = section(axes, fp8=FP8, compile=compiles)
        if pipeline:
            config["pipeline"] = {**SPLIT, "schedule": schedule}
        model = cuboid.shard(plain_model(), config).train()
        peft, graphs = adapted(model), []
        pipelined = cuboid.Pipeline(peft) if pipeline else None
        with uncompiled if compiler == PARTITION_ONLY else nullcontext():
            for _ in range(3):
                peft.zero_grad()
                if pipelined is None:
                    loss = peft(**micro_batch(), use_cache=False).loss
                    loss.backward()
                else:
                    loss = pipelined.train(iter([micro_batch(), micro_batch(3)]), 2)
                graphs.append(compiles and model.cuboid.state.compiled.graphs)
        if compiles:
            assert model.cuboid.state.compiled.reason is None
        breaks = sum(counters["graph_break"].values())
        runs.append((loss.detach(), gradients_of(peft), graphs, breaks))
    return runs


@pytest.mark.ci
@pytest.mark.parametrize(
    ("axes", "pipeline", "schedule", "compiler"),
    [
        ((1, 2, 1), False, None, PARTITION_ONLY),
        pytest.param((2, 1, 1), True, "zero_bubble", PARTITION_ONLY, marks=pytest.mark.slow),
        *(
            pytest.param(axes, pipeline, schedule, INDUCTOR, marks=pytest.mark.slow)
            for axes, pipeline, schedule in [
                ((1, 2, 1), False, None),
                ((2, 1, 1), False, None),
                ((1, 1, 2), False, None),
                ((1, 2, 1), True, "seq1f1b"),
                ((1, 1, 2), True, "zero_bubble"),
            ]
        ),
    ],
    ids=str,
)
def test_compiled_layers_compute_what_uncompiled_ones_do(pool, axes, pipeline, schedule, compiler):
    ranks = pool.run(2, train, axes, pipeline, compiler, schedule, timeout_s=TIMEOUT_S)
    _, wide = plain_gradients(False)
    _, rounded = plain_gradients(True)
    noise = distance(wide.values(), [rounded[name] for name in wide])
    for (loss, gradients, _, _), (compiled_loss, compiled, graphs, breaks) in ranks:
        # The input of the first layer needs no gradient, the others' do.
        assert (graphs, breaks) == ([2] * 3, 0)
        torch.testing.assert_close(compiled_loss.float(), loss.float(), rtol=1e-3, atol=0)
        assert compiled.keys() == gradients.keys()
        assert len(gradients) == FACTORS
        # Where kernels are fused, bf16 is rounded once before fp8, not twice.
        assert distance([compiled[name] for name in gradients], gradients.values()) < 0.9 * noise
