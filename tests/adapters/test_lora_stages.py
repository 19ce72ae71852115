"""LoRA by PEFT in pipelines: every gradient of the adapter is plain PEFT's, and heads are trained whole."""

import copy
import dataclasses
import functools
import itertools

import deepspeed
import pytest
import torch
from safetensors.torch import load_file
from test_lora import (
    HEADS,
    adapted,
    as_they_are,
    assert_gradients,
    batch,
    built,
    classes,
    classifier,
    flops_of,
    inner_names,
    with_head,
)
from transformers import AutoModelForSequenceClassification

import cuboid
from conftest import TIMEOUT_S
from cuboid.config.schema import CuboidConfig
from cuboid.distributed.thread_ranks import ThreadRanks
from cuboid.distributed.topology import MeshShape
from cuboid.errors import ConfigError
from cuboid.models.architectures.certificate import MeshVerdict
from cuboid.models.certification.float64 import KeepFloat64
from cuboid.models.certification.layer_halves import layer_halves
from cuboid.models.certification.sides import make_stage, run_stages
from cuboid.models.sharded.parallel_plan import make_parallel_plan
from cuboid.models.sharded.sharded_model import unwrap
from cuboid.models.stages.stage_cut import draw_outline, halves_inside
from cuboid.tensor3d.sharding.sharding_spec import put_shard
from cuboid.weights.state_dict_map import sharding_specs
from threaded import step_of
from training import ROWS, VOCABULARY, ranks_of, settings, small_checkpoint

pytest.importorskip("peft", reason="PEFT isn't installed")
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model


class Staged:
    """A copy of a whole model in stages, each on a mesh; the ranks are threads."""

    def __init__(self, model, mesh="1x1x1", stages=2, verdict=None, counts=None):
        self.shape = MeshShape.parse(mesh)
        self.ranks = ThreadRanks(self.shape, stages)
        outline = draw_outline(type(model), model.config)
        even, rest = divmod(outline.count, stages)
        counts = counts or tuple(even + (stage < rest) for stage in range(stages))
        halves = functools.partial(layer_halves, type(model), model.config, outline.count)
        outline = dataclasses.replace(outline, halves=halves_inside(counts, halves))
        parallel = None
        if self.shape.size > 1:
            parallel = make_parallel_plan(model, self.shape, verdict or MeshVerdict())
        options = {"gives_cache": outline.is_causal, "parallel": parallel}
        self.models = [
            make_stage(model, outline, counts, mesh_of_rank, **options) for mesh_of_rank in self.ranks.meshes
        ]

    def step(self, micro_batch, lengths):
        """The loss of each rank of the mesh; gradients stay with the models."""
        return self.run(lambda stages: run_stages(stages, micro_batch, lengths))

    def run(self, action):
        """What an action returns for the stages of each rank of the mesh."""

        def on_rank(mesh):
            with KeepFloat64():
                return action([unwrap(model) for model in self.models[mesh.rank :: self.shape.size]])

        return self.ranks.run(on_rank)

    def gradients(self):
        """By the names of the model's parameters, put together from all ranks."""
        return self.whole(lambda parameter: parameter.grad)

    def whole(self, value_of):
        """By the names of the model's parameters, put together from all ranks."""
        full_tensors = {}
        for mesh, model in zip(self.ranks.meshes, self.models, strict=True):
            inner = unwrap(model)
            specs = sharding_specs(inner)
            for name, parameter in inner.named_parameters():
                value = value_of(parameter)
                if value is None:
                    continue
                if name not in specs:
                    full_tensors[name] = value
                    continue
                full = full_tensors.setdefault(name, value.new_zeros(specs[name].shape))
                put_shard(full, value, specs[name], mesh.shape, mesh.coordinate)
        return full_tensors


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": "all-linear"},
        {"layers_to_transform": [0, 1], "use_dora": True, "rank_pattern": {"q_proj": 5}},
        {"trainable_token_indices": [3, 5], "bias": "lora_only"},
    ],
    ids=str,
)
def test_each_stage_counts_the_whole_models_parameters_as_plain_peft_does(options):
    """``print_trainable_parameters``, which every script calls, and ``disable_adapter``, which asks for them."""
    model = built("qwen2")

    def counts(stage_or_plain):
        peft_model = adapted(stage_or_plain, **options)
        both = [peft_model.get_nb_trainable_parameters()]
        with peft_model.disable_adapter():
            both.append(peft_model.get_nb_trainable_parameters())
        peft_model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
        peft_model.set_adapter("second")
        return [*both, peft_model.get_nb_trainable_parameters()]

    expected = counts(copy.deepcopy(model))
    for stage in Staged(model).models:
        assert counts(stage) == expected


@pytest.mark.filterwarnings("error:The model contains some adapter layers")
def test_a_stage_without_adapter_layers_disables_and_unloads_them_as_others_do():
    for stage in Staged(built("llama")).models:
        peft_model = adapted(stage, layers_to_transform=[0])
        has_layers = any(".lora_A." in name for name, _ in peft_model.named_parameters())
        with peft_model.disable_adapter():
            assert peft_model.get_model_status().enabled is False
        status = peft_model.get_model_status()
        assert (status.enabled, status.num_adapter_layers > 0) == (True, has_layers)
        peft_model.merge_adapter()
        peft_model.unmerge_adapter()
        assert peft_model.merge_and_unload() is unwrap(stage)


HEAD_OPTIONS = {
    "target_modules": ["q_proj", "lm_head"],
    "modules_to_save": ["lm_head"],
    "trainable_token_indices": {"lm_head": [3]},
}


def test_a_head_that_is_spread_over_the_stages_has_no_adapter():
    pipeline = {"engine": "seq1f1b", "stages": 2, "segments": 2, "schedule": "zero_bubble", "head": "spread"}
    for stage in Staged(built("llama")).models:
        config = CuboidConfig.model_validate({"pipeline": pipeline})
        stage.staging.plan = dataclasses.replace(stage.staging.plan, config=config)
        before = [name for name, _ in stage.named_modules()]
        for option, value in HEAD_OPTIONS.items():
            with pytest.raises(ConfigError, match=rf"pipeline.head is \"spread\", and {option} .* names lm_head"):
                adapted(stage, **{"target_modules": ["q_proj"], option: value})
        assert [name for name, _ in stage.named_modules()] == before
        adapted(stage, target_modules="all-linear")


def test_a_stage_counts_a_prompt_that_only_the_first_one_has():
    model, config = built("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    counts = [get_peft_model(x, config).get_nb_trainable_parameters() for x in (*Staged(model).models, model)]
    assert counts == [counts[-1]] * 3


def assert_as_plain(model, plain, staged, micro_batch, lengths, folder, as_in_files=as_they_are):
    # A stage draws initial values by the names of its layers, so both read the same.
    plain.save_pretrained(folder)
    staged.models = [PeftModel.from_pretrained(stage_model, folder, is_trainable=True) for stage_model in staged.models]
    with KeepFloat64():
        expected = step_of(**micro_batch)(plain)
    for loss in staged.step(micro_batch, lengths):
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    return assert_gradients(plain, staged.gradients(), as_in_files)


@pytest.mark.parametrize(("mesh", "lengths"), [("1x1x1", (5, 4, 3)), ("1x2x1", (8, 4))])
def test_gradients_of_factors_in_segments(tmp_path, mesh, lengths):
    model, micro_batch = built("llama", kv_heads=2), batch()
    # The pipeline would be given a label for the last position too.
    micro_batch["labels"][:, -1] = -100
    assert_as_plain(model, adapted(copy.deepcopy(model)), Staged(model, mesh), micro_batch, lengths, tmp_path)


def test_gradients_of_factors_in_stages_that_share_a_layer(tmp_path):
    model, micro_batch = built("llama", kv_heads=2, layers=3), batch()
    micro_batch["labels"][:, -1] = -100
    staged = Staged(model, "1x2x1", counts=(1.5, 1.5))
    assert_as_plain(model, adapted(copy.deepcopy(model)), staged, micro_batch, (8, 4), tmp_path)


def test_no_gradient_of_a_frozen_weight_is_computed_in_stages():
    """As on a mesh; see :mod:`test_lora`."""
    model, micro_batch = built("llama", kv_heads=2), batch()
    micro_batch["labels"][:, -1] = -100
    staged = Staged(model, "1x2x1")
    staged.models = [adapted(stage_model) for stage_model in staged.models]
    with KeepFloat64():
        expected = flops_of(step_of(**micro_batch), adapted(copy.deepcopy(model)))
    assert sum(staged.run(lambda stages: flops_of(lambda _: run_stages(stages, micro_batch, (8, 4)), None))) == (
        pytest.approx(expected, rel=0.005)
    )


CLIP = 0.5


def stepped(trained, optimizers, norm):
    """Clip gradients by their norm over all parameters, as a Trainer does, and step."""
    for parameter in trained:
        parameter.grad *= min(1.0, CLIP / (norm + 1e-6))
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("mesh", ["1x1x1", "1x2x1"])
def test_several_clipped_steps_are_those_of_one_process(tmp_path, mesh):
    """Losses, norms, every gradient and the factors of steps of two micro-batches, with values of PEFT's own scale."""
    model = built("llama", kv_heads=2)
    plain = adapted(copy.deepcopy(model), r=4, lora_alpha=32, target_modules="all-linear")
    plain.save_pretrained(tmp_path)
    staged = Staged(model, mesh)
    staged.models = [
        PeftModel.from_pretrained(stage_model, tmp_path, is_trainable=True) for stage_model in staged.models
    ]
    options = {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.0}
    factors, *shards = ([x for x in either.parameters() if x.requires_grad] for either in (plain, *staged.models))
    optimizer, *optimizers = (torch.optim.AdamW(trained, **options) for trained in (factors, *shards))
    for step in range(4):
        for number in range(2):
            micro_batch = batch(seed=2 * step + number)
            micro_batch["labels"][:, -1] = -100
            with KeepFloat64():
                expected = step_of(**micro_batch)(plain)
            for loss in staged.step(micro_batch, (8, 4)):
                torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
        assert_gradients(plain, staged.gradients())
        norm = float(torch.cat([x.grad.flatten() for x in factors]).norm())
        # Each element has one owner, so that all ranks' parts are those of one vector.
        shards_norm = float(torch.cat([x.grad.flatten() for of_rank in shards for x in of_rank]).norm())
        assert shards_norm == pytest.approx(norm, rel=1e-9)
        assert norm > 2 * CLIP
        stepped(factors, [optimizer], norm)
        stepped([x for of_rank in shards for x in of_rank], optimizers, shards_norm)
    weights = staged.whole(lambda parameter: parameter.detach() if parameter.requires_grad else None)
    for name, parameter in inner_names(plain).items():
        if parameter.requires_grad:
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("task", HEADS)
@pytest.mark.parametrize("mesh", ["1x1x1", "1x2x1"])
def test_a_head_that_is_trained_whole_is_on_the_last_stage(tmp_path, task, mesh):
    model, verdict = classifier(task)
    plain, staged = with_head(copy.deepcopy(model), task), Staged(model, mesh, verdict=verdict)
    with torch.no_grad():
        plain.base_model.model.score.modules_to_save["default"].weight.mul_(2)
    trained = assert_as_plain(model, plain, staged, classes(task), (12,), tmp_path)
    assert "score.modules_to_save.default.weight" in trained
    first, last = unwrap(staged.models[0]), unwrap(staged.models[-1])
    assert not [name for name, _ in first.named_parameters() if name.startswith("score")]
    kept = {name for name, x in last.named_parameters() if name.startswith("score") and x.requires_grad}
    assert kept == {name for name in trained if name.startswith("score")}
    merged = staged.ranks.run(
        lambda mesh: [stage_model.merge_and_unload() for stage_model in staged.models[mesh.rank :: staged.shape.size]]
    )
    names = {name for stages in merged for stage_model in stages for name, _ in stage_model.named_parameters()}
    assert names == {name for name, _ in model.named_parameters()}


STEPS, RATE = 3, 1e-2


def engine_of(start, adapter, config):
    model = cuboid.from_pretrained(start, config, auto_class=AutoModelForSequenceClassification, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return deepspeed.initialize(model=model.train(), model_parameters=trained, config=config)[0]


def rewards():
    generator = torch.Generator().manual_seed(3)
    while True:
        ids = torch.randint(4, VOCABULARY, (ROWS, 11), generator=generator)
        yield {"input_ids": ids, "labels": ids[:, 0] / VOCABULARY}


def trained_in_stages(start, adapter, config, other, root):
    engine, batches = engine_of(start, adapter, config), rewards()
    losses = [float(engine.train_batch(batches)) for _ in range(STEPS - 1)]
    engine.save_checkpoint(f"{root}/run")
    engine.module.save_pretrained(f"{root}/adapter")
    # PEFT's list of heads is longer in an adapter that it has read.
    again = engine_of(start, f"{root}/adapter", other)
    again.load_checkpoint(f"{root}/run")
    # In a pipeline, the first rank alone has read micro-batches.
    batches = itertools.islice(rewards(), 2 * (STEPS - 1), None)
    if hasattr(again, "train_batch"):
        return [*losses, float(again.train_batch(batches))]
    return [*losses, sum(float(again(**next(batches)).loss) for _ in range(2)) / 2]


def trained_plain(start, adapter):
    model = AutoModelForSequenceClassification.from_pretrained(start, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, adapter, is_trainable=True).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.1)
    batches, losses = rewards(), []
    for step in range(STEPS):
        loss = sum(model(**next(batches)).loss for _ in range(2)) / 2
        losses.append(float(loss.detach()))
        if step == STEPS - 1:
            break
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: x.detach() for name, x in model.named_parameters() if x.requires_grad}


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("other", [("1x1x1", 2), ("1x2x1", None)], ids=["stages", "mesh"])
def test_a_head_trains_is_saved_for_peft_and_resumes_on_another_layout(pool, tmp_path, other):
    options = {"num_labels": 1, "pad_token_id": 0}
    start = small_checkpoint(AutoModelForSequenceClassification, "llama", tmp_path / "start", **options)
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(start, dtype=torch.float32)
    lora = {"r": 4, "init_lora_weights": False, "target_modules": ["q_proj", "down_proj"], "task_type": "SEQ_CLS"}
    get_peft_model(model, LoraConfig(**lora)).save_pretrained(tmp_path / "first")
    configs = [
        settings(mesh, stages, learning_rate=RATE, pipeline={"segments": 1}) for mesh, stages in (("1x1x1", 2), other)
    ]
    for config in configs:
        del config["scheduler"]
    arguments = (start, tmp_path / "first", *configs, str(tmp_path))
    results = pool.run(ranks_of(configs[0]), trained_in_stages, *arguments, timeout_s=TIMEOUT_S)
    losses, state = trained_plain(start, tmp_path / "first")
    for rank_losses in results:
        assert rank_losses == pytest.approx(losses, rel=1e-5)
    for folder in (tmp_path / "adapter", next((tmp_path / "run").glob("global_step*"))):
        saved = load_file(folder / "adapter_model.safetensors")
        keys = {name: name.replace(".modules_to_save.default.", ".").replace(".default.", ".") for name in state}
        assert saved.keys() == set(keys.values())
        for name, value in state.items():
            torch.testing.assert_close(saved[keys[name]], value, rtol=1e-4, atol=1e-5, msg=name)
