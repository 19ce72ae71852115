"""`cuboid convert`: values are exact, memory stays small, and damaged checkpoints are rejected."""

import json
import os
import shutil
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import launching
from comparing import stored
from converting import nothing_left, run, same
from cuboid.checkpoint.format.tensor_file import TensorSpec
from cuboid.cli import commands
from cuboid.convert.formats.block_tensors import BlockTensors
from cuboid.convert.formats.parameter_names import as_stored, blank_model, state_specs
from cuboid.errors import CheckpointError
from cuboid.verify import SmallModel
from training import make_engine, train
from training import settings as training_settings

LLAMA = SmallModel("llama", heads=8, kv_heads=4, layers=3)
TIED = SmallModel("qwen3", heads=8, kv_heads=4, layers=2)
FUSED = SmallModel("gpt2", heads=8, kv_heads=8, layers=2)
EXPERTS = SmallModel("mixtral", heads=4, kv_heads=2, layers=2)


def invoke(*arguments):
    return CliRunner().invoke(commands, [str(argument) for argument in arguments], standalone_mode=False)


# --- Hugging Face folders ----------------------------------------------------------------------------------------


def test_a_copy_in_several_files_equals_what_transformers_writes(checkpoint, tmp_path):
    path = checkpoint(LLAMA)
    run(path, tmp_path / "ours", max_shard_bytes=200_000)
    model = AutoModelForCausalLM.from_pretrained(path)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="200KB")
    names = {file.name for file in (tmp_path / "theirs").glob("*.safetensors")}
    assert len(names) > 2
    assert {file.name for file in (tmp_path / "ours").glob("*.safetensors")} == names
    assert same(tmp_path / "ours", path)
    ours, theirs = (json.loads((tmp_path / x / "model.safetensors.index.json").read_text()) for x in ("ours", "theirs"))
    assert ours["metadata"] == theirs["metadata"]
    for name, file in ours["weight_map"].items():
        with safe_open(tmp_path / "ours" / file, "pt") as opened:
            assert name in opened.keys()  # noqa: SIM118
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert all(torch.equal(again.state_dict()[name], x) for name, x in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_cast_equals_torchs_and_sets_the_dtype_in_the_config(checkpoint, tmp_path, dtype):
    path = checkpoint(FUSED)
    run(path, tmp_path / "cast", dtype=dtype)
    before, after = stored(path), stored(tmp_path / "cast")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], x.to(dtype)) for name, x in before.items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "cast").dtype == dtype


def test_tensors_of_integers_are_never_cast(checkpoint, tmp_path):
    shutil.copytree(checkpoint(LLAMA), tmp_path / "source")
    tensors = stored(tmp_path / "source") | {"counts": torch.arange(2**24 + 1, 2**24 + 5), "none": torch.empty(0, 3)}
    tensors["number"] = torch.tensor(1.5)
    save_file(tensors, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    run(tmp_path / "source", tmp_path / "cast", dtype=torch.bfloat16)
    after = stored(tmp_path / "cast")
    assert torch.equal(after["counts"], tensors["counts"])
    assert after["none"].shape == (0, 3)
    assert after["number"] == torch.tensor(1.5, dtype=torch.bfloat16)


#: Models that transformers doesn't cast as a whole: routers' biases, for both dtypes; others for float16 alone.
KEPT = {
    "deepseek_v3": ("DeepseekV3ForCausalLM", {torch.bfloat16: 1, torch.float16: 1}),
    "gpt_oss": ("GptOssForCausalLM", {torch.bfloat16: 0, torch.float16: 5}),
    "t5": ("T5ForConditionalGeneration", {torch.bfloat16: 0, torch.float16: 4}),
}


@pytest.mark.parametrize("architecture", KEPT)
def test_a_cast_keeps_in_float32_what_transformers_does(tmp_path, architecture):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4}
    experts = {"n_routed_experts": 8, "num_local_experts": 4, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
    latents = {"n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
    dims = {"qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2}
    if architecture == "t5":
        sizes, dims = {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4}, {"d_kv": 8}
    config = AutoConfig.for_model(architecture, vocab_size=64, **sizes, **experts, **latents, **dims)
    name, counts = KEPT[architecture]
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    model = cls(config)
    for x in (*model.parameters(), *model.buffers()):
        # Values that 16 bits can't hold.
        x.data.add_(1.0 + torch.rand_like(x) * 1e-4) if x.is_floating_point() else None
    model.save_pretrained(tmp_path / "source")
    for dtype, count in counts.items():
        text = str(dtype)
        cls.from_pretrained(tmp_path / "source", dtype=dtype).save_pretrained(tmp_path / "plain" / text)
        run(tmp_path / "source", tmp_path / text, dtype=dtype)
        assert same(tmp_path / text, tmp_path / "plain" / text)
        after = stored(tmp_path / text)
        assert sum(x.dtype is torch.float32 for x in after.values()) == count
        assert json.loads((tmp_path / text / "config.json").read_text())["dtype"] == text.removeprefix("torch.")
        # From 16 bits, too: the loader widens what the model keeps.
        run(tmp_path / text, tmp_path / "again" / text, dtype=dtype)
        assert same(tmp_path / "again" / text, tmp_path / text)


def test_a_model_without_a_class_is_only_cast_to_what_rounds_nothing(checkpoint, tmp_path):
    shutil.copytree(checkpoint(LLAMA), tmp_path / "source")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    (tmp_path / "source" / "config.json").write_text(json.dumps(config | {"model_type": "unheard_of"}))
    with pytest.raises(CheckpointError, match=r"unheard_of.*; so it isn't known which of its tensors stay in float32"):
        run(tmp_path / "source", tmp_path / "cast", dtype=torch.bfloat16)
    assert nothing_left(tmp_path / "cast")
    run(tmp_path / "source", tmp_path / "wide", dtype=torch.float64)
    assert {x.dtype for x in stored(tmp_path / "wide").values()} == {torch.float64}


def test_a_value_out_of_float16s_range_is_rejected_with_the_tensors_name(checkpoint, tmp_path):
    shutil.copytree(checkpoint(LLAMA), tmp_path / "source")
    tensors = stored(tmp_path / "source")
    tensors["model.norm.weight"][3] = 70_000.0
    tensors["lm_head.weight"][0, 0] = torch.inf
    tensors["lm_head.weight"][0, 1] = torch.nan
    save_file(tensors, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds 70000, .* 65504"):
        run(tmp_path / "source", tmp_path / "cast", dtype=torch.float16)
    assert nothing_left(tmp_path / "cast")
    run(tmp_path / "source", tmp_path / "cast", dtype=torch.bfloat16)
    head = stored(tmp_path / "cast")["lm_head.weight"]
    assert head[0, 0] == torch.inf
    assert head[0, 1].isnan()


@settings(max_examples=50)
@given(st.lists(st.floats(width=32), min_size=1, max_size=8), st.sampled_from([torch.float16, torch.bfloat16]))
def test_a_cast_is_rejected_exactly_if_a_finite_number_becomes_infinite(values, dtype):
    block = torch.tensor(values, dtype=torch.float32)
    tensors = BlockTensors({"x": TensorSpec(block.dtype, tuple(block.shape))}, lambda _: iter([block]))
    tensors = tensors.cast({"x": dtype})
    if (block.to(dtype).isinf() & block.isfinite()).any():
        with pytest.raises(CheckpointError, match="x holds"):
            list(tensors.blocks("x"))
    else:
        assert torch.equal(next(tensors.blocks("x")).nan_to_num(7.0), block.to(dtype).nan_to_num(7.0))


def test_files_beside_the_weights_are_copied_and_skipped_ones_are_named(checkpoint, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(checkpoint(LLAMA), source)
    kept = [
        "tokenizer.json",
        "vocab.txt",
        "spiece.model",
        "chat_template.jinja",
        "modeling_own.py",
        "README.md",
        "LICENSE",
    ]
    for name in kept:
        (source / name).write_text(f'{{"text": "of {name}"}}')
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (source / "optimizer.pt").write_bytes(b"x")
    (source / "runs").mkdir()
    (source / "runs" / "events").write_text("x")
    output = run(source, tmp_path / "copy", dtype=torch.bfloat16)
    assert all((tmp_path / "copy" / name).read_text() == f'{{"text": "of {name}"}}' for name in kept)
    assert (tmp_path / "copy" / "additional_chat_templates" / "tools.jinja").read_text() == "{{ tools }}"
    assert json.loads((tmp_path / "copy" / "generation_config.json").read_text())
    assert "left out: optimizer.pt, runs/" in output


def test_pickled_weights_need_trust_and_then_convert_to_the_same(checkpoint, tmp_path):
    path = Path(checkpoint(LLAMA))
    tensors = stored(path)
    (tmp_path / "old").mkdir()
    shutil.copy(path / "config.json", tmp_path / "old")
    halves = [dict(list(tensors.items())[part::2]) for part in range(2)]
    weight_map = {}
    for number, half in enumerate(halves, 1):
        file = f"pytorch_model-0000{number}-of-00002.bin"
        # Including a view that starts in the middle of its storage.
        torch.save({name: torch.cat([x, x])[len(x) :] for name, x in half.items()}, tmp_path / "old" / file)
        weight_map |= dict.fromkeys(half, file)
    (tmp_path / "old" / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"pytorch_model-00001-of-00002\.bin: is a pickle.*--trust-pickle"):
        run(tmp_path / "old", tmp_path / "new")
    assert nothing_left(tmp_path / "new")
    run(tmp_path / "old", tmp_path / "new", trust_pickle=True)
    assert same(tmp_path / "new", path)


class Harm:
    """Unpickling this without ``weights_only`` creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_that_would_run_code_is_rejected_even_with_trust(checkpoint, tmp_path):
    (tmp_path / "old").mkdir()
    shutil.copy(Path(checkpoint(LLAMA)) / "config.json", tmp_path / "old")
    torch.save({"a": torch.ones(2), "b": Harm(tmp_path / "harm")}, tmp_path / "old" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: holds more than tensors"):
        run(tmp_path / "old", tmp_path / "new", trust_pickle=True)
    assert not (tmp_path / "harm").exists()


def test_pickles_that_cannot_be_streamed_are_rejected_with_the_reason(checkpoint, tmp_path):
    (tmp_path / "old").mkdir()
    file = tmp_path / "old" / "pytorch_model.bin"
    shutil.copy(Path(checkpoint(LLAMA)) / "config.json", tmp_path / "old")
    torch.save({"a": torch.arange(6.0).view(2, 3).T}, file)
    with pytest.raises(CheckpointError, match="a is stored as a view"):
        run(tmp_path / "old", tmp_path / "new", trust_pickle=True)
    torch.save({"a": torch.ones(6)}, file, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"format before torch 1\.6"):
        run(tmp_path / "old", tmp_path / "new", trust_pickle=True)
    torch.save({"a": torch.ones(6)}, file)
    intact = file.read_bytes()
    for damaged in (intact[:-40], intact.replace(torch.ones(6).numpy().tobytes(), torch.zeros(6).numpy().tobytes())):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: is not a complete file"):
            run(tmp_path / "old", tmp_path / "new", trust_pickle=True)


# --- damaged and unknown checkpoints -----------------------------------------------------------------------------


@pytest.fixture
def several_files(checkpoint, tmp_path):
    """A checkpoint in several files, to be damaged."""
    run(checkpoint(LLAMA), tmp_path / "several", max_shard_bytes=200_000)
    return tmp_path / "several"


def truncate(folder):
    file = folder / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def remove(folder):
    (folder / "model-00002-of-00003.safetensors").unlink()


def rename_in_index(folder):
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("lm_head.weight", "lm_head.heavy"))


def forget_in_index(folder):
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["lm_head.weight"]
    index.write_text(json.dumps(content))


def leave_the_folder(folder):
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00002", "../model-00002"))


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (truncate, r"model-00002-of-00003\.safetensors: is \d+ bytes long"),
        (remove, r"model-00002-of-00003\.safetensors: can't be opened"),
        (rename_in_index, r"has no tensor lm_head\.heavy, though model\.safetensors\.index\.json says so"),
        (forget_in_index, r"has a tensor lm_head\.weight, of which model\.safetensors\.index\.json says nothing"),
        (leave_the_folder, r"names \.\./model-00002-of-00003\.safetensors, which isn't a file beside it"),
    ],
)
def test_a_damaged_checkpoint_is_rejected_with_the_files_name(several_files, tmp_path, damage, expected):
    damage(several_files)
    with pytest.raises(CheckpointError, match=expected):
        run(several_files, tmp_path / "new")
    assert nothing_left(tmp_path / "new")


def test_the_error_for_an_unknown_folder_lists_the_known_kinds(tmp_path):
    (tmp_path / "some").mkdir()
    with pytest.raises(CheckpointError, match=r"Hugging Face.*cuboid.*per-rank.*DeepSpeed"):
        run(tmp_path / "some", tmp_path / "new")
    with pytest.raises(CheckpointError, match="does not exist"):
        run(tmp_path / "none", tmp_path / "new")
    (tmp_path / "global_step1.incomplete").mkdir()
    with pytest.raises(CheckpointError, match="never finished"):
        run(tmp_path / "global_step1.incomplete", tmp_path / "new")


def test_a_target_with_files_is_never_overwritten(checkpoint, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="exists already"):
        run(checkpoint(LLAMA), tmp_path / "there")
    assert (tmp_path / "there" / "file").read_text() == "mine"
    (tmp_path / "there" / "file").unlink()
    run(checkpoint(LLAMA), tmp_path / "there")
    assert same(tmp_path / "there", checkpoint(LLAMA))


def test_quantized_weights_are_not_cast(checkpoint, tmp_path):
    shutil.copytree(checkpoint(LLAMA), tmp_path / "source")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    (tmp_path / "source" / "config.json").write_text(json.dumps(config | {"quantization_config": {"bits": 4}}))
    with pytest.raises(CheckpointError, match="quantized"):
        run(tmp_path / "source", tmp_path / "new", dtype=torch.bfloat16)
    run(tmp_path / "source", tmp_path / "new")
    assert json.loads((tmp_path / "new" / "config.json").read_text()) == config | {"quantization_config": {"bits": 4}}


@pytest.mark.parametrize("small", [LLAMA, TIED, FUSED, EXPERTS])
def test_as_stored_equals_what_transformers_saves(checkpoint, small):
    path = checkpoint(small)
    model, before = blank_model(Path(path)), stored(path)
    ties = model.all_tied_weights_keys
    state = {name: x for name, x in AutoModelForCausalLM.from_pretrained(path).state_dict().items() if name not in ties}
    specs = {name: spec for name, spec in state_specs(model).items() if name in state}
    tensors = as_stored(model, BlockTensors(specs, lambda name: iter(state[name].split(5))))
    assert tensors.specs.keys() == before.keys()
    assert all(torch.equal(torch.cat(list(tensors.blocks(name))), x) for name, x in before.items())


# --- checkpoints of cuboid ---------------------------------------------------------------------------------------


def save_some(path, config, out):
    """The full fp32 weights of an engine that saved two checkpoints."""
    engine = make_engine(path, config)
    train(engine, 1)
    engine.save_checkpoint(out)
    train(engine, 2, skip=1)
    engine.save_checkpoint(out)


@pytest.fixture(scope="module")
def trained(pool, checkpoint, tmp_path_factory):
    """A folder with two checkpoints of a model in bfloat16, with fp32 weights beside it."""
    out = tmp_path_factory.mktemp("trained")
    pool.run(2, save_some, checkpoint(LLAMA), training_settings("1x2x1", bf16=True), str(out))
    return out


def test_the_latest_checkpoint_of_cuboid_is_converted_to_its_weights(trained, tmp_path):
    output = run(trained, tmp_path / "weights", max_shard_bytes=100_000)
    assert same(tmp_path / "weights", trained / "global_step3")
    left = next(line for line in output if line.startswith("left out: "))
    assert {"optimizer/", "state.json"} <= set(left.removeprefix("left out: ").split(", "))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "weights").dtype == torch.bfloat16
    run(trained / "global_step1", tmp_path / "first")
    assert same(tmp_path / "first", trained / "global_step1")
    assert not same(tmp_path / "first", tmp_path / "weights")


def test_master_takes_the_fp32_weights_of_a_checkpoint_of_cuboid(trained, tmp_path):
    run(trained, tmp_path / "masters", master=True)
    masters, rounded = stored(tmp_path / "masters"), stored(trained / "global_step3")
    assert masters.keys() == rounded.keys()
    assert all(torch.equal(x.bfloat16(), rounded[name]) for name, x in masters.items())
    assert any(not torch.equal(x, rounded[name].float()) for name, x in masters.items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "masters").dtype == torch.float32


def test_a_truncated_checkpoint_of_cuboid_is_rejected(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "copy")
    file = next((tmp_path / "copy" / "global_step3").glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=file.name):
        run(tmp_path / "copy", tmp_path / "new")


# --- memory, interruption and the command line -------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint of more than 2 GiB with two tensors of 1 GiB, in sparse files."""
    folder = tmp_path_factory.mktemp("large")
    config = LlamaConfig(
        vocab_size=131072,
        hidden_size=2048,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        dtype="float32",
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        state = LlamaForCausalLM(config).state_dict()
    header, end = {}, 0
    for name, x in state.items():
        header[name] = {"dtype": "F32", "shape": list(x.shape), "data_offsets": [end, end + 4 * x.numel()]}
        end += 4 * x.numel()
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    assert end > 2**31
    yield folder
    shutil.rmtree(folder)


MEASURED = """
    import resource, sys
    from pathlib import Path

    import torch

    from cuboid.config.schema import parse_config
    from cuboid.convert.run import ConvertOptions, convert

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    source, target, dtype, mesh = sys.argv[1:]
    config = None
    if mesh:
        axes = dict(zip(("batch", "sequence", "hidden"), map(int, mesh.split("x"))))
        config = parse_config({"tensor_parallel": {"mode": "3d_tensor", "mesh": axes}})
    options = ConvertOptions(
        Path(source), Path(target), dtype=getattr(torch, dtype) if dtype else None, config=config, quiet=True
    )
    before = peak()
    convert(options, lambda _: None)
    print("RESULT", peak() - before)
"""


def grown_mib(tmp_path, source, target, dtype="", mesh=""):
    """Memory that a conversion takes in its own process, in addition to that of its imports."""
    (tmp_path / "measured.py").write_text(textwrap.dedent(MEASURED))
    status, output = launching.run(sys.executable, tmp_path / "measured.py", source, target, dtype, mesh)
    assert status == 0, output
    return float(output.rpartition("RESULT")[2])


@pytest.mark.slow
def test_two_gigabytes_are_converted_in_600_mib(large, tmp_path):
    assert grown_mib(tmp_path, large, tmp_path / "cast", dtype="bfloat16") <= 600
    total = sum(file.stat().st_size for file in (tmp_path / "cast").glob("*.safetensors"))
    assert total > 2**30
    shutil.rmtree(tmp_path / "cast")


@pytest.mark.slow
def test_two_gigabytes_are_converted_to_per_rank_files_and_back_in_600_mib(large, tmp_path):
    assert grown_mib(tmp_path, large, tmp_path / "ranks", mesh="1x2x2") <= 600
    assert grown_mib(tmp_path, tmp_path / "ranks", tmp_path / "back") <= 600
    shutil.rmtree(tmp_path / "ranks")
    shutil.rmtree(tmp_path / "back")


@pytest.mark.ci
def test_a_killed_conversion_leaves_no_target(large, checkpoint, tmp_path):
    target = tmp_path / "target"
    begun = target.with_name("target.converting")
    process = launching.start(launching.BIN / "cuboid", "convert", large, target, "--quiet")
    deadline = time.monotonic() + 120
    while process.poll() is None and not any(begun.glob("*.safetensors")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    launching.end(process)
    assert process.returncode == -signal.SIGKILL
    assert begun.exists()
    assert not target.exists()
    run(checkpoint(LLAMA), target)
    assert same(target, checkpoint(LLAMA))
    assert not begun.exists()


def test_the_command_accepts_deepspeeds_option_names(checkpoint, tmp_path):
    result = invoke(
        "convert", "--input_folder", checkpoint(LLAMA), "--output_folder", tmp_path / "new", "--dtype", "float16"
    )
    assert result.exit_code == 0, result.output
    assert "Hugging Face checkpoint" in result.output
    assert {x.dtype for x in stored(tmp_path / "new").values()} == {torch.float16}
    quiet = invoke(
        "convert", checkpoint(LLAMA), "--output-folder", tmp_path / "quiet", "--quiet", "--max-shard-size", "0.2MB"
    )
    assert quiet.output == ""
    assert len(list((tmp_path / "quiet").glob("*.safetensors"))) > 2


def test_the_command_writes_per_rank_files(checkpoint, tmp_path):
    config = {"tensor_parallel": {"mode": "3d_tensor", "mesh": {"sequence": 2}}, "train_batch_size": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ("convert", checkpoint(LLAMA), tmp_path / "ranks", "--config", tmp_path / "config.json")
    result = invoke(*arguments, "--world-size", 4)
    assert result.exit_code == 0, result.output
    assert "mesh 1×2×1" in result.output
    assert len(list((tmp_path / "ranks").glob("rank-*.safetensors"))) == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("SRC",), "give DST"),
        (("SRC", "DST", "--input_folder", "SRC"), "give SRC once"),
        (("SRC", "DST", "--world-size", "4"), "--world-size goes with --config"),
        (("SRC", "DST", "--max-shard-size", "many"), "no size such as 500MB"),
        (("SRC", "DST", "--dtype", "int8"), "int8"),
    ],
)
def test_wrong_arguments_are_explained(checkpoint, tmp_path, arguments, expected):
    paths = {"SRC": checkpoint(LLAMA), "DST": tmp_path / "new"}
    result = invoke("convert", *(paths.get(argument, argument) for argument in arguments))
    assert result.exit_code != 0
    assert expected in str(result.exception)
    assert nothing_left(tmp_path / "new")
