"""Optimizers that are given whole tensors: twenty steps on a mesh, equal to those of one process."""

import copy
import math

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.optimization import Adafactor as TransformersAdafactor

from cuboid.checkpoint.optimizer_state import OptimizerAdapter
from cuboid.distributed.topology import AXES
from cuboid.models.certification.float64 import KeepFloat64
from cuboid.optim.elementwise import OwnedShards, check_optimizer
from cuboid.optim.grad_norm import scale_to, total_norm
from cuboid.optim.whole_tensors import WholeTensors
from tests.support.threaded import Threaded

SIZES = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
STEPS = 20
MAX_NORM = 0.5
CUT = OwnedShards(cut="a mesh")


class Lars(torch.optim.Optimizer):
    """An unknown optimizer that scales each tensor's step by norms of the whole tensor."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rate = group["lr"] * parameter.norm() / parameter.grad.norm()
                    moment = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    parameter.sub_(moment.mul_(0.9).add_(parameter.grad * rate))


def matrices(model):
    """What users of Muon give it."""
    return [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name and "head" not in name]


def everything(model):
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]


OPTIMIZERS = {
    "Muon": lambda model: torch.optim.Muon(matrices(model), lr=2e-2),
    "Adafactor": lambda model: torch.optim.Adafactor(everything(model), lr=2e-2, weight_decay=0.1),
    "transformers' Adafactor": lambda model: TransformersAdafactor(
        everything(model), lr=2e-3, scale_parameter=False, relative_step=False, beta1=0.9
    ),
    "relative Adafactor": lambda model: TransformersAdafactor(everything(model), warmup_init=True),
    "LARS": lambda model: Lars(everything(model)),
}


def llama(**options):
    torch.manual_seed(0)
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **{**SIZES, **options})
    return AutoModelForCausalLM.from_config(config).double().train()


def batch_of(step):
    ids = torch.randint(0, 50, (4, 8), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def train(model, optimizer, clip, steps=range(STEPS)):
    for step in steps:
        model(**batch_of(step), use_cache=False).loss.backward()
        clip()
        optimizer.step()
        optimizer.zero_grad()


def alone(model, make):
    model = copy.deepcopy(model)
    with KeepFloat64():
        train(model, make(model), lambda: nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
    return model


def on_mesh(model, mesh, make, steps=range(STEPS)):
    """A model after steps on all ranks of a mesh, and each rank's optimizer and :class:`WholeTensors`."""
    threaded = Threaded(model, mesh)
    specs = threaded.plan.by_parameter

    def run(model):
        mesh = model.cuboid.mesh
        optimizer = make(model)
        adapter = OptimizerAdapter.direct(optimizer, {id(p): name for name, p in model.named_parameters()})
        whole = WholeTensors(adapter, check_optimizer(optimizer, CUT), specs, mesh)

        def clip():
            gradients = [p.grad for p in model.parameters()]
            norm = total_norm(gradients, [mesh.along(*AXES).process_group], 2.0, gradients[0])
            scale_to(gradients, norm, MAX_NORM)

        mesh.comm_counter.reset()
        train(model, optimizer, clip, steps)
        return optimizer, whole

    return threaded, threaded.run(run)


def largest_difference(threaded, expected):
    with torch.no_grad():
        for model in threaded.models:
            for parameter in model.parameters():
                parameter.grad = parameter.detach().clone()
    weights = threaded.gradients()
    return max((weights[name] - p).abs().max().item() for name, p in expected.named_parameters())


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("mesh", ["1x2x1", "1x1x2", "2x1x1", "2x2x2"])
def test_whole_tensors_are_stepped_as_on_one_process(name, mesh):
    model = llama()
    expected = alone(model, OPTIMIZERS[name])
    threaded, _ = on_mesh(model, mesh, OPTIMIZERS[name])
    assert largest_difference(threaded, expected) <= 1e-9
    assert largest_difference(threaded, model) > 1e-3
