"""axolotl trains on a mesh by its own command, with Cuboid's plugin and JSON, as it does in one process.

axolotl isn't among the packages that the tests install. An environment for it is made in ``build/axolotl`` once, with
its own versions of transformers, accelerate, PEFT and TRL in front of those in ``.venv``.
"""

import json
import random
import textwrap

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from extra_packages import search_path_with
from launching import BIN, run

pytestmark = pytest.mark.slow

#: axolotl with the versions that it asks for, and what its command imports beside Cuboid's requirements.
PACKAGES = (
    *("axolotl==0.19.0", "transformers==5.16.1", "accelerate==1.13.0", "peft==0.20.0", "trl==1.9.0"),
    *("huggingface_hub==1.17.0", "datasets==4.8.4", "multiprocess==0.70.16", "dill==0.3.8", "pydantic==2.12.5"),
    *("pydantic_core==2.41.5", "kernels==0.16.0", "evaluate==0.4.1", "schedulefree==1.4.1", "posthog==7.91.1"),
    *("axolotl-contribs-lgpl==0.0.7", "axolotl-contribs-mit==0.0.6", "kernels-data", "mistral_common", "triton"),
    *("pyarrow", "pandas", "xxhash", "httpx", "httpcore", "certifi", "requests", "urllib3", "charset-normalizer"),
    *("aiohttp", "aiosignal", "aiohappyeyeballs", "attrs", "frozenlist", "multidict", "propcache", "yarl", "six"),
    *("pytz", "tzdata", "python-dateutil", "addict", "art", "backoff", "colorama", "distro", "fastcore", "fire"),
    *("termcolor", "jsonschema", "jsonschema-specifications", "referencing", "rpds-py", "pycountry", "numba"),
    *("llvmlite", "platformdirs", "protobuf", "pydantic-extra-types", "python-dotenv", "sentencepiece", "tensorboard"),
    *("tiktoken", "wandb", "sentry-sdk", "gitpython", "gitdb", "smmap", "opentelemetry-api", "opentelemetry-sdk"),
    *("opentelemetry-semantic-conventions", "opentelemetry-exporter-otlp-proto-http", "zipp", "importlib-metadata"),
    *("opentelemetry-exporter-otlp-proto-common", "opentelemetry-proto", "googleapis-common-protos", "zstandard"),
)
#: So that one process draws adapters as the ranks of a mesh do.
SEEDED = """
    from axolotl.integrations.base import BasePlugin
    from transformers import set_seed

    class Seeded(BasePlugin):
        def pre_model_load(self, cfg):
            set_seed(cfg.seed)
"""
RECIPE = {
    "sequence_len": 64,
    **{"micro_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4, "num_epochs": 1, "seed": 3},
    # Not Adam, whose steps of gradients near 0 are those of their rounding.
    **{"optimizer": "sgd", "lr_scheduler": "constant", "learning_rate": 0.5, "logging_steps": 1},
    **{"bf16": False, "fp16": False, "tf32": False, "save_strategy": "no"},
}
LORA = {
    **{"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True},
    # Kernels of axolotl's own, for GPUs; Cuboid's layers compute with adapters themselves.
    **{"lora_mlp_kernel": False, "lora_qkv_kernel": False, "lora_o_kernel": False},
}
SETTINGS = {"AXOLOTL_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}


@pytest.fixture(scope="module")
def environment():
    return {"PYTHONPATH": search_path_with("axolotl", PACKAGES), **SETTINGS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small Llama, its tokenizer and texts."""
    root = tmp_path_factory.mktemp("axolotl")
    words = [f"w{at}" for at in range(120)]
    vocabulary = {word: at for at, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(root / "model")
    torch.manual_seed(0)
    # Rows of weights that a mesh cuts into whole blocks of 64, which share a scale in 4 bits.
    sizes = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(root / "model")
    draw = random.Random(0)
    texts = [" ".join(draw.choices(words, k=20 + at % 20)) for at in range(64)]
    (root / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (root / "seeded.py").write_text(textwrap.dedent(SEEDED))
    return root


def train(folder, environment, out, ranks, recipe, **section):
    """Run axolotl's command; what it has written."""
    texts = {"path": f"{folder}/data.jsonl", "ds_type": "json", "type": "completion"}
    folders = {"base_model": "model", "output_dir": out, "dataset_prepared_path": f"prepared_{out}"}
    recipe = {**RECIPE, **recipe, "datasets": [texts], "plugins": ["seeded.Seeded"]}
    recipe |= {key: str(folder / name) for key, name in folders.items()}
    if section:
        sizes = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
        zero = {"zero_optimization": {"stage": 1}, "gradient_clipping": "auto", "zero_allow_untested_optimizer": True}
        (folder / f"{out}.json").write_text(json.dumps({**sizes, **zero, **section}))
        recipe |= {"deepspeed": f"{folder}/{out}.json", "plugins": ["cuboid.integrations.axolotl.AxolotlPlugin"]}
    (folder / f"{out}.yml").write_text(json.dumps(recipe))  # JSON is YAML
    path = f"{environment['PYTHONPATH']}:{folder}"
    command = ["-m", "axolotl.cli.train", folder / f"{out}.yml"]
    launcher = [BIN / "torchrun", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else [BIN / "python"]
    return run(*launcher, *command, **{**environment, "PYTHONPATH": path})


def weights(folder):
    """What a folder has: an adapter's tensors, or a model's."""
    adapter = folder / "adapter_model.safetensors"
    return load_file(adapter) if adapter.exists() else LlamaForCausalLM.from_pretrained(folder).state_dict()


QLORA = {**LORA, "adapter": "qlora", "load_in_4bit": True}
PACKED = {"sample_packing": True, "attn_implementation": "sdpa"}


@pytest.mark.parametrize("name", ["full", "lora", "qlora", "packed"])
def test_axolotls_command_trains_on_a_mesh_as_in_one_process(folder, environment, name):
    recipe = {"full": {}, "lora": LORA, "qlora": QLORA, "packed": PACKED}[name]
    status, output = train(folder, environment, f"{name}_plain", 1, recipe)
    assert status == 0, output
    mesh = {"tensor_parallel": {"mode": "3d_tensor", "mesh": {"sequence": 2}}}
    status, output = train(folder, environment, f"{name}_mesh", 2, recipe, **mesh)
    assert status == 0, output
    expected, trained = weights(folder / f"{name}_plain"), weights(folder / f"{name}_mesh")
    assert set(trained) == set(expected)
    for key, tensor in expected.items():
        torch.testing.assert_close(trained[key], tensor, rtol=1e-4, atol=1e-5, msg=lambda text: f"{key}: {text}")  # noqa: B023
    if "lora" in name:
        assert all(tensor.any() for key, tensor in trained.items() if "lora_B" in key)
    else:
        start = weights(folder / "model")
        assert not any(torch.equal(start[key], tensor) for key, tensor in trained.items())


@pytest.mark.parametrize(
    ("recipe", "said"),
    [(LORA, "LoRA of rank 4 on all-linear"), (QLORA, "LoRA of rank 4 on all-linear, the rest frozen in 4 bits")],
    ids=["lora", "qlora"],
)
def test_an_automatic_mesh_is_decided_for_the_recipe(folder, environment, recipe, said):
    sections = {"tensor_parallel": {"mode": "3d_tensor", "mesh": "auto", "size": 2}, "cluster": "1x2xH100-80GB"}
    status, output = train(folder, environment, "automatic", 2, {**recipe, "max_steps": 1}, **sections)
    assert status == 0, output
    assert "for micro-batches of 2 rows of 64 tokens on" in output
    assert said in output
    assert "was decided for" not in output


@pytest.mark.parametrize(
    ("recipe", "section", "message"),
    [
        (
            {},
            {"pipeline": {"engine": "seq1f1b", "stages": 2, "segments": 2}},
            "pipeline.stages: axolotl's trainers call the model's forward",
        ),
        (
            {**LORA, "lora_o_kernel": True},
            {"tensor_parallel": {"mode": "3d_tensor", "mesh": {"hidden": 2}}},
            "lora_o_kernel: these compute with a whole matrix and its adapter",
        ),
    ],
    ids=["stages", "kernels"],
)
def test_what_a_mesh_cant_do_is_refused_as_the_model_is_loaded(folder, environment, recipe, section, message):
    status, output = train(folder, environment, "refused", 2, recipe, **section)
    assert status != 0
    assert message in output
