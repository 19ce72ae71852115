"""docs/on_the_model.md lists exactly what sharding puts on models of every kind."""

import functools
import os
import re
import sys
from pathlib import Path
from unittest import mock

import pytest
import transformers
from torch import nn
from transformers import AutoConfig

import cuboid

PAGE = Path(__file__).parents[2] / "docs" / "on_the_model.md"
MESH = {"tensor_parallel": {"mode": "3d_tensor", "mesh": {"sequence": 2, "hidden": 2}}}
STAGES = {"pipeline": {"engine": "seq1f1b", "stages": 2, "segments": 2}}
#: By name, the size of the world, and the sections of a config.
LAYOUTS = {
    "mesh": (4, MESH),
    "compiled": (2, {"tensor_parallel": {"mode": "3d_tensor", "mesh": {"sequence": 2}, "compile": True}}),
    "one rank": (1, {"tensor_parallel": {"mode": "3d_tensor", "mesh": {"batch": 1}}}),
    "stages": (2, STAGES),
    "split schedule": (2, {"pipeline": {**STAGES["pipeline"], "schedule": "zero_bubble"}}),
    "both": (8, {**MESH, **STAGES}),
}
#: Sizes with which the shipped tables know the code that runs, so that no probe has to find out whether it is right.
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
LLAMA = {**SIZES, "num_key_value_heads": 4}
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 64}
OPT = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "ffn_dim": 64,
    "word_embed_proj_dim": 32,
    "max_position_embeddings": 64,
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
VIT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
}
DEEPSEEK = {
    **LLAMA,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
MIXTURE = {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4}
GPT_OSS = {**MIXTURE, "num_hidden_layers": 4, "head_dim": 8}
LLAMA4 = {**MIXTURE, "num_hidden_layers": 8, "intermediate_size_mlp": 64, "head_dim": 8}
#: By class: the model type, its sizes, and the layouts.
MODELS = {
    "LlamaForCausalLM": ("llama", LLAMA, ("mesh", "compiled", "one rank", "stages", "split schedule", "both")),
    "GPT2LMHeadModel": ("gpt2", GPT2, ("mesh", "split schedule")),
    "Olmo2ForCausalLM": ("olmo2", LLAMA, ("mesh",)),
    "MixtralForCausalLM": ("mixtral", MIXTURE, ("mesh",)),
    "GptOssForCausalLM": ("gpt_oss", GPT_OSS, ("mesh",)),
    "DeepseekV3ForCausalLM": ("deepseek_v3", DEEPSEEK, ("mesh",)),
    "Llama4ForCausalLM": ("llama4_text", LLAMA4, ("mesh",)),
    "LlamaForSequenceClassification": ("llama", {**LLAMA, "pad_token_id": 0}, ("mesh",)),
    "OPTForCausalLM": ("opt", OPT, ("mesh", "compiled")),
    "BloomForCausalLM": ("bloom", {"hidden_size": 32, "n_layer": 3, "n_head": 4, "vocab_size": 64}, ("mesh", "stages")),
    "BertForSequenceClassification": ("bert", SIZES, ("mesh",)),
    "T5ForConditionalGeneration": ("t5", T5, ("mesh",)),
    "ViTForImageClassification": ("vit", VIT, ("mesh",)),
}  # fmt: skip
CASES = [(name, layout) for name, (_, _, layouts) in MODELS.items() for layout in layouts]


@functools.cache
def listed():
    """The names in the first columns of the page's tables, by section."""
    sections = PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
    rows = {text.splitlines()[0]: re.findall(r"^\| (`[^|]*) \|", text, flags=re.MULTILINE) for text in sections}
    return {title: {name for row in cells for name in re.findall(r"`([^`]+)`", row)} for title, cells in rows.items()}


def name_of_class(cls):
    """As on the page: the function that made the class, or the first of its bases that is Cuboid's."""
    # Decorators around a forward hold it in their closure.
    inside = [vars(cls).get("forward")]
    for function in inside:
        code = getattr(function, "__code__", None)
        if code is not None and "<locals>" in code.co_qualname and "/plugin/cuboid/" in code.co_filename:
            return code.co_qualname.partition(".")[0]
        held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        inside += [content for content in held if not any(content is one for one in inside)]
    base = next(base for base in cls.__mro__ if base.__module__.startswith("cuboid."))
    # Some are given the name of the class that they stand for.
    return next(name for name, value in vars(sys.modules[base.__module__]).items() if value is base)


def name_of_hook(hook):
    while isinstance(hook, functools.partial):
        hook = hook.func
    owner = getattr(hook, "__self__", None)
    if owner is not None:
        return type(owner).__name__
    return getattr(hook, "__qualname__", type(hook).__name__).partition(".")[0]


@functools.cache
def put_on(name, layout):
    """What sharding put on a model: (section, name) pairs."""
    model_type, sizes, _ = MODELS[name]
    world, sections = LAYOUTS[layout]
    cls = getattr(transformers, name)
    model = cls(AutoConfig.for_model(model_type, **sizes))
    before = {name: (type(module), {*vars(module)}) for name, module in model.named_modules()}
    config = dict(vars(model.config))
    with mock.patch.dict(os.environ, WORLD_SIZE=str(world), RANK="0"):
        model = cuboid.shard(model, {"train_micro_batch_size_per_gpu": 4, **sections})
    assert vars(model.config) == config
    put = set()
    for path, module in model.named_modules():
        old, attributes = before.get(path, (type(module), {*vars(module)}))
        if type(module) is not old:
            put.add(("Classes", name_of_class(type(module))))
        if issubclass(type(module), old) and old not in (nn.Linear, nn.Embedding, nn.LayerNorm, nn.Dropout):
            put |= {("Attributes", attribute) for attribute in vars(module).keys() - attributes}
        for hooks in (value for key, value in vars(module).items() if key.endswith("_hooks")):
            put |= {("Hooks", name_of_hook(hook)) for hook in hooks.values()}
    for parameter in model.parameters():
        assert not vars(parameter)
        assert not parameter._backward_hooks
        assert not parameter._post_accumulate_grad_hooks
    return put


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_all_that_is_put_on_a_model_is_listed(name, layout):
    put = put_on(name, layout)
    assert {(section, name) for section, name in put if name not in listed()[section]} == set()


def test_all_that_is_listed_is_put_on_some_model():
    put = set().union(*(put_on(name, layout) for name, layout in CASES))
    missing = {(section, name) for section, names in listed().items() for name in names} - put
    assert missing == set()
