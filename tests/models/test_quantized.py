"""Checkpoints and models with quantised weights are refused before anything is cut, by whatever would cut them."""

import json
import shutil

import pytest
import torch
from transformers import AutoConfig, BitsAndBytesConfig, FineGrainedFP8Config, LlamaForCausalLM

import cuboid
from comparing import mesh_section
from cuboid.errors import UnsupportedModelError
from cuboid.planner.description.meta_model import describe
from small_layers import with_attention

METHODS = {
    "bitsandbytes": {"load_in_8bit": True},
    "torchao": {"quant_type": "int8_weight_only"},
    "fp8": {"weight_block_size": [128, 128]},
    "gptq": {"bits": 4},
}
CONFIG = {"tensor_parallel": mesh_section("1x1x1")}
STAGED = {**CONFIG, "pipeline": {"engine": "seq1f1b", "stages": 1}}


def small():
    return with_attention("llama", num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    small().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("config", [CONFIG, STAGED], ids=["mesh", "pipeline"])
def test_a_quantised_checkpoint_is_refused_by_its_file(start, tmp_path, method, config):
    folder = shutil.copytree(start, tmp_path / "quantised")
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = {"quant_method": method, **METHODS[method]}
    (folder / "config.json").write_text(json.dumps(values))
    said = rf"quantization_config \(quant_method '{method}'\) has no rule"
    with pytest.raises(UnsupportedModelError, match=rf"^{folder}/config.json: {said}"):
        cuboid.from_pretrained(folder, config)
    model_config = AutoConfig.from_pretrained(folder)
    with pytest.raises(UnsupportedModelError, match=rf"^the config given to LlamaForCausalLM.from_config: {said}"):
        cuboid.from_config(model_config, config)
    with pytest.raises(UnsupportedModelError, match=rf"^the config of 'llama': {said}"):
        describe(model_config)
    # The first thing that deepspeed.initialize, a Booster and the Trainer do with a plain model.
    model = small()
    model.config.quantization_config = values["quantization_config"]
    with pytest.raises(UnsupportedModelError, match=rf"^the config of LlamaForCausalLM: {said}"):
        cuboid.shard(model, config)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}, r"^quantization_config\.load_in_8bit has no"),
        ({"quantization_config": FineGrainedFP8Config()}, "^quantization_config has quant_method 'fp8'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "^quantization_config has quant_method 'gptq'"),
        ({"load_in_4bit": 1}, r"^from_pretrained\(load_in_4bit=…\) can't .*=BitsAndBytesConfig"),
    ],
)
def test_quantising_while_loading_is_refused_by_the_key(start, asked, said):
    with pytest.raises(UnsupportedModelError, match=said):
        cuboid.from_pretrained(start, CONFIG, **asked)


class Wrapped(torch.Tensor):
    """As torchao's, which replace the weights of plain linear layers and leave the config as it was."""

    @staticmethod
    def __new__(cls, packed):
        return torch.Tensor._make_wrapper_subclass(cls, packed.shape, dtype=torch.bfloat16)

    def __init__(self, packed):
        self.packed = packed

    def __tensor_flatten__(self):
        return ["packed"], None

    @staticmethod
    def __tensor_unflatten__(tensors, context, size, stride):
        return Wrapped(tensors["packed"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].packed)
        raise NotImplementedError(str(function))


@pytest.mark.parametrize("weight", ["wrapped", "int8", "float8"])
def test_a_model_that_was_quantised_in_place_is_refused_by_the_weight(weight):
    model = small()
    layer = model.model.layers[1].mlp.up_proj
    packed = torch.zeros(layer.weight.shape, dtype=torch.float8_e4m3fn if weight == "float8" else torch.int8)
    layer.weight = torch.nn.Parameter(Wrapped(packed) if weight == "wrapped" else packed, requires_grad=False)
    said = r"^model\.layers\.1\.mlp\.up_proj\.weight is quantised .* LoRA"
    for config in (CONFIG, STAGED):
        with pytest.raises(UnsupportedModelError, match=said):
            cuboid.shard(model, config)


def test_a_dequantised_model_is_sharded(start):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes isn't installed")
    quantised = LlamaForCausalLM.from_pretrained(start, quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    sharded = cuboid.shard(quantised.dequantize(), CONFIG)
    assert not hasattr(sharded.config, "quantization_config")
