"""A verdict holds for the code that was probed, whoever replaced what in it."""

import copy
import functools
import sys

import pytest
import torch
import transformers
from torch import nn
from transformers import activations, masking_utils, modeling_layers, modeling_rope_utils, modeling_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.loss import loss_utils
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

import cuboid
from cuboid.errors import UnsupportedModelError
from cuboid.models.architectures.certificate import MeshVerdict, Verdict
from cuboid.models.architectures.plans import PLANS
from cuboid.models.certification import certificates, mesh_certificates
from cuboid.models.certification.code_identity import code_of
from cuboid.models.certification.small_config import small_config
from launching import alone, run

LLAMA = transformers.LlamaForCausalLM
SIZES = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None}


def identity(cls=LLAMA, **options):
    return code_of(cls, small_config(transformers.LlamaConfig(**options)))


def passed_on(function):
    def inner(*args, **kwargs):
        return function(*args, **kwargs)

    return inner


def wrapped(function):
    return functools.wraps(function)(passed_on(function))


class Norm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x):
        return x * self.weight


class OtherModel(modeling_llama.LlamaModel):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def other_mask(batch_idx, head_idx, q_idx, kv_idx):
    return q_idx >= kv_idx


def captured(**options):
    """The base model's forward, with another argument of the decorator that its source has."""
    inner = modeling_llama.LlamaModel.forward
    while hasattr(inner, "__wrapped__"):
        inner = inner.__wrapped__
    return merge_with_config_defaults(capture_outputs(**options)(inner))


llama, mistral = modeling_llama, modeling_mistral
attention = modeling_utils.ALL_ATTENTION_FUNCTIONS
#: What is replaced by what; items of registries are named in brackets.
REPLACED = [
    (llama.LlamaDecoderLayer, "forward", passed_on(llama.LlamaDecoderLayer.forward)),
    (llama.LlamaDecoderLayer, "forward", wrapped(llama.LlamaDecoderLayer.forward)),
    (llama.LlamaModel, "forward", wrapped(llama.LlamaModel.forward)),
    (LLAMA, "forward", wrapped(LLAMA.forward)),
    (LLAMA, "loss_function", lambda *args, **kwargs: 0),
    (llama.LlamaMLP, "forward", torch.no_grad()(llama.LlamaMLP.forward)),
    (llama.LlamaMLP, "forward", functools.partialmethod(llama.LlamaMLP.forward)),
    (llama.LlamaMLP, "__call__", passed_on(nn.Module.__call__)),
    (llama.LlamaAttention, "forward", mistral.MistralAttention.forward),
    (llama.LlamaAttention, "__init__", wrapped(llama.LlamaAttention.__init__)),
    (llama.LlamaRotaryEmbedding, "forward", wrapped(llama.LlamaRotaryEmbedding.forward)),
    (llama, "LlamaRMSNorm", Norm),
    (llama, "LlamaRMSNorm", nn.RMSNorm),
    (llama, "LlamaRMSNorm", mistral.MistralRMSNorm),
    (llama, "LlamaModel", OtherModel),
    (llama, "apply_rotary_pos_emb", lambda q, k, cos, sin, unsqueeze_dim=1: (q, k)),
    (llama, "apply_rotary_pos_emb", mistral.apply_rotary_pos_emb),
    (llama, "eager_attention_forward", passed_on(llama.eager_attention_forward)),
    (llama, "create_causal_mask", passed_on(llama.create_causal_mask)),
    (llama, "ACT2FN", {"silu": nn.GELU()}),
    (llama, "nn", type(nn)("other")),
    (llama.apply_rotary_pos_emb, "__defaults__", (2,)),
    (llama.LlamaDecoderLayer.forward, "__defaults__", (None, None, None, True, None)),
    (masking_utils.sdpa_mask, "__defaults__", (0, 0, other_mask, None, None, True, False, False, "cpu")),
    (masking_utils.create_causal_mask, "__kwdefaults__", {"and_mask_function": other_mask}),
    (sdpa_attention_forward, "__defaults__", (0.5, None, None, None, None)),
    (loss_utils.ForCausalLMLoss, "__defaults__", (None, 0, None)),
    (nn.functional.silu, "__defaults__", (True,)),
    (nn.Module.register_forward_hook, "__kwdefaults__", {"prepend": True, "with_kwargs": False, "always_call": False}),
    (llama.LlamaModel, "forward", captured(tie_last_hidden_states=False)),
    (
        llama.LlamaRotaryEmbedding,
        "forward",
        torch.enable_grad()(modeling_llama.LlamaRotaryEmbedding.forward.__wrapped__),
    ),
    (llama.LlamaDecoderLayer, "gradient_checkpointing", True),
    (llama.LlamaMLP.forward, "__code__", (lambda self, x: x).__code__),
    (masking_utils, "causal_mask_function", wrapped(masking_utils.causal_mask_function)),
    (modeling_layers.GradientCheckpointingLayer, "__call__", wrapped(nn.Module.__call__)),
    (modeling_utils.PreTrainedModel, "loss_function", property(lambda self: None)),
    (loss_utils.LOSS_MAPPING, "[ForCausalLM]", wrapped(loss_utils.ForCausalLMLoss)),
    (activations.ACT2FN, "[silu]", nn.GELU),
    (activations.ACT2FN, "[silu]", activations.GELUActivation),
    (modeling_rope_utils.ROPE_INIT_FUNCTIONS, "[yarn]", lambda *args: None),
    (attention._global_mapping, "[sdpa]", passed_on(attention["sdpa"])),
    (attention._local_mapping, "[sdpa]", passed_on(attention["sdpa"])),
    (transformers.LlamaConfig.base_model_tp_plan, "[layers.*.mlp.up_proj]", "rowwise"),
    (attention._local_mapping, "[sdpa]", functools.partial(attention["sdpa"], scaling=0.1)),
    (llama, "apply_rotary_pos_emb", functools.partial(llama.apply_rotary_pos_emb, unsqueeze_dim=2)),
    (nn.functional, "silu", functools.partial(nn.functional.gelu, approximate="tanh")),
    (nn.functional, "silu", nn.GELU()),
    (nn.SiLU, "forward", lambda self, x: x),
    (nn.Linear, "forward", passed_on(nn.Linear.forward)),
    (nn, "Linear", type("Linear", (nn.Linear,), {})),
    (nn.Module, "__call__", passed_on(nn.Module.__call__)),
    (nn.functional, "linear", passed_on(nn.functional.linear)),
    (nn.functional, "scaled_dot_product_attention", passed_on(nn.functional.scaled_dot_product_attention)),
    (nn.functional, "cross_entropy", passed_on(nn.functional.cross_entropy)),
    (torch, "rsqrt", lambda x: x),
    (torch.Tensor, "transpose", lambda x, *dims: x),
]


def replace(monkeypatch, owner, name, value):
    if name.startswith("["):
        monkeypatch.setitem(owner, name[1:-1], value)
    else:
        monkeypatch.setattr(owner, name, value)


@pytest.mark.sample(8, ci="others")
@pytest.mark.parametrize(
    ("owner", "name", "value"), REPLACED, ids=[f"{getattr(o, '__name__', 'table')}.{n}" for o, n, _ in REPLACED]
)
def test_whatever_is_replaced_is_noticed_and_so_is_its_return(monkeypatch, owner, name, value):
    before = identity()
    assert before.is_stock
    with monkeypatch.context() as patched:
        replace(patched, owner, name, value)
        during = identity()
        assert not during.is_stock
        assert during.changes
        assert during.digest != before.digest
    assert identity() == before


def test_what_cannot_matter_is_not_taken_for_a_change(monkeypatch):
    before = identity()
    monkeypatch.setitem(activations.ACT2FN, "mine", nn.GELU)
    monkeypatch.setattr(modeling_utils.PreTrainedModel, "tie_weights", lambda self: None)
    monkeypatch.setattr(mistral.MistralMLP, "forward", lambda self, x: x)
    assert identity() == before
    # An entry of the user's own that the config chooses is code like any other.
    chosen = identity(hidden_act="mine").digest
    monkeypatch.setitem(activations.ACT2FN, "mine", nn.SiLU)
    assert identity(hidden_act="mine").digest != chosen


def test_a_class_is_the_same_after_a_first_copy_of_an_object(monkeypatch):
    class Copied(Norm):
        """Python gives it an attribute then."""

    monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", Copied)
    seen = identity().seen
    copy.copy(Copied(8))
    assert "__slotnames__" in vars(Copied)
    assert seen.is_current()


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gemma3_text", "jamba", "bert", "gpt2", "mamba2"])
def test_installed_code_is_told_to_be_what_it_is(model_type):
    config = transformers.AutoConfig.for_model(model_type)
    cls = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    code = code_of(cls, small_config(config))
    assert (code.changes, code.unknown, code.is_stock) == ((), (), True)
    certified = certificates.certified_files()
    assert all(certified[name] == digest for name, digest in code.files.items())


def test_two_closures_over_different_numbers_are_not_the_same_code(monkeypatch):
    def scaled(factor):
        return lambda self, x: factor * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    digests = []
    for factor in (1.0, 0.5, 1.0):
        monkeypatch.setattr(llama.LlamaMLP, "forward", scaled(factor))
        digests.append(identity().digest)
    assert digests[0] == digests[2] != digests[1]
    # What a tensor holds isn't known.
    monkeypatch.setattr(llama.LlamaMLP, "forward", scaled(torch.ones(())))
    assert identity().unknown


def keyword_scale(x, *, scale=1.0):
    return scale * x


def by_default(function):
    return lambda self, x, how=function: self.down_proj(how(x))


def scaled_by(factor, forward):
    def inner(self, x):
        return factor * forward(self, x)

    return inner


@pytest.mark.sample(2, ci="others")
@pytest.mark.parametrize(
    "make",
    [
        lambda value: lambda self, x, scale=value: self.down_proj(scale * x),
        lambda value: lambda self, x, *, scale=value: self.down_proj(scale * x),
        lambda value: lambda self, x, *, how={"scale": value}: self.down_proj(how["scale"] * x),
        lambda value: by_default(functools.partial(keyword_scale, scale=value)),
        lambda value: scaled_by(value, llama.LlamaMLP.forward),
        lambda value: functools.wraps(llama.LlamaMLP.forward)(scaled_by(value, llama.LlamaMLP.forward)),
        lambda value: functools.partialmethod(lambda self, x, scale: self.down_proj(scale * x), scale=value),
        lambda value: scaled_by(1.0, scaled_by(value, llama.LlamaMLP.forward)),
    ],
    ids=["default", "keyword", "dict", "partial", "decorator", "wraps", "partialmethod", "two decorators"],
)
def test_numbers_that_a_replacement_was_made_with_are_part_of_it(monkeypatch, make):
    original, digests = llama.LlamaMLP.forward, []
    for value in (1.0, 0.5, 1.0):
        monkeypatch.setattr(llama.LlamaMLP, "forward", original)
        monkeypatch.setattr(llama.LlamaMLP, "forward", make(value))
        code = identity()
        assert not code.unknown
        assert not code.is_stock
        digests.append(code.digest)
    assert digests[0] == digests[2] != digests[1]


def test_a_registered_function_is_known_by_what_it_was_made_with(monkeypatch):
    def digest(scaling):
        monkeypatch.setitem(attention._local_mapping, "mine", functools.partial(attention["sdpa"], scaling=scaling))
        return identity(attn_implementation="mine").digest

    assert digest(0.1) == digest(0.1) != digest(0.2)


def test_a_table_does_not_speak_for_a_file_that_was_edited(monkeypatch):
    question = certificates.Question.of(LLAMA, transformers.LlamaConfig())
    assert question.known(certificates.TABLE) is not None
    files = {**certificates.certified_files(), "models/llama/modeling_llama": "another"}
    monkeypatch.setattr(certificates, "certified_files", lambda: files)
    assert question.known(certificates.TABLE) is None
    assert question.known(mesh_certificates.MESH_TABLE) is None


@pytest.mark.parametrize("plan", [{"h.*.mlp.c_proj": "rowwise"}, {}])
def test_a_table_does_not_speak_for_a_plan_that_was_changed(monkeypatch, plan):
    question = certificates.Question.of(transformers.GPT2LMHeadModel, transformers.GPT2Config())
    assert question.known(mesh_certificates.MESH_TABLE) is not None
    monkeypatch.setitem(PLANS, "gpt2", plan)
    assert question.known(mesh_certificates.MESH_TABLE) is None


def test_a_table_does_not_speak_for_a_type_that_was_given_a_plan(monkeypatch):
    question = certificates.Question.of(LLAMA, transformers.LlamaConfig())
    monkeypatch.setitem(PLANS, "llama", {"layers.*.mlp.up_proj": "colwise"})
    assert question.known(mesh_certificates.MESH_TABLE) is None


def test_a_class_that_is_patched_after_it_was_certified_is_certified_again(tmp_path, monkeypatch):
    probed = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(certificates, "check", lambda *_: probed.append("pipeline") or Verdict())
    monkeypatch.setattr(mesh_certificates, "check_meshes", lambda *_: probed.append("mesh") or MeshVerdict())

    def ask():
        certificates.certificate_of(LLAMA, transformers.LlamaConfig())
        mesh_certificates.mesh_verdict(LLAMA, transformers.LlamaConfig())
        asked, probed[:] = [*probed], []
        return asked

    assert ask() == []
    monkeypatch.setattr(llama.LlamaMLP, "forward", passed_on(llama.LlamaMLP.forward))
    assert [ask(), ask()] == [["pipeline", "mesh"], []]
    scale = torch.ones(())
    monkeypatch.setattr(llama.LlamaMLP, "forward", lambda self, x: scale * x)
    assert [ask(), ask()] == [["pipeline", "mesh"], []]
    # Only what can be identified is kept for other processes.
    assert len(list(tmp_path.rglob("*.json"))) == 2
    monkeypatch.undo()
    assert ask() == []


def shifted_tokens(forward):
    def inner(self, x):
        return forward(self, 0.5 * (x + nn.functional.pad(x[:, :-1], (0, 0, 1, 0))))

    return inner


def test_a_patch_that_is_wrong_in_segments_is_refused_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(llama.LlamaMLP, "forward", shifted_tokens(llama.LlamaMLP.forward))
    model = LLAMA(transformers.LlamaConfig(**SIZES))
    with pytest.raises(UnsupportedModelError, match=r"segments.*LlamaMLP.forward is .*shifted_tokens"):
        cuboid.shard(model, {"pipeline": {"engine": "seq1f1b", "stages": 1, "segments": 3}})
    verdict = certificates.certificate_of(LLAMA, model.config).verdict
    assert verdict.reason_against("whole") is None, "in one piece it is right"


def test_a_patch_that_runs_nowhere_but_on_a_gpu_is_named(tmp_path, monkeypatch):
    def kernel(self, x):
        raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(llama.LlamaRMSNorm, "forward", kernel)
    for ask in (mesh_certificates.mesh_verdict, certificates.certificate_of, staging_of):
        with pytest.raises(UnsupportedModelError, match=r"can't be.*cpu tensor.*LlamaRMSNorm.forward is .*kernel"):
            ask(LLAMA, transformers.LlamaConfig())


def staging_of(cls, config):
    cuboid.shard(cls(transformers.LlamaConfig(**SIZES)), {"pipeline": {"engine": "seq1f1b", "stages": 1}})


SCRIPT = """
import sys, torch, transformers
from cuboid.models.certification.certificates import Question
from transformers.models.llama.modeling_llama import LlamaMLP
EDITED = False
class MyMLP(LlamaMLP):
    def forward(self, x):
        if EDITED or x.dtype in {torch.float16, torch.int8, "a", "b"}:
            x = 2 * x
        return super().forward(x)
class MyLlama(transformers.LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = MyMLP(config)
print(Question.of(MyLlama, transformers.LlamaConfig()).file)
"""


@pytest.mark.ci
def test_a_class_of_ones_own_is_known_by_its_code(tmp_path):
    def file_of(text, run=alone, **variables):
        (tmp_path / "script.py").write_text(text)
        status, output = run(tmp_path / "script.py", **variables)
        assert status == 0, output
        return output.splitlines()[-1]

    first = file_of(SCRIPT)
    # In an interpreter of its own, where sets have another order.
    assert file_of(SCRIPT, functools.partial(run, sys.executable), PYTHONHASHSEED="1") == first
    assert file_of(SCRIPT.replace("EDITED = False", "EDITED = True")) != first
    assert file_of(SCRIPT.replace("2 * x", "3 * x")) != first
