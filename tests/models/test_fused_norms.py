"""RMSNorms of stages without a mesh: values and gradients of transformers' own code, with less kept for backward."""

import copy
import functools

import pytest
import torch
import transformers
from torch import nn
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

import cuboid
from cuboid import Mesh, MeshShape
from cuboid.models.stages.fused_norms import fuse_norms, rms_norms

NORMS = [LlamaRMSNorm, GemmaRMSNorm, Olmo2RMSNorm, T5LayerNorm, nn.RMSNorm]
FEATURES = 24


def pair(cls, dtype):
    """A norm with some weights and its fused copy."""
    torch.manual_seed(0)
    norm = cls(FEATURES, eps=1e-5).to(dtype)
    with torch.no_grad():
        norm.weight.add_(torch.randn(FEATURES) * 0.3)
    model = nn.ModuleDict({"norm": copy.deepcopy(norm)})
    norms = rms_norms(model)
    assert list(norms) == ["norm"]
    fuse_norms(model, norms, Mesh(MeshShape()))
    return norm, model["norm"]


def gradients(norm, x):
    x = x.clone().requires_grad_()
    out = norm(x)
    (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    return out.detach(), x.grad, norm.weight.grad


@pytest.mark.parametrize("cls", NORMS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)], ids=str
)
def test_values_and_gradients_are_those_of_its_class(cls, dtype, tolerance):
    norm, fused = pair(cls, dtype)
    x = torch.randn(2, 5, FEATURES).to(dtype)
    for actual, wanted in zip(gradients(fused, x), gradients(norm, x), strict=True):
        assert actual.dtype == wanted.dtype
        assert (actual - wanted).abs().max() <= tolerance * wanted.abs().max()


@pytest.mark.parametrize("passed", [lambda norm, x, gate: norm(x, gate), lambda norm, x, gate: norm(x, gate=gate)])
def test_with_a_gate_a_norm_is_that_of_its_class(passed):
    norm, fused = pair(functools.partial(BambaRMSNormGated, group_size=FEATURES), torch.float64)
    x, gate = torch.randn(2, 2, 5, FEATURES, dtype=torch.float64).unbind()
    assert torch.equal(passed(fused, x, gate), passed(norm, x, gate))
    torch.testing.assert_close(fused(x), norm(x), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(fused(x), passed(fused, x, gate))


def saved_bytes(norm, x):
    storages = {}

    def note(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        norm(x)
    return sum(storages.values())


def test_backward_needs_the_input_and_a_statistic_of_each_row():
    norm, fused = pair(LlamaRMSNorm, torch.bfloat16)
    tokens = 64
    x = torch.randn(tokens, FEATURES).bfloat16().requires_grad_()
    assert saved_bytes(fused, x) == 2 * tokens * FEATURES + 4 * tokens + 2 * FEATURES
    assert saved_bytes(norm, x) > 2.5 * saved_bytes(fused, x)


def test_a_frozen_weight_has_no_gradient():
    _, fused = pair(LlamaRMSNorm, torch.float32)
    fused.weight.requires_grad_(False)
    x = torch.randn(3, FEATURES, requires_grad=True)
    fused(x).sum().backward()
    assert fused.weight.grad is None
    assert x.grad is not None


def test_an_eps_that_is_set_later_counts():
    norm, fused = pair(LlamaRMSNorm, torch.float32)
    norm.variance_epsilon = fused.variance_epsilon = 0.5
    x = torch.randn(3, FEATURES)
    torch.testing.assert_close(fused(x), norm(x))


class Doubled(LlamaRMSNorm):
    """By its name a norm, by its formula none."""

    def forward(self, x):
        """Twice the norm."""
        return 2 * super().forward(x)


def test_only_what_computes_the_formula_is_fused():
    patched = LlamaRMSNorm(FEATURES)
    patched.forward = lambda x: x
    others = [Doubled(FEATURES), nn.LayerNorm(FEATURES), nn.Linear(FEATURES, FEATURES), patched]
    assert rms_norms(nn.ModuleList(others)) == {}


def test_a_stage_without_a_mesh_has_them():
    config = transformers.Qwen3Config(
        vocab_size=32,
        hidden_size=FEATURES,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    names = {name for name, module in model.named_modules() if "norm" in type(module).__name__.lower()}
    section = {"engine": "seq1f1b", "stages": 1, "segments": 2, "certification": "verified"}
    model = cuboid.shard(model, {"pipeline": section})
    fused = {name for name, module in model.named_modules() if hasattr(module, "cuboid_norm")}
    # Two of a layer, those of its queries and keys, and the last one.
    assert len(fused) == 9
    assert fused == names
    assert {type(model.get_submodule(name)).__name__ for name in fused} == {"Qwen3RMSNorm"}
