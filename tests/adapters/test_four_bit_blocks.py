"""Adapters on a trunk in 4 bits whose blocks each rank computes whole, beside plain transformers with bitsandbytes."""

import functools

import pytest
import torch
from test_four_bits import apart, four_bits, on_mesh, plain
from transformers import AutoModelForCausalLM

import cuboid
from comparing import mesh_section
from cuboid.errors import MeshError, UnsupportedModelError
from cuboid.verify import SmallModel
from threaded import ThreadWorld

pytest.importorskip("peft", reason="PEFT isn't installed")
pytest.importorskip("bitsandbytes", reason="bitsandbytes isn't installed")
from peft import LoraConfig, get_peft_model

#: Keys of configs for the features inside of an MLP.
INNER = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Of a type, the folders of a small model without dropout, and of an adapter of all its linear layers."""

    @functools.cache
    def written(architecture, head_dim=64, **options):
        folder = tmp_path_factory.mktemp(architecture)
        torch.manual_seed(0)
        config = SmallModel(architecture, heads=4, head_dim=head_dim, layers=2, vocabulary=96).config()
        for name, value in vars(config).items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)
            if name in INNER and isinstance(value, int):
                setattr(config, name, 512)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder / "model")
        lora = {"r": 3, "lora_alpha": 6, "init_lora_weights": False, "target_modules": "all-linear", **options}
        get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **lora)).save_pretrained(folder / "adapter")
        ids = torch.randint(0, config.vocab_size, (6, 12), generator=torch.Generator().manual_seed(1))
        return str(folder / "model"), str(folder / "adapter"), {"input_ids": ids, "labels": ids}

    return written


NESTED = {"bnb_4bit_use_double_quant": True}
OTHERS = ("phi3", "bloom", "opt", "gpt_neox", "gpt_bigcode", "codegen", "mpt", "phi", "gptj", "stablelm")


@pytest.mark.sample(2, ci="others")
@pytest.mark.parametrize(
    ("architecture", "mesh", "quantised", "options"),
    [
        ("phi3", "1x2x1", NESTED, {}),
        ("mpt", "1x1x2", {}, {}),
        # Rows of 96 elements, of which three scales belong to two.
        ("phi3", "2x1x1", NESTED, {"head_dim": 24}),
        ("bloom", "2x1x1", {"bnb_4bit_quant_type": "fp4"}, {}),
        ("phi3", "3x1x2", NESTED, {"use_dora": True}),
        ("phi3", "1x1x1", NESTED, {}),
        *(
            pytest.param(architecture, mesh, NESTED, {}, marks=pytest.mark.slow)
            for architecture in OTHERS
            for mesh in ("1x2x1", "1x1x2", "2x1x1", "1x2x2")
        ),
    ],
)
def test_the_loss_and_every_gradient_are_those_of_plain_transformers(start, architecture, mesh, quantised, options):
    path, adapter, micro_batch = start(architecture, **options)
    asked = functools.partial(four_bits, **quantised)
    expected_loss, expected = plain(path, asked, adapter, micro_batch=micro_batch)
    losses, gathered, packed = on_mesh(path, mesh, asked, adapter, micro_batch=micro_batch)
    assert losses == pytest.approx([expected_loss] * len(losses), rel=1e-6)
    assert apart(gathered, expected) < 1e-5
    assert min(packed) > 0


def load(path, mesh):
    return cuboid.from_pretrained(path, {"tensor_parallel": mesh_section(mesh)}, quantization_config=four_bits())


def test_a_mesh_that_cuts_rows_between_elements_of_one_scale_is_refused(start):
    path, _, _ = start("phi3", head_dim=20)
    said = r"a rank would have 27 of the 80 rows of model.layers.0.self_attn.o_proj, each of 80 .* multiples of 4 rows"

    def run():
        with pytest.raises(MeshError, match=said):
            load(path, "3x1x1")

    ThreadWorld().run(3, run)


def test_linear_layers_of_another_class_than_torchs_are_not_quantised(start):
    with pytest.raises(UnsupportedModelError, match="FalconForCausalLM has no linear layer that transformers would"):
        load(start("falcon")[0], "1x1x1")
