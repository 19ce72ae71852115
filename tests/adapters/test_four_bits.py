"""Adapters on a frozen trunk in 4 bits (QLoRA): as plain transformers with bitsandbytes, on meshes and in stages."""

import copy
import functools
import json
import re
import tempfile
import textwrap
from pathlib import Path

import deepspeed
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import cuboid
from comparing import mesh_section
from cuboid.config.schema import parse_config
from cuboid.convert.run import ConvertOptions, convert
from cuboid.distributed.topology import MeshShape
from cuboid.errors import ConfigError, CuboidError, MeshError, UnsupportedModelError
from cuboid.tensor3d.sharding.sharded_param import local_state
from cuboid.tensor3d.sharding.sharding_spec import put_shard
from cuboid.weights.state_dict_map import sharding_specs
from launching import ROOT, world
from threaded import ThreadWorld
from tiny_text import TEXTS, train_tokenizer
from training import _batches, ranks_of, settings, train

pytest.importorskip("peft", reason="PEFT isn't installed")
pytest.importorskip("bitsandbytes", reason="bitsandbytes isn't installed")
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training

STEPS = 3
#: Weights of 256 and 512 in features, each row of which has 4 or 8 scales.
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


def small(**options):
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(**{"vocab_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 64, **SIZES, **options})
    )


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    small().save_pretrained(folder)
    return str(folder)


def four_bits(compute=torch.float32, **options):
    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": compute, **options}
    return BitsAndBytesConfig(load_in_4bit=True, **options)


def quantised(asked):
    """Of ``from_pretrained``; nothing for a checkpoint that is stored in 4 bits."""
    return {} if asked is None else {"quantization_config": asked()}


def batch(rows=6, length=12):
    ids = torch.randint(0, 96, (rows, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return {"input_ids": ids, "labels": torch.where(mask.bool(), ids, -100), "attention_mask": mask}


@functools.cache
def adapter(options):
    """An adapter's folder, as plain PEFT saves it."""
    torch.manual_seed(7)
    asked = dict(options)
    vocabulary = asked.pop("vocabulary", 96)
    if asked.pop("ia3", False):
        config = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    else:
        asked = {"r": 3, "lora_alpha": 6, "init_lora_weights": False, "target_modules": "all-linear", **asked}
        config = LoraConfig(task_type="CAUSAL_LM", **asked)
    folder = tempfile.mkdtemp(prefix="adapter")
    model = get_peft_model(small(vocab_size=vocabulary), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ia3" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return folder


def adapted(model, options):
    # From a folder: ranks that are threads draw from one generator.
    folder = options if isinstance(options, str) else adapter(tuple(options.items()))
    return PeftModel.from_pretrained(model, folder, is_trainable=True)


def trained(model, options, prepare=None, micro_batch=None):
    """The loss, and gradients with what is needed to put them together; ``options`` may be an adapter's folder."""
    if prepare is not None:
        model = prepare(model)
    model = adapted(model, options).train()
    loss = model(**(micro_batch or batch()), use_cache=False).loss
    loss.backward()
    return loss.item(), model


def gradients(model):
    named = ((name.removeprefix("base_model.model."), x.grad) for name, x in model.named_parameters())
    return {name: gradient for name, gradient in named if gradient is not None}


def on_mesh(path, mesh, asked, options=None, dtype=torch.float32, prepare=None, micro_batch=None, **section):
    """Of all ranks: losses, whole gradients, and bytes of frozen weights."""

    def run():
        config = {"tensor_parallel": {**mesh_section(mesh), **section}}
        model = cuboid.from_pretrained(path, config, dtype=dtype, **quantised(asked))
        loss, model = trained(model, options or {}, prepare, micro_batch)
        inner = model.get_base_model()
        packed = sum(x.nbytes for x in inner.parameters() if x.dtype == torch.uint8)
        return loss, gradients(model), sharding_specs(inner), cuboid.mesh_of(inner), packed

    losses, whole_gradients, packed = [], {}, []
    for loss, parts, specs, place, count in ThreadWorld().run(MeshShape.parse(mesh).size, run):
        losses.append(loss)
        packed.append(count)
        for name, part in parts.items():
            full = whole_gradients.setdefault(name, part.new_zeros(specs[name].shape))
            put_shard(full, part, specs[name], place.shape, place.coordinate)
    return losses, whole_gradients, packed


def plain(path, asked, options=None, dtype=torch.float32, prepare=None, micro_batch=None):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **quantised(asked))
    loss, model = trained(model, options or {}, prepare, micro_batch)
    return loss, gradients(model)


def apart(gradients, expected):
    """The largest difference of a gradient, by its largest element."""
    assert gradients.keys() == expected.keys()
    return max(float((x - expected[name]).abs().max() / expected[name].abs().max()) for name, x in gradients.items())


CASES = [
    ("1x1x1", {}, {}),
    ("1x2x1", {}, {"bnb_4bit_use_double_quant": True}),
    ("2x1x1", {"use_dora": True}, {}),
    ("1x1x2", {"modules_to_save": ("norm",)}, {"bnb_4bit_quant_type": "fp4"}),
    ("2x2x2", {}, {"bnb_4bit_use_double_quant": True}),
    ("3x1x2", {"target_modules": ("q_proj", "v_proj", "down_proj")}, {"bnb_4bit_use_double_quant": True}),
    ("1x2x2", {"use_dora": True}, {"llm_int8_skip_modules": ["lm_head", "k_proj"]}),
    ("1x2x1", {"ia3": True}, {}),
]


@pytest.mark.sample(3, ci="others")
@pytest.mark.parametrize(("mesh", "options", "quantised"), CASES)
def test_the_loss_and_every_gradient_are_those_of_plain_transformers(start, mesh, options, quantised):
    asked = functools.partial(four_bits, **quantised)
    expected_loss, expected = plain(start, asked, options)
    losses, gathered, packed = on_mesh(start, mesh, asked, options)
    assert losses == pytest.approx([expected_loss] * len(losses), rel=1e-6)
    assert apart(gathered, expected) < 2e-5
    if quantised.get("llm_int8_skip_modules") is None and not mesh.startswith("3"):
        elements = 2 * (256 * (256 + 128 + 128 + 256) + 3 * 256 * 512)
        # Half a byte each, and four bytes for every 64.
        assert packed == [elements * 9 // 16 // len(packed)] * len(packed)


def prepared(model):
    """As scripts for QLoRA do: what isn't quantised in float32, and checkpointed layers."""
    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=True)


@pytest.mark.sample(2, ci="others")
@pytest.mark.parametrize(
    ("mesh", "dtype", "compute", "prepare"),
    [
        ("1x2x2", torch.bfloat16, torch.bfloat16, None),
        ("2x1x2", torch.bfloat16, torch.bfloat16, prepared),
        ("1x2x1", torch.float32, torch.bfloat16, None),
        ("2x1x1", torch.bfloat16, torch.float32, None),
    ],
)
def test_in_16_bits_gradients_are_as_near_to_float32_as_plain_ones(start, mesh, dtype, compute, prepare):
    asked = functools.partial(four_bits, compute)
    _, exact = plain(start, four_bits)
    _, of_plain = plain(start, asked, dtype=dtype, prepare=prepare)
    losses, gathered, _ = on_mesh(start, mesh, asked, dtype=dtype, prepare=prepare)
    assert len(set(losses)) == 1
    assert apart(gathered, exact) < 1.5 * apart(of_plain, exact)


def test_greedy_tokens_are_those_of_plain_transformers(start):
    ids = batch()["input_ids"]
    expected = AutoModelForCausalLM.from_pretrained(start, quantization_config=four_bits()).generate(
        ids, max_new_tokens=8, do_sample=False, pad_token_id=0
    )

    def run(mesh):
        config = {"tensor_parallel": mesh_section(mesh)}
        model = cuboid.from_pretrained(start, config, dtype=torch.float32, quantization_config=four_bits())
        return model.eval().generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)

    for mesh in ("1x2x1", "2x1x2"):
        for tokens in ThreadWorld().run(MeshShape.parse(mesh).size, functools.partial(run, mesh)):
            assert tokens.tolist() == expected.tolist()


def test_weights_are_gathered_in_4_bits(start):
    def sent(asked):
        def run():
            config = {"tensor_parallel": mesh_section("2x1x1")}
            model = cuboid.from_pretrained(start, config, dtype=torch.float32, quantization_config=asked)
            _, model = trained(model, {"target_modules": ("v_proj",)})
            return sum(cuboid.mesh_of(model).comm_counter.snapshot().values())

        return ThreadWorld().run(2, run)[0]

    # Forward and backward gather each weight, but for the first layer's query and key in backward.
    assert sent(None) - sent(four_bits()) > 1.5 * (4 - 9 / 16) * (256 * 768 + 3 * 256 * 512)


@pytest.mark.parametrize(
    ("section", "asked", "error", "said"),
    [
        ({}, {"load_in_8bit": True}, UnsupportedModelError, "load_in_8bit has no rule .* take load_in_4bit"),
        ({}, {"bnb_4bit_compute_dtype": torch.float64}, UnsupportedModelError, "compute_dtype is torch.float64"),
        ({}, {"llm_int8_skip_modules": []}, UnsupportedModelError, "lm_head is the head"),
        ({"compile": True}, {}, ConfigError, "tensor_parallel.compile has no rule for weights of 4 bits"),
    ],
)
def test_what_has_no_rule_is_refused_before_anything_is_read(start, section, asked, error, said):
    config = {"tensor_parallel": {**mesh_section("1x1x2"), **section}}
    options = {"load_in_4bit": "load_in_8bit" not in asked, **asked}

    def run():
        with pytest.raises(error, match=f"quantization_config.*{said}|{said}.*quantization_config"):
            cuboid.from_pretrained(start, config, quantization_config=BitsAndBytesConfig(**options))

    ThreadWorld().run(2, run)


def test_a_mesh_that_cuts_between_elements_of_one_scale_is_refused(tmp_path):
    small(hidden_size=128).save_pretrained(tmp_path)
    config = {"tensor_parallel": mesh_section("1x1x4")}

    def run():
        with pytest.raises(MeshError, match=r"q_proj would have 32 of 128 elements, and 64 neighbours share a scale"):
            cuboid.from_pretrained(str(tmp_path), config, quantization_config=four_bits())

    ThreadWorld().run(4, run)


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(("mesh", "stages"), [("2x2x1", None), ("1x1x2", 2), ("1x1x1", 2)])
def test_per_rank_files_are_rounded_as_the_checkpoint_is(start, tmp_path, monkeypatch, mesh, stages):
    config, ranks = {"tensor_parallel": mesh_section(mesh)}, MeshShape.parse(mesh).size * (stages or 1)
    if stages is not None:
        config["pipeline"] = {"engine": "seq1f1b", "stages": stages, "segments": 2}
    convert(ConvertOptions(Path(start), tmp_path / "ranks", config=parse_config(config), quiet=True), print)
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    for rank in range(ranks):
        monkeypatch.setenv("RANK", str(rank))
        states = [
            local_state(cuboid.from_pretrained(path, config, dtype=torch.bfloat16, quantization_config=four_bits()))
            for path in (start, tmp_path / "ranks")
        ]
        assert all(x.dtype == torch.uint8 for name, x in states[0].items() if name.endswith("_proj.weight"))
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(x, states[1][name]) for name, x in states[0].items() if isinstance(x, torch.Tensor))


def config_of(mesh, stages, **pipeline):
    config = settings(mesh, stages, zero=1, learning_rate=1e-2, pipeline=pipeline)
    del config["scheduler"]
    # Large, so that an update doesn't depend on the rounding of a gradient that is about zero.
    config["optimizer"]["params"]["eps"] = 1e-4
    return config


NESTED = functools.partial(four_bits, bnb_4bit_use_double_quant=True)


def engine_of(path, folder, config):
    model = cuboid.from_pretrained(path, config, dtype=torch.float32, quantization_config=NESTED())
    model = PeftModel.from_pretrained(model, folder, is_trainable=True)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=parameters, config=config)[0]


def trained_sharded(path, folder, config, other, root):
    """Losses of four steps, the last of which is from a checkpoint, on another layout."""
    engine = engine_of(path, folder, config)
    losses = train(engine, STEPS)
    engine.save_checkpoint(root)
    engine.module.save_pretrained(f"{root}/adapter")
    again = engine_of(path, folder, other)
    again.load_checkpoint(root)
    return losses + train(again, 1, skip=STEPS), float(engine.get_global_grad_norm())


def trained_plain(path, folder):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, quantization_config=NESTED()).train()
    model = PeftModel.from_pretrained(model, folder, is_trainable=True)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, eps=1e-4)
    batches, losses = _batches(0, 1), []
    for step in range(STEPS + 1):
        losses.append(0.0)
        for _ in range(2):
            loss = model(**next(batches)).loss / 2
            loss.backward()
            losses[-1] += float(loss.detach())
        if step < STEPS:
            norm = float(torch.nn.utils.clip_grad_norm_(parameters, 1.0))
            optimizer.step()
            optimizer.zero_grad()
    return losses, norm, {name: x.detach() for name, x in model.named_parameters() if x.requires_grad}


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(
    ("layout", "pipeline", "other"),
    [
        (("1x1x1", 2), {"schedule": "zero_bubble", "head": "spread"}, ("1x2x1", None)),
        (("1x1x2", None), {}, ("1x1x1", 2)),
        (("1x2x1", 2), {"schedule": "zero_bubble"}, ("2x1x2", None)),
    ],
)
def test_training_and_resuming_under_deepspeed_are_those_of_plain_transformers(pool, tmp_path, layout, pipeline, other):
    path, folder = tmp_path / "start", adapter((("init_lora_weights", False), ("vocabulary", 131)))
    small(vocab_size=131).save_pretrained(path)
    config, resumed = config_of(*layout, **pipeline), config_of(*other)
    arguments = str(path), folder, config, resumed, str(tmp_path / "out")
    results = pool.run(ranks_of(config), trained_sharded, *arguments, timeout_s=120.0)
    losses, norm, state = trained_plain(str(path), folder)
    for rank_losses, rank_norm in results:
        assert rank_losses == pytest.approx(losses, rel=5e-6)
        assert rank_norm == pytest.approx(norm, rel=1e-4)
    saved = load_file(tmp_path / "out/adapter/adapter_model.safetensors")
    for name, value in state.items():
        torch.testing.assert_close(saved[name.replace(".default", "")], value, rtol=1e-4, atol=1e-4, msg=name)


WITHOUT_BUILD = """
    import runpy, sys
    import deepspeed

    # Where there is no GPU, init_distributed would compile it for a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.ci
def test_the_example_trains_an_adapter_for_each_text_on_one_trunk(tmp_path):
    tokenizer = train_tokenizer(TEXTS, 300)
    small(vocab_size=300, hidden_size=128, intermediate_size=256).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    paths = [tmp_path / "first", tmp_path / "second"]
    for path, text in zip(paths, ("".join(TEXTS), "".join(reversed(TEXTS))), strict=True):
        path.write_text(text[:4000])
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "tensor_parallel": mesh_section("1x2x1"),
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "script.py").write_text(textwrap.dedent(WITHOUT_BUILD))
    command, out = (tmp_path / "script.py", ROOT / "docs/examples/qlora.py"), tmp_path / "out"
    status, output = world(2, *command, tmp_path / "model", out, tmp_path / "config.json", *paths)
    assert status == 0, output
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32, quantization_config=NESTED()
    ).eval()
    for number, path in enumerate(paths):
        ids = tokenizer(path.read_text(), return_tensors="pt").input_ids[:, :256].view(4, 64)
        with torch.no_grad():
            before = float(model(input_ids=ids, labels=ids).loss)
            adapted = PeftModel.from_pretrained(copy.deepcopy(model), out / f"text{number}")
            assert float(adapted(input_ids=ids, labels=ids).loss) < before - 0.3


def test_transposed_weights_are_refused(tmp_path):
    GPT2LMHeadModel(GPT2Config(n_embd=128, n_layer=1, n_head=2, vocab_size=96, n_positions=32)).save_pretrained(
        tmp_path
    )
    with pytest.raises(UnsupportedModelError, match="c_attn stores its weight transposed"):
        cuboid.from_pretrained(
            str(tmp_path), {"tensor_parallel": mesh_section("1x1x1")}, quantization_config=four_bits()
        )


def test_what_would_round_again_or_needs_whole_weights_is_refused(start, tmp_path):
    config = {"tensor_parallel": mesh_section("1x1x1")}
    model = cuboid.from_pretrained(start, config, dtype=torch.float32, quantization_config=four_bits())
    for save in (cuboid.full_state_dict, lambda model: cuboid.save_pretrained(model, tmp_path / "saved")):
        with pytest.raises(UnsupportedModelError, match=r"stored in 4 bits .* save the adapter"):
            save(model)
    assert not any(tmp_path.iterdir())
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(CuboidError, match=re.escape("torch.float32 (bnb_4bit_compute_dtype), and torch.autocast")),
    ):
        model(**batch())
    peft_model = adapted(model, {})
    for merge in (peft_model.merge_adapter, peft_model.merge_and_unload):
        with pytest.raises(UnsupportedModelError, match=r"a weight of 4 bits .* rounded again"):
            merge()
