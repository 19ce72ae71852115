"""Kinds of adapters other than LoRA, on meshes and in stages as in plain PEFT: IA³, prompt tuning and P-tuning."""

import copy
import itertools

import deepspeed
import pytest
import torch
from safetensors.torch import load_file
from test_lora import Adapted, assert_losses, assert_step, batch, built, classifier, in_both
from test_lora_stages import Staged, assert_as_plain
from transformers import AutoModelForCausalLM

import cuboid
from comparing import mesh_section
from conftest import TIMEOUT_S
from cuboid.errors import UnsupportedModelError
from cuboid.models.certification.float64 import KeepFloat64, precision
from cuboid.models.certification.sides import run_stages
from cuboid.verify import SmallModel
from threaded import Threaded, step_of
from training import ROWS, VOCABULARY, settings, small_checkpoint

pytest.importorskip("peft", reason="PEFT isn't installed")
from peft import IA3Config, PeftModel, PromptEncoderConfig, PromptTuningConfig, get_peft_model

LLAMA = {"target_modules": ["k_proj", "v_proj", "o_proj", "up_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
GPT2 = {"target_modules": ["c_attn", "mlp.c_proj"], "feedforward_modules": ["mlp.c_proj"]}


def scaled(model, **options):
    torch.manual_seed(7)
    return get_peft_model(model, IA3Config(**{**LLAMA, "init_ia3_weights": False, **options}))


class Scaled(Adapted):
    def __init__(self, model, mesh, **options):
        Threaded.__init__(self, model, mesh)
        self.models = [scaled(rank_model, **options) for rank_model in self.models]


IA3_CASES = [
    ("llama", {"kv_heads": 2}, "1x2x1", {}),
    ("llama", {"kv_heads": 2}, "1x1x2", {}),
    ("llama", {"kv_heads": 2}, "2x1x1", {}),
    ("llama", {"kv_heads": 2}, "2x2x2", {}),
    ("qwen2", {"kv_heads": 1}, "1x2x2", {}),
    ("gpt2", {}, "3x1x2", GPT2),
]


@pytest.mark.sample(3, ci="others")
@pytest.mark.parametrize(("architecture", "sizes", "mesh", "options"), IA3_CASES)
def test_ia3_loss_and_every_gradient_are_those_of_plain_peft(architecture, sizes, mesh, options):
    model, micro_batch = built(architecture, **sizes), batch(rows=6)
    plain, threaded = scaled(copy.deepcopy(model), **options), Scaled(model, mesh, **options)
    assert_step(plain, threaded, micro_batch)


@pytest.mark.parametrize(("architecture", "options"), [("qwen2", {}), ("gpt2", GPT2)])
def test_vectors_are_disabled_merged_and_unloaded(architecture, options):
    model = built(architecture)
    plain, threaded = scaled(copy.deepcopy(model), **options), Scaled(model, "1x2x2", **options)
    first = assert_losses(plain, threaded)
    both = in_both(plain, threaded)
    disabled = both(lambda peft_model: peft_model.base_model.disable_adapter_layers())
    assert abs(disabled - first) > 1e-4
    both(lambda peft_model: peft_model.base_model.enable_adapter_layers())
    assert both(lambda peft_model: peft_model.merge_adapter()) == pytest.approx(first, abs=1e-9)
    # PEFT adds 1e-8 to what it divides by.
    assert both(lambda peft_model: peft_model.unmerge_adapter()) == pytest.approx(first, abs=1e-4)
    plain = plain.merge_and_unload()
    threaded.models = threaded.run(lambda peft_model: peft_model.merge_and_unload())
    assert assert_losses(plain, threaded) == pytest.approx(first, abs=1e-4)


@pytest.mark.parametrize(("mesh", "lengths"), [("1x1x1", (5, 4, 3)), ("1x2x1", (8, 4))])
def test_ia3_gradients_in_segments(tmp_path, mesh, lengths):
    model, micro_batch = built("llama", kv_heads=2), batch()
    micro_batch["labels"][:, -1] = -100
    assert_as_plain(model, scaled(copy.deepcopy(model)), Staged(model, mesh), micro_batch, lengths, tmp_path)


@pytest.mark.parametrize("name", ["up_proj", "q_proj", "embed_tokens", "lm_head"])
def test_ia3_without_a_rule_is_refused_by_name(name):
    model = Threaded(built("llama", kv_heads=2), "1x2x1").models[0]
    feedforward = [name] if name.endswith("proj") else []
    with pytest.raises(UnsupportedModelError, match=rf"IA3Config.*{name}|{name}.*IA3Config"):
        scaled(model, target_modules=[name], feedforward_modules=feedforward)


def vectors_saved_by_ranks(start, folder):
    def on(mesh):
        model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float64)
        return cuboid.shard(model, {"tensor_parallel": mesh_section(mesh)}).eval()

    model, other = scaled(on("1x2x1")), on("2x1x1")
    with precision(keep_float64=True):
        model.save_pretrained(folder)
        read = PeftModel.from_pretrained(other, folder, is_trainable=True)
        return [either(**batch()).logits.detach() for either in (model, read)]


def test_ia3_is_in_pefts_folder(pool, tmp_path):
    model = built("llama", kv_heads=2).eval()
    model.save_pretrained(tmp_path / "start")
    results = pool.run(2, vectors_saved_by_ranks, tmp_path / "start", tmp_path / "adapter", timeout_s=TIMEOUT_S)
    scaled(copy.deepcopy(model)).save_pretrained(tmp_path / "plain")
    saved, expected = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "plain"))
    assert saved.keys() == expected.keys()
    plain = PeftModel.from_pretrained(model, tmp_path / "adapter")
    with torch.no_grad(), KeepFloat64():
        logits = plain(**batch()).logits
    for rank_logits in results:
        for either in rank_logits:
            torch.testing.assert_close(either, logits, rtol=1e-9, atol=1e-9)


def prompted(model, count=5, **options):
    torch.manual_seed(7)
    return get_peft_model(model, config_of(num_virtual_tokens=count, **options)).double()


def config_of(encoder=None, **options):
    if encoder is None:
        return PromptTuningConfig("CAUSAL_LM", **options)
    return PromptEncoderConfig(
        "CAUSAL_LM", encoder_reparameterization_type=encoder, encoder_hidden_size=16, encoder_num_layers=2, **options
    )


class Prompted(Adapted):
    def __init__(self, model, mesh, **options):
        Threaded.__init__(self, model, mesh)
        self.models = self.run(lambda rank_model: prompted(rank_model, **options))


def vectors_of(plain):
    return plain.prompt_encoder["default"].embedding.weight


def assert_gradient(plain, gradients):
    (gradient,) = gradients.values()
    expected = vectors_of(plain).grad
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-9)


def assert_gradients(plain, gradients):
    """Of an encoder's parameters."""
    expected = {name: x.grad for name, x in plain.prompt_encoder["default"].named_parameters()}
    trained = {name.split(".prompt_encoders.default.")[1]: gradient for name, gradient in gradients.items()}
    assert trained.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(trained[name], gradient, rtol=1e-9, atol=1e-9, msg=name)
    assert max(gradient.abs().max() for gradient in expected.values()) > 1e-4


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(
    ("mesh", "encoder"),
    [("1x1x1", "MLP"), ("1x2x1", "MLP"), ("1x1x2", "LSTM"), ("2x1x1", "LSTM"), ("2x2x2", "MLP"), ("2x2x2", "LSTM")],
)
def test_an_encoders_gradients_are_those_of_plain_peft(mesh, encoder, tmp_path):
    model, micro_batch = built("llama", kv_heads=2), batch()
    plain, threaded = prompted(copy.deepcopy(model), encoder=encoder), Prompted(model, mesh, encoder=encoder)
    with KeepFloat64():
        expected = step_of(**micro_batch)(plain)
    for loss in threaded.run(step_of(**micro_batch)):
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    assert_gradients(plain, threaded.whole(lambda parameter: parameter.grad))
    for rank_model in threaded.models:
        assert [x for x in rank_model.parameters() if x.grad is not None] == [
            x for x in rank_model.parameters() if x.requires_grad
        ]
    counts = [sum(x.numel() for x in rank_model.parameters() if x.requires_grad) for rank_model in threaded.models]
    # The n rows of the embedding are padded.
    assert max(counts) * len(counts) < 1.3 * plain.get_nb_trainable_parameters()[0]
    assert threaded.models[0].get_nb_trainable_parameters() == plain.get_nb_trainable_parameters()
    # What a file has of it is used without its encoder.
    plain.save_pretrained(tmp_path)
    read = Prompted.__new__(Prompted)
    Threaded.__init__(read, model, mesh)
    read.models = [PeftModel.from_pretrained(rank_model, tmp_path) for rank_model in read.models]
    for logits in read.run(lambda rank_model: rank_model(**micro_batch, use_cache=False).loss):
        torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.sample(3, ci="others")
@pytest.mark.parametrize(
    ("architecture", "sizes", "mesh"),
    [
        ("llama", {"kv_heads": 2}, "1x1x1"),
        ("llama", {"kv_heads": 2}, "1x2x1"),
        ("llama", {"kv_heads": 2}, "1x1x2"),
        ("llama", {"kv_heads": 2}, "2x1x1"),
        ("gpt2", {}, "1x2x2"),
        ("gemma", {}, "3x2x1"),
    ],
)
def test_a_prompts_loss_and_gradient_are_those_of_plain_peft(architecture, sizes, mesh):
    model = built(architecture, **sizes)
    micro_batch = batch(rows=6, vocabulary=model.config.vocab_size)
    plain, threaded = prompted(copy.deepcopy(model)), Prompted(model, mesh)
    with KeepFloat64():
        expected = step_of(**micro_batch)(plain)
    for loss in threaded.run(step_of(**micro_batch)):
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    assert_gradient(plain, threaded.whole(lambda parameter: parameter.grad))


@pytest.mark.sample(2, ci="others")
@pytest.mark.parametrize(
    ("mesh", "lengths", "encoder"),
    [("1x1x1", (7, 6, 4), None), ("1x2x1", (10, 8), None), ("2x1x2", (12, 6), None), ("1x2x1", (10, 8), "LSTM")],
)
def test_a_prompts_gradient_in_segments(mesh, lengths, encoder):
    model, micro_batch = built("llama", kv_heads=2), batch()
    micro_batch["labels"][:, -1] = -100
    plain, staged = prompted(copy.deepcopy(model), encoder=encoder), Staged(model, mesh)
    staged.models = [prompted(stage_model, encoder=encoder) for stage_model in staged.models]
    with KeepFloat64():
        expected = step_of(**micro_batch)(plain)

    def step(stages):
        return run_stages(stages, stages[0].cuboid.state.virtual_tokens.before(micro_batch), lengths)

    for loss in staged.run(step):
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    (assert_gradient if encoder is None else assert_gradients)(plain, staged.gradients())


@pytest.mark.parametrize("encoder", [None, "MLP"])
def test_a_prompt_is_disabled_and_generates_as_plain_peft(encoder):
    model = built("llama", kv_heads=2).eval()
    plain, threaded = prompted(copy.deepcopy(model), encoder=encoder), Prompted(model, "1x2x1", encoder=encoder)
    first = assert_losses(plain, threaded)
    rows = {name: x for name, x in batch().items() if name != "labels"}

    def outputs(peft_model):
        with torch.no_grad():
            with peft_model.disable_adapter():
                disabled = peft_model(**batch(), use_cache=False).loss
            return disabled, peft_model.generate(**rows, max_new_tokens=4, do_sample=False)

    with KeepFloat64():
        loss, tokens = outputs(plain)
    assert abs(float(loss) - first) > 1e-4
    for disabled, generated in threaded.run(outputs):
        torch.testing.assert_close(disabled, loss, rtol=1e-9, atol=1e-9)
        assert torch.equal(generated, tokens)


def test_a_rank_keeps_its_part_of_a_prompt_and_nothing_for_what_is_frozen():
    threaded = Prompted(built("llama", kv_heads=2), "2x1x2", count=6)
    threaded.run(step_of(**batch()))
    for rank_model in threaded.models:
        (trained,) = (x for x in rank_model.parameters() if x.requires_grad)
        assert trained.numel() * 4 == 6 * rank_model.config.hidden_size
        assert [x for x in rank_model.parameters() if x.grad is not None] == [trained]
    assert (
        rank_model.get_nb_trainable_parameters()
        == prompted(built("llama", kv_heads=2), 6).get_nb_trainable_parameters()
    )


def test_a_prompt_without_a_rule_is_refused_by_name_before_the_model_is_changed():
    bert = SmallModel("bert", heads=4).config()
    bert.is_decoder = True
    classified, _ = classifier("sequence")
    for model, task, named in (
        (built("llama"), None, r"task_type=None\) .* write that"),
        (classified, "SEQ_CLS", "task_type='SEQ_CLS'"),
        (AutoModelForCausalLM.from_config(bert), "CAUSAL_LM", "does more with ids"),
    ):
        rank_model = Threaded(model, "1x2x1").models[0]
        before = [name for name, _ in rank_model.named_modules()]
        with pytest.raises(UnsupportedModelError, match=named):
            PeftModel(rank_model, PromptTuningConfig(task, num_virtual_tokens=5))
        assert [name for name, _ in rank_model.named_modules()] == before
    threaded = Prompted(built("llama"), "1x2x1")
    for rows in ({"shift_labels": batch()["labels"]}, {"inputs_embeds": torch.zeros(4, 12, 64)}):
        with pytest.raises(UnsupportedModelError, match="beside virtual tokens"):
            threaded.models[0](input_ids=batch()["input_ids"], **rows)


STEPS, RATE = 3, 1e-2


def engine_of(start, config, options):
    torch.manual_seed(7)
    model = cuboid.from_pretrained(start, config, dtype=torch.float32)
    model = get_peft_model(model, config_of(num_virtual_tokens=5, **options))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return deepspeed.initialize(model=model.train(), model_parameters=trained, config=config)[0]


#: The vectors begin as those of drawn tokens.
SAMPLED = {"prompt_tuning_init": "SAMPLE_VOCAB"}


def token_rows():
    generator = torch.Generator().manual_seed(3)
    while True:
        ids = torch.randint(4, VOCABULARY, (ROWS, 11), generator=generator)
        yield {"input_ids": ids, "labels": ids}


def trained_by_engine(start, config, other, root, options):
    engine, batches = engine_of(start, config, options), token_rows()
    losses = [steps_loss(engine, batches) for _ in range(STEPS - 1)]
    engine.save_checkpoint(f"{root}/run")
    cuboid.save_pretrained(engine, f"{root}/prompt")
    again = engine_of(start, other, options)
    again.load_checkpoint(f"{root}/run")
    batches = itertools.islice(token_rows(), 2 * (STEPS - 1), None)
    # DeepSpeed keeps the groups of a process's first engine, on which a second one mustn't step.
    return [*losses, steps_loss(again, batches, steps=False)]


def steps_loss(engine, batches, *, steps=True):
    if hasattr(engine, "train_batch"):
        return float(engine.train_batch(batches))
    losses = []
    for _ in range(2):
        loss = engine(**next(batches)).loss
        losses.append(float(loss))
        if steps:
            engine.backward(loss)
            engine.step()
    return sum(losses) / 2


def trained_plain(start, options):
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    model = get_peft_model(model, config_of(num_virtual_tokens=5, **options)).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.1)
    batches, losses, saved = token_rows(), [], None
    for step in range(STEPS):
        loss = sum(model(**next(batches)).loss for _ in range(2)) / 2
        losses.append(float(loss.detach()))
        if step == STEPS - 1:
            saved = model.get_prompt_embedding_to_save("default").clone()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, saved


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(
    ("first", "other", "options"),
    [
        (("1x1x1", 2), ("1x2x1", None), SAMPLED),
        (("2x1x1", None), ("1x1x1", 2), SAMPLED),
        (("1x2x1", None), ("1x1x1", 2), {"encoder": "LSTM"}),
    ],
    ids=["stages", "mesh", "encoder"],
)
def test_vectors_train_are_in_pefts_folder_and_resume_on_another_layout(pool, tmp_path, first, other, options):
    start = small_checkpoint(AutoModelForCausalLM, "llama", tmp_path / "start")
    configs = [settings(mesh, stages, learning_rate=RATE, pipeline={"segments": 2}) for mesh, stages in (first, other)]
    for config in configs:
        del config["scheduler"]
    results = pool.run(2, trained_by_engine, start, *configs, str(tmp_path), options, timeout_s=TIMEOUT_S)
    losses, vectors = trained_plain(start, options)
    for rank_losses in results:
        assert rank_losses == pytest.approx(losses, rel=1e-5)
    for folder in (tmp_path / "prompt", next((tmp_path / "run").glob("global_step*"))):
        read = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(start), folder)
        torch.testing.assert_close(vectors_of(read), vectors, rtol=1e-4, atol=1e-5)
