"""Models of audio with text on a mesh: features of clips among the embeddings, of a tower that is computed whole."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AudioFlamingo3Config,
    GlmAsrConfig,
    GraniteSpeechConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen3ASRConfig,
    VoxtralConfig,
    VoxtralForConditionalGeneration,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)

import cuboid
from comparing import mesh_section
from conftest import TIMEOUT_S
from cuboid.errors import CuboidError, UnsupportedModelError
from cuboid.models.architectures.certificate import MeshVerdict
from cuboid.models.certification.default_models import default_config
from cuboid.models.certification.float64 import KeepFloat64
from cuboid.models.certification.mesh_check import check_meshes
from cuboid.models.certification.small_config import small_config
from cuboid.models.kinds.registry import auto_class_of, check_class
from threaded import Threaded, assert_as_alone, step_of

CLIP = 5  # the placeholder's id
TEXT = {
    **{"vocab_size": 61, "hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0},
    **{"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 8},
}
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_mel_bins": 6,
}
CONFIGS = {
    # A clip always has four features.
    "voxtral": lambda: VoxtralConfig(
        text_config={"model_type": "llama", **TEXT},
        audio_config={**TOWER, "max_source_positions": 16},
        audio_token_id=CLIP,
    ),
    "audioflamingo3": lambda: AudioFlamingo3Config(
        text_config={"model_type": "qwen2", **TEXT},
        audio_config={**TOWER, "max_source_positions": 16},
        audio_token_id=CLIP,
    ),
    "glmasr": lambda: GlmAsrConfig(
        text_config={"model_type": "llama", **TEXT}, audio_config=TOWER, audio_token_id=CLIP
    ),
    "qwen3_asr": lambda: Qwen3ASRConfig(
        text_config={"model_type": "qwen3", **TEXT},
        audio_config={
            **{"d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24},
            **{"num_mel_bins": 8, "n_window": 50, "n_window_infer": 100, "output_dim": 48, "downsample_hidden_size": 6},
        },
        audio_token_id=CLIP,
        timestamp_token_id=4,
        pad_token_id=0,
        eos_token_id=2,
    ),
    # Its tower has norms over all clips, its mask is of features, and its loss leaves out what the text's mask hides.
    "granite_speech": lambda: GraniteSpeechConfig(
        text_config={"model_type": "granite", **TEXT},
        encoder_config={
            **{"input_dim": 6, "num_layers": 2, "hidden_dim": 16, "num_heads": 2, "dim_head": 8, "output_dim": 5},
            **{"context_size": 8, "max_pos_emb": 8, "conv_kernel_size": 3, "dropout": 0.0},
        },
        projector_config={
            **{"model_type": "blip_2_qformer", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
            **{"intermediate_size": 24, "encoder_hidden_size": 16, "vocab_size": 8, "cross_attention_frequency": 1},
            **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        },
        downsample_rate=5,
        window_size=15,
        audio_token_index=CLIP,
    ),
}
#: Of clips, in turn: the mask and its length, how many frames or features it lets pass, and the features that has.
CLIPS = {
    "voxtral": (("", 32, 32, 4), ("", 32, 32, 4)),
    "audioflamingo3": (("input_features_mask", 32, 32, 8), ("input_features_mask", 32, 20, 5)),
    "glmasr": (("input_features_mask", 32, 32, 4), ("input_features_mask", 32, 18, 2)),
    "qwen3_asr": (("input_features_mask", 100, 24, 3), ("input_features_mask", 100, 13, 2)),
    "granite_speech": (("input_features_mask", 6, 6, 6), ("input_features_mask", 6, 4, 4)),
}
#: Numbers of clips of rows; rows without any come first, in the middle and last.
ROWS = {"none before": (0, 1, 2), "none between": (2, 0, 1), "none behind": (1, 2, 0)}
MESHES = ("1x3x1", "2x1x1", "1x1x2", "3x1x1", "2x1x2")


def built(architecture):
    torch.manual_seed(0)
    config = CONFIGS[architecture]()
    auto_class = auto_class_of([type(config).__name__.replace("Config", "ForConditionalGeneration")])
    model = auto_class.from_config(config, dtype=torch.float64).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.5 * (parameter.dim() == 1), 0.2)
    return model


def micro_batch(architecture, counts=ROWS["none behind"], padding=None, seed=0):
    """Rows with so many clips of two lengths at different places; labels are text."""
    generator, number = torch.Generator().manual_seed(seed), 0
    ids = torch.randint(6, 61, (len(counts), 27), generator=generator)
    mask = torch.ones_like(ids)
    if padding == "right":
        mask[1, -3:] = 0
    elif padding == "left":
        mask[1, :3] = 0
    for row, count in enumerate(counts):
        start = 3 + row
        for _ in range(count):
            size = CLIPS[architecture][number % 2][3]
            ids[row, start : start + size] = CLIP
            start, number = start + size + 1 + row, number + 1
    labels = ids.masked_fill((mask == 0) | (ids == CLIP), -100)
    shape = {"granite_speech": (number, 30, 6), "qwen3_asr": (number, 8, 100)}.get(architecture, (number, 6, 32))
    batch = {"input_ids": ids, "labels": labels}
    if number:
        batch["input_features"] = torch.randn(shape, generator=generator, dtype=torch.float64)
        name, length, *_ = CLIPS[architecture][0]
        lengths = torch.tensor([CLIPS[architecture][n % 2][2] for n in range(number)])
        if name:
            batch[name] = torch.arange(length) < lengths.unsqueeze(1)
    return batch if padding is None else {**batch, "attention_mask": mask}


def verdict_of(architecture):
    return MeshVerdict(inputs="media", gathers_logits=architecture == "granite_speech")


@pytest.mark.sample(6, ci=12)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("padding", [None, "right", "left"])
@pytest.mark.parametrize("clips", ROWS)
@pytest.mark.parametrize("architecture", CONFIGS)
def test_loss_and_every_gradient_are_those_of_one_process(architecture, clips, padding, mesh):
    batch = micro_batch(architecture, ROWS[clips], padding)
    assert_as_alone(built(architecture), mesh, step_of(**batch), verdict_of(architecture))


def test_text_alone_is_computed_without_the_tower():
    assert_as_alone(built("voxtral"), "2x2x1", step_of(**micro_batch("voxtral", (0, 0, 0))), verdict_of("voxtral"))


def trained(model, architecture):
    """The losses of three steps of SGD, with clips in other rows in each."""
    optimizer = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], 1e-2, momentum=0.9)
    losses = []
    for seed, counts in enumerate(ROWS.values()):
        optimizer.zero_grad()
        loss = model(**micro_batch(architecture, counts, seed=seed)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained_from_slices(path, architecture, mesh, out):
    """On a rank: losses of a model that was loaded, and its weights, which are saved."""
    model = cuboid.from_pretrained(path, {"tensor_parallel": mesh_section(mesh)}, dtype=torch.float64).train()
    with KeepFloat64():
        losses = trained(model, architecture)
    model.save_pretrained(out)
    return losses, cuboid.full_state_dict(model)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["1x2x1", "2x1x1"])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_training_from_slices_is_that_of_plain_transformers(pool, tmp_path, architecture, mesh):
    plain, out = built(architecture), tmp_path / "out"
    plain.save_pretrained(tmp_path / "start")
    args = (str(tmp_path / "start"), architecture, mesh, str(out))
    results = pool.run(2, trained_from_slices, *args, timeout_s=TIMEOUT_S)
    with KeepFloat64():
        losses = trained(plain, architecture)
    assert [result[0] for result in results] == [pytest.approx(losses, rel=1e-9)] * 2
    saved = type(plain).from_pretrained(out, dtype=torch.float64).state_dict()
    for name, x in plain.state_dict().items():
        torch.testing.assert_close(results[0][1][name], x, rtol=1e-9, atol=1e-9)
        assert torch.equal(saved[name], results[0][1][name])


def step_of_adapter(folder, architecture, mesh):
    """On a rank: loss and gradients of an adapter of the text model that is read from a folder."""
    model = built(architecture)
    on_mesh = model if mesh is None else cuboid.shard(model, {"tensor_parallel": mesh_section(mesh)})
    adapted = PeftModel.from_pretrained(on_mesh, folder, is_trainable=True)
    with KeepFloat64():
        loss = adapted(**micro_batch(architecture)).loss
        loss.backward()
    gradients = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    return loss.detach(), gradients if mesh is None else cuboid.full_gradients(model)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["1x2x1", "1x1x2", "2x1x1"])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_adapters_of_the_text_model_beside_a_frozen_tower(threads, tmp_path, architecture, mesh):
    targets = r".*language_model.*(q_proj|v_proj)"
    adapted = get_peft_model(built(architecture), LoraConfig(r=2, target_modules=targets))
    for name, parameter in adapted.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter, 0, 0.3)
    adapted.save_pretrained(tmp_path)
    expected, wanted = step_of_adapter(str(tmp_path), architecture, None)
    results = threads.run(2, step_of_adapter, str(tmp_path), architecture, mesh)
    for loss, _ in results:
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    gradients = results[0][1]
    assert gradients.keys() == wanted.keys()
    for name, x in wanted.items():
        assert (gradients[name] - x).norm() <= 1e-9 * x.norm() + 1e-12, name


# --- certification ----------------------------------------------------------------------------------------------------

PROBED = ("voxtral", "audioflamingo3", "glmasr", "qwen3_asr", "fun_asr_nano", "granite_speech")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", PROBED)
def test_default_configs_pass_the_probe(model_type):
    config = default_config(model_type)
    mapping = (
        MODEL_FOR_MULTIMODAL_LM_MAPPING if model_type != "audioflamingo3" else MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    )
    verdict = check_meshes(mapping[type(config)], config)
    assert not verdict.refused
    assert not verdict.blocks


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pixel_values": torch.zeros(1, 3, 8, 8)}, "pixel_values has no rule on a sharded model of audio with text"),
        ({"input_features": torch.zeros(6, 32)}, r"input_features must be floats \[clips, …, …\], not .*6, 32"),
        ({"input_features_mask": torch.ones(3, 32)}, "input_features_mask has no rule .* which takes input_features"),
    ],
)
def test_what_there_is_no_rule_for_is_said(changes, words):
    threaded = Threaded(built("voxtral"), "1x2x1", verdict_of("voxtral"))
    with pytest.raises(CuboidError, match=words):
        threaded.run(step_of(**{**micro_batch("voxtral"), **changes}))


def test_a_mask_of_other_clips_is_refused():
    batch = micro_batch("glmasr")
    batch["input_features_mask"] = batch["input_features_mask"][:2]
    threaded = Threaded(built("glmasr"), "1x2x1", verdict_of("glmasr"))
    with pytest.raises(CuboidError, match=r"input_features_mask is \[2, 32\], but input_features is \[3, 6, 32\]"):
        threaded.run(step_of(**batch))


def test_clips_that_have_other_numbers_of_features_than_placeholders_are_named():
    batch = micro_batch("audioflamingo3", (2, 1, 0))
    batch["input_features_mask"][0, 10:] = False
    threaded = Threaded(built("audioflamingo3"), "2x1x1", verdict_of("audioflamingo3"))
    with pytest.raises(CuboidError, match=r"the clips of audio have \d+ features, and input_ids have 21 placeholders"):
        threaded.run(step_of(**batch))


def test_calls_without_a_rule_are_refused_by_name():
    threaded = Threaded(built("voxtral"), "1x2x1", verdict_of("voxtral"))
    batch = {name: x for name, x in micro_batch("voxtral").items() if name != "labels"}
    with pytest.raises(UnsupportedModelError, match="generate with input_features has no rule on a mesh"):
        threaded.run(lambda model: model.generate(**batch, max_new_tokens=2))
    with pytest.raises(UnsupportedModelError, match="Leave the pipeline section out: a mesh takes it"):
        check_class(VoxtralForConditionalGeneration, stages=True)


@pytest.mark.parametrize("cls", [Qwen2AudioForConditionalGeneration])
def test_other_models_of_audio_are_refused_by_name(cls):
    with pytest.raises(UnsupportedModelError, match=f"{cls.__name__} is for generation from"):
        check_class(cls)


def test_widths_that_parts_of_a_model_share_stay_the_same():
    small = small_config(default_config("fun_asr_nano"))
    assert small.adaptor_config.intermediate_size * 4 == small.text_config.hidden_size
    assert small.audio_config.num_timestamp_prediction_layers <= small.audio_config.num_hidden_layers
    small = small_config(default_config("granite_speech"))
    assert small.projector_config.encoder_hidden_size == small.encoder_config.hidden_dim
