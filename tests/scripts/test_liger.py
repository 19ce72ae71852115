"""Liger's kernels, put into a model by a script as Liger's functions do it: refused by name at each door."""

import types
from unittest import mock

import pytest
import torch
from torch.nn import functional
from transformers.models.llama import modeling_llama as llama

import cuboid
from cuboid.errors import UnsupportedModelError
from cuboid.models.certification.mesh_certificates import mesh_verdict
from customizing import batch, built

MESH = {"tensor_parallel": {"mode": "3d_tensor", "mesh": {"sequence": 2}}}
STAGE = {"pipeline": {"engine": "seq1f1b", "stages": 1, "segments": 2, "partition": "even"}}
INSTEAD = 'leave apply_liger_kernel_to_.* out; "compile": true'


def of_liger(function):
    """Liger isn't installed with the tests; what it puts into a model is known by its package's name."""
    home = {**globals(), "__name__": "liger_kernel.transformers.stand_in"}
    return types.FunctionType(function.__code__, home, function.__name__, function.__defaults__)


@of_liger
def lce_forward(self, input_ids=None, labels=None, **_):
    """The loss by the head's weight, which on a mesh is a rank's shard of it."""
    hidden = self.model(input_ids=input_ids, use_cache=False)[0]
    logits = hidden[:, :-1].flatten(0, 1) @ self.lm_head.weight.T
    loss = functional.cross_entropy(logits, labels[:, 1:].flatten())
    return llama.CausalLMOutputWithPast(loss=loss)


class LigerRMSNorm(llama.LlamaRMSNorm):
    __module__ = "liger_kernel.transformers.stand_in"

    @of_liger
    def forward(self, hidden_states):
        # As Triton says of any kernel on a CPU, where small models are probed.
        raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")


def with_its_loss(model):
    model.forward = types.MethodType(lce_forward, model)


def with_its_norm(model):
    """As ``_patch_rms_norm_module``."""
    for module in model.modules():
        if isinstance(getattr(module, "variance_epsilon", None), float) or "norm" in type(module).__name__.lower():
            module.variance_epsilon = 1e-6
            module.forward = types.MethodType(LigerRMSNorm.forward, module)


LOSS, NORM = r"LlamaForCausalLM\.forward is liger_kernel.*lce_forward", r"layernorm\.forward is liger_kernel.*forward"
INSTANCES = {"loss": (with_its_loss, LOSS), "norm": (with_its_norm, NORM)}


def step(model, config):
    if "pipeline" in config:
        cuboid.Pipeline(model).train(iter([batch()]), 1)
    else:
        model(**batch())


@pytest.mark.parametrize(("change", "named"), INSTANCES.values(), ids=INSTANCES)
@pytest.mark.parametrize("config", [MESH, STAGE], ids=["mesh", "stage"])
def test_a_model_that_it_has_changed_is_refused(threads, config, change, named):
    def on_rank():
        model = built()
        change(model)
        with pytest.raises(UnsupportedModelError, match=f"{named}.*{INSTEAD}"):
            cuboid.shard(model, config)

    threads.run(2 if config is MESH else 1, on_rank)


@pytest.mark.parametrize(("change", "named"), INSTANCES.values(), ids=INSTANCES)
@pytest.mark.parametrize("config", [MESH, STAGE], ids=["mesh", "stage"])
def test_a_sharded_model_that_it_has_changed_is_refused(threads, config, change, named):
    def on_rank():
        model = cuboid.shard(built(), config)
        change(model)
        with pytest.raises(UnsupportedModelError, match=f"{named}.*{INSTEAD}"):
            step(model, config)

    threads.run(2 if config is MESH else 1, on_rank)


def refused_on_mesh():
    with pytest.raises(UnsupportedModelError, match=rf"layers\.0\.input_layernorm is liger_kernel.*{INSTEAD}"):
        cuboid.shard(built(), MESH)


def test_what_it_puts_into_a_library_is_named(threads):
    """As ``apply_liger_kernel_to_llama()`` and ``AutoLigerKernelForCausalLM`` do, for models made before and later."""
    plain, sharded = built(), cuboid.shard(built(), {"tensor_parallel": {"mode": "3d_tensor", "mesh": {}}})
    with (
        mock.patch.object(llama.LlamaForCausalLM, "forward", lce_forward),
        pytest.raises(UnsupportedModelError, match=rf"LlamaForCausalLM\.forward is liger_kernel.*{INSTEAD}"),
    ):
        sharded(**batch())
    with mock.patch.object(llama, "LlamaRMSNorm", LigerRMSNorm):
        threads.run(2, refused_on_mesh)
        with pytest.raises(UnsupportedModelError, match=f"can't be probed.*LlamaRMSNorm is liger_kernel.*{INSTEAD}"):
            mesh_verdict(llama.LlamaForCausalLM, plain.config)
        with pytest.raises(UnsupportedModelError, match=rf"layernorm is liger_kernel.*LigerRMSNorm.*{INSTEAD}"):
            cuboid.shard(plain, STAGE)
    assert torch.isfinite(sharded(**batch()).loss)
