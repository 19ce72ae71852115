"""Conversion of plain DeepSpeed's checkpoints: the result has the same weights as DeepSpeed's engines."""

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import launching
from comparing import stored
from converting import layout, nothing_left, run
from cuboid.convert.sources import CheckpointKind, find_checkpoint
from cuboid.errors import CheckpointError
from cuboid.verify import SmallModel

#: A model with shapes that two ranks have to pad.
TIED = SmallModel("qwen3", heads=2, kv_heads=1, layers=2, vocabulary=37, head_dim=6)
UNTIED = SmallModel("llama", heads=2, kv_heads=1, layers=3, vocabulary=37, head_dim=6)
FUSED = SmallModel("gpt2", heads=2, kv_heads=2, layers=2, vocabulary=37)
EXPERTS = SmallModel("mixtral", heads=2, kv_heads=1, layers=2, vocabulary=37)
MODELS = {"tied": TIED, "untied": UNTIED, "fused": FUSED, "experts": EXPERTS}
TAG = "global_step2"

TRAINED = """
    import sys
    from pathlib import Path

    import deepspeed
    import torch
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.utils import safe_get_full_fp32_param
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    root = Path(sys.argv[1])
    ids = torch.arange(16).view(1, 16)


    def config(stage, bf16):
        optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
        batch = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
        return {**batch, "bf16": {"enabled": bf16}, "zero_optimization": {"stage": stage}, "optimizer": optimizer}


    def keep(engine, model, name):
        # What the engine itself says its fp32 weights are, as far as this rank knows.
        sixteen = getattr(engine.optimizer, "fp16_groups", [])
        masters = {}
        if engine.zero_optimization_stage() == 0 and hasattr(engine.optimizer, "fp32_groups"):
            for low, high in zip(sixteen, engine.optimizer.fp32_groups):
                masters.update((id(p), q) for p, q in zip(low, high))
        own = {id(p) for p in engine.module.parameters()}
        weights = {}
        for key, p in model.named_parameters():
            if id(p) not in own:
                continue
            full = masters.get(id(p))
            if full is None and engine.zero_optimization_stage() > 0 and p.requires_grad:
                full = safe_get_full_fp32_param(p)
            if full is None:
                with deepspeed.zero.GatheredParameters([p], enabled=hasattr(p, "ds_id")):
                    full = p.detach().clone()
            weights[key] = full.detach().float().clone().contiguous()
        save_file(weights, root / f"{name}.{engine.global_rank}.weights")


    def train_plain(name, path, stage, bf16, frozen=()):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16 if bf16 else torch.float32)
        for key, p in model.named_parameters():
            p.requires_grad_(not any(part in key for part in frozen))
        trained = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
        ]
        engine, *_ = deepspeed.initialize(model=model, config=config(stage, bf16), model_parameters=groups)
        for _ in range(4):
            engine.backward(engine(input_ids=ids + engine.global_rank, labels=ids + engine.global_rank).loss)
            engine.step()
        engine.save_checkpoint(str(root / name))
        keep(engine, model, name)


    class Embedding(torch.nn.Module):
        def __init__(self, table):
            super().__init__()
            self.word_embeddings = table

        @property
        def weight(self):
            return self.word_embeddings.weight

        def forward(self, ids):
            return self.word_embeddings(ids)


    class Layer(torch.nn.Module):
        def __init__(self, block, rotary):
            super().__init__()
            self.block = block
            self._rotary = [rotary]

        def forward(self, hidden):
            positions = torch.arange(hidden.shape[1])[None]
            return self.block(hidden, position_embeddings=self._rotary[0](hidden, positions), position_ids=positions)


    def train_pipeline(name, path, stage, tied):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        base = model.model
        layers = [Layer(block, base.rotary_emb) for block in base.layers]
        head = lambda layer, hidden: torch.nn.functional.linear(hidden, layer.weight)
        if tied:
            ends = [
                TiedLayerSpec("embed", Embedding, base.embed_tokens),
                TiedLayerSpec("embed", Embedding, base.embed_tokens, forward_fn=head),
            ]
        else:
            ends = [base.embed_tokens, model.lm_head]
        loss = lambda logits, labels: torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        module = PipelineModule(
            [ends[0], *layers, base.norm, ends[1]], num_stages=2, loss_fn=loss, partition_method="uniform"
        )
        engine, *_ = deepspeed.initialize(
            model=module, config=config(stage, True), model_parameters=list(module.parameters())
        )
        batches = iter(lambda: (ids, ids), None)
        for _ in range(2):
            engine.train_batch(batches)
        engine.save_checkpoint(str(root / name))
        keep(engine, model, name)


    train_plain("zero0", root / "tied", 0, False)
    train_plain("zero0-bf16", root / "untied", 0, True)
    train_plain("zero1-bf16", root / "tied", 1, True)
    train_plain("zero2", root / "fused", 2, False)
    train_plain("zero2-frozen", root / "untied", 2, True, frozen=("embed_tokens", "layers.1.input"))
    train_plain("zero3-bf16", root / "tied", 3, True)
    train_plain("zero3-frozen", root / "untied", 3, True, frozen=("lm_head", "layers.1.input"))
    train_plain("zero1-experts", root / "experts", 1, True)
    train_pipeline("pipeline", root / "untied", 1, tied=False)
    train_pipeline("pipeline-tied", root / "tied", 1, tied=True)
"""
#: The model of each checkpoint, and whether DeepSpeed can convert it to a universal one.
CASES = {
    "zero0": "tied",
    "zero0-bf16": "untied",
    "zero1-bf16": "tied",
    "zero2": "fused",
    "zero2-frozen": "untied",
    "zero3-bf16": "tied",
    "zero3-frozen": "untied",
    "zero1-experts": "experts",
    "pipeline": "untied",
    "pipeline-tied": "tied",
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with the models and, for each case, DeepSpeed's checkpoint and its ranks' weights."""
    root = tmp_path_factory.mktemp("deepspeed")
    for name, small in MODELS.items():
        small.write(root / name)
    (root / "script.py").write_text(textwrap.dedent(TRAINED))
    status, output = launching.world(2, root / "script.py", root)
    assert status == 0, output
    return root


def weights_of(root, case):
    """The weights of the engine's ranks, by name."""
    weights = {}
    for file in sorted(root.glob(f"{case}.*.weights")):
        weights |= load_file(file)
    return weights


def assert_trained(root, case, folder):
    """Check that the folder has the engine's weights, in the form of the model's own checkpoints."""
    before, wanted = stored(root / CASES[case]), weights_of(root, case)
    converted = stored(folder)
    assert converted.keys() == before.keys()
    model, start = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoModelForCausalLM.from_pretrained(root / CASES[case]),
    )
    assert model.dtype == torch.float32
    values = dict(model.named_parameters())
    assert values.keys() == wanted.keys()
    assert all(torch.equal(values[name], x) for name, x in wanted.items())
    assert any(not torch.equal(x, values[name]) for name, x in start.named_parameters())


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", CASES)
def test_converted_weights_equal_the_engines(written, tmp_path, case):
    run(written / case, tmp_path / "new", model=written / CASES[case], trust_pickle=True)
    assert_trained(written, case, tmp_path / "new")


def make_universal(source, target):
    """Run ``python -m deepspeed.checkpoint.ds_to_universal`` in this process."""
    from deepspeed.checkpoint.ds_to_universal import main

    options = argparse.Namespace(
        input_folder=str(source / TAG),
        output_folder=str(target / TAG),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        main(options)


@pytest.mark.parametrize("case", ["zero1-bf16", "zero2", "zero3-bf16", "pipeline", "pipeline-tied"])
def test_a_universal_checkpoint_has_the_same_weights(written, tmp_path, case):
    make_universal(written / case, tmp_path / "universal")
    run(tmp_path / "universal", tmp_path / "new", model=written / CASES[case], trust_pickle=True)
    assert_trained(written, case, tmp_path / "new")


def test_a_cast_to_the_models_dtype_gives_the_models_own_weights(written, tmp_path):
    for case in ("zero0-bf16", "zero1-bf16", "pipeline"):
        target = tmp_path / case
        run(written / case, target, model=written / CASES[case], trust_pickle=True, dtype=torch.bfloat16)
        converted = stored(target)
        assert {x.dtype for x in converted.values()} == {torch.bfloat16}
        assert all(torch.equal(converted[name], x.bfloat16()) for name, x in weights_of(written, case).items())


@pytest.mark.ci
def test_direct_conversion_to_per_rank_files(written, tmp_path):
    arguments = {"model": written / "untied", "trust_pickle": True}
    run(written / "zero3-frozen", tmp_path / "ranks", config=layout("1x2x1", 3), **arguments)
    run(tmp_path / "ranks", tmp_path / "back")
    assert_trained(written, "zero3-frozen", tmp_path / "back")


def test_a_trainers_folder_has_the_config_itself(written, tmp_path):
    folder = tmp_path / "checkpoint-2"
    shutil.copytree(written / "zero2", folder)
    for name in ("config.json", "generation_config.json"):
        shutil.copy(written / "fused" / name, folder)
    for place in (folder, folder / TAG):
        assert find_checkpoint(place).kind is CheckpointKind.DEEPSPEED
        run(place, tmp_path / f"new {place.name}", trust_pickle=True)
        assert_trained(written, "zero2", tmp_path / f"new {place.name}")


def test_a_config_json_is_enough_as_the_model(written, tmp_path):
    run(written / "zero2", tmp_path / "new", model=written / "fused" / "config.json", trust_pickle=True)
    assert_trained(written, "zero2", tmp_path / "new")


def test_master_weights_in_one_flat_tensor_per_group(written, tmp_path):
    """DeepSpeed's 16-bit optimizer saves them so on GPUs, where it works on flat groups."""
    shutil.copytree(written / "zero0-bf16", tmp_path / "flat")
    file = tmp_path / "flat" / TAG / "mp_rank_00_model_states.pt"
    content = torch.load(file, weights_only=False)
    groups = content["optimizer"].pop("fp32_groups")
    content["optimizer"]["fp32_groups_flat"] = [torch.cat([x.flatten() for x in group]) for group in groups]
    torch.save(content, file)
    run(tmp_path / "flat", tmp_path / "new", model=written / "untied", trust_pickle=True)
    assert_trained(written, "zero0-bf16", tmp_path / "new")


# --- errors ------------------------------------------------------------------------------------------------------


def assert_rejected(source, target, expected, **options):
    with pytest.raises(CheckpointError, match=expected):
        run(source, target, **{"trust_pickle": True, **options})
    assert nothing_left(target)


@pytest.fixture
def copied(written, tmp_path):
    """Copies a case for a test to damage; returns the folder of its files."""

    def copy(case):
        shutil.copytree(written / case, tmp_path / case)
        return tmp_path / case / TAG

    return copy


def test_pickles_are_not_loaded_by_default(written, tmp_path):
    expected = r"mp_rank_00_model_states\.pt: is a pickle.*--trust-pickle"
    assert_rejected(written / "zero0", tmp_path / "new", expected, model=written / "tied", trust_pickle=False)


class Harm:
    """Unpickling this without ``weights_only`` creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_only_deepspeeds_own_classes_are_allowed_in_pickles(written, copied, tmp_path):
    folder = copied("zero1-bf16")
    file = next(folder.glob("*_rank_1_*optim_states.pt"))
    content = torch.load(file, weights_only=False)
    torch.save({**content, "more": Harm(tmp_path / "harm")}, file)
    assert_rejected(folder, tmp_path / "new", f"{file.name}: holds more than tensors", model=written / "tied")
    assert not (tmp_path / "harm").exists()


def test_the_model_must_be_given_and_must_match(written, tmp_path):
    assert_rejected(written / "zero0", tmp_path / "new", "has no config.json; give --model")
    expected = r"has a tensor model\.embed_tokens\.weight, which GPT2LMHeadModel doesn't know"
    assert_rejected(written / "zero0", tmp_path / "new", expected, model=written / "fused")
    expected = "0 layers of its pipeline are decoder layers of MixtralForCausalLM, but the model has 2"
    assert_rejected(written / "pipeline", tmp_path / "new", expected, model=written / "experts")
    (tmp_path / "other").mkdir()
    config = json.loads((written / "untied" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    assert_rejected(written / "zero3-frozen", tmp_path / "new", r"layers\.2\.", model=tmp_path / "other")
    expected = "3 layers of its pipeline are decoder layers of LlamaForCausalLM, but the model has 2"
    assert_rejected(written / "pipeline", tmp_path / "new", expected, model=tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    expected = "3 layers of its pipeline are decoder layers of LlamaForCausalLM, but the model has 4"
    assert_rejected(written / "pipeline", tmp_path / "new", expected, model=tmp_path / "other")
    (tmp_path / "tying").mkdir()
    (tmp_path / "tying" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    expected = r"lm_head\.weight and model\.embed_tokens\.weight differ"
    assert_rejected(written / "zero3-frozen", tmp_path / "new", expected, model=tmp_path / "tying")


@pytest.mark.parametrize("case", ["zero1-bf16", "zero3-bf16"])
def test_a_missing_file_of_a_rank_is_named(written, copied, tmp_path, case):
    folder = copied(case)
    first = next(folder.glob("*_rank_0_*optim_states.pt"))
    first.unlink()
    assert_rejected(folder, tmp_path / "new", f"{re.escape(first.name)}: is missing", model=written / "tied")


def test_a_missing_file_of_the_last_rank_is_found_by_the_number_of_partitions(written, copied, tmp_path):
    folder = copied("zero1-bf16")
    next(folder.glob("*_rank_1_*optim_states.pt")).unlink()
    assert_rejected(
        folder, tmp_path / "new", r"cut into \[2, 2\] parts, but there are files of 1", model=written / "tied"
    )
    next(folder.glob("*_rank_0_*optim_states.pt")).unlink()
    assert_rejected(folder, tmp_path / "new", "there are none", model=written / "tied")


def test_a_truncated_file_is_named(written, copied, tmp_path):
    folder = copied("zero3-bf16")
    file = next(folder.glob("*_rank_1_*optim_states.pt"))
    os.truncate(file, file.stat().st_size // 2)
    assert_rejected(folder, tmp_path / "new", f"{re.escape(file.name)}: is not a complete file", model=written / "tied")


def test_tensor_parallel_checkpoints_are_rejected_with_an_alternative(written, copied, tmp_path):
    folder = copied("zero0")
    shutil.copy(folder / "mp_rank_00_model_states.pt", folder / "mp_rank_01_model_states.pt")
    assert_rejected(folder, tmp_path / "new", "tensor parallelism.*ds_to_universal", model=written / "tied")
    layers = copied("pipeline")
    shutil.copy(layers / "layer_01-model_states.pt", layers / "layer_01-model_01-model_states.pt")
    assert_rejected(layers, tmp_path / "new", "tensor parallelism.*ds_to_universal", model=written / "untied")


def test_ambiguous_master_weights_without_names_are_rejected(written, copied, tmp_path):
    folder = copied("zero0-bf16")
    file = folder / "mp_rank_00_model_states.pt"
    content = torch.load(file, weights_only=False)
    first, second = content["optimizer"]["fp32_groups"]
    # A second group whose first weights equal the first group's.
    content["optimizer"]["fp32_groups"] = [first, [first[0], *second]]
    torch.save(content, file)
    expected = r"more than one of them could be model\.embed_tokens\.weight.*--dtype"
    assert_rejected(folder, tmp_path / "new", expected, model=written / "untied")
    content["optimizer"]["fp32_groups"] = [first[::-1], second]
    torch.save(content, file)
    assert_rejected(folder, tmp_path / "new", "some are none of the model's weights", model=written / "untied")
    run(folder, tmp_path / "new", model=written / "untied", trust_pickle=True, dtype=torch.bfloat16)
    assert torch.equal(stored(tmp_path / "new")["lm_head.weight"], content["module"]["lm_head.weight"])
