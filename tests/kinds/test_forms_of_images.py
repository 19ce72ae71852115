"""Vision-language models whose images come in other forms than LLaVA's, and the small models that certify them."""

import copy

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Idefics3Config,
    Llama4Config,
    LlamaConfig,
    LlavaConfig,
    LlavaNextConfig,
    Mistral3Config,
    MoonshineForConditionalGeneration,
    PaliGemmaConfig,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

import cuboid
from comparing import mesh_section
from conftest import TIMEOUT_S
from cuboid.errors import CuboidError, UnsupportedModelError
from cuboid.models.architectures.certificate import MeshVerdict
from cuboid.models.architectures.media import IMAGES
from cuboid.models.batch.row_media import media_of_rows
from cuboid.models.certification.default_models import default_config
from cuboid.models.certification.float64 import KeepFloat64
from cuboid.models.certification.mesh_certificates import mesh_verdict
from cuboid.models.certification.mesh_check import check_meshes
from cuboid.models.certification.small_config import small_config
from cuboid.models.kinds.probe_rows import CannotProbe
from cuboid.models.kinds.registry import check_class, kind_of_class
from threaded import Threaded, assert_as_alone, step_of

IMAGE = 5
TEXT = {
    **{"vocab_size": 61, "hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0},
    **{"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 8},
}
LLAMA = {"model_type": "llama", **TEXT}
VISION = {
    **{"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"image_size": 8, "patch_size": 4},
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
CONFIGS = {
    "paligemma": lambda: PaliGemmaConfig(
        text_config={"model_type": "gemma", **TEXT}, vision_config=VISION, projection_dim=48, image_token_index=IMAGE
    ),
    # Features of images are added to hidden states behind its first layer.
    "qwen3_vl": lambda: Qwen3VLConfig(
        text_config={**TEXT, "rope_parameters": MROPE},
        vision_config={
            **{"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 40, "out_hidden_size": 48},
            **{"patch_size": 2, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        },
        image_token_id=IMAGE,
        video_token_id=4,
        vision_start_token_id=3,
        vision_end_token_id=2,
    ),
    "idefics3": lambda: Idefics3Config(
        text_config=LLAMA, vision_config=VISION, image_token_id=IMAGE, scale_factor=2, pad_token_id=0
    ),
    "mistral3": lambda: Mistral3Config(
        text_config={"model_type": "mistral", **TEXT},
        vision_config={"model_type": "pixtral", **VISION, "image_size": 16, "head_dim": 12},
        image_token_index=IMAGE,
    ),
    # What only a tower's forward takes.
    "pixtral": lambda: LlavaConfig(
        text_config={"model_type": "mistral", **TEXT},
        vision_config={"model_type": "pixtral", **VISION, "head_dim": 12},
        image_token_index=IMAGE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    ),
    # Its base model has a parameter of its own, which ends the rows of an image's patches.
    "llava_next": lambda: LlavaNextConfig(
        text_config=LLAMA,
        vision_config={"model_type": "clip_vision_model", **VISION, "projection_dim": 24},
        image_grid_pinpoints=[[8, 16], [16, 8]],
        image_token_index=IMAGE,
    ),
    # There is no base model beside the head.
    "llama4": lambda: Llama4Config(
        text_config={**TEXT, "intermediate_size_mlp": 48, "num_local_experts": 2, "attn_temperature_tuning": False},
        vision_config={
            **{**VISION, "intermediate_size": 96, "vision_output_dim": 20},
            **{"projector_input_dim": 20, "projector_output_dim": 20},
        },
        image_token_index=IMAGE,
    ),
}
#: Features of images, in turn.
SIZES = {
    **{"paligemma": (4,), "qwen3_vl": (4, 2), "idefics3": (1,), "mistral3": (4, 2), "pixtral": (4, 2), "llama4": (1,)},
    # Of an image whose tiles are filled, and of one that is half as wide.
    "llava_next": (14, 10),
}
#: Numbers of images of rows; rows without any come first, in the middle and last.
ROWS = {"none before": (0, 1, 2), "none between": (2, 0, 1), "none behind": (1, 2, 0)}
MESHES = ("1x3x1", "2x1x1", "1x1x2", "3x1x1", "2x1x2")


def built(architecture):
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIGS[architecture](), dtype=torch.float64).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.5 * (parameter.dim() == 1), 0.2)
    return model


def images_of(architecture, counts, generator):
    """What a processor makes of so many images of each row."""

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    total = sum(counts)
    in_turn = [number % 2 for number in range(total)]
    if architecture == "qwen3_vl":
        grid = torch.tensor([[(1, 4, 4), (1, 2, 4)][n] for n in in_turn])
        return {"pixel_values": random(int(grid.prod(-1).sum()), 24), "image_grid_thw": grid}
    if architecture == "mistral3":
        sizes = torch.tensor([[(16, 16), (16, 8)][n] for n in in_turn])
        return {"pixel_values": random(total, 3, 16, 16), "image_sizes": sizes}
    if architecture == "pixtral":
        return {
            "pixel_values": random(total, 3, 8, 8),
            "image_sizes": torch.tensor([[(8, 8), (8, 4)][n] for n in in_turn]),
        }
    if architecture == "llava_next":
        sizes = torch.tensor([[(8, 16), (8, 8)][n] for n in in_turn])
        return {"pixel_values": random(total, 3, 3, 8, 8), "image_sizes": sizes}
    if architecture == "idefics3":
        pixels = random(len(counts), max(counts), 3, 8, 8)
        for row, count in enumerate(counts):
            pixels[row, count:] = 0
        return {"pixel_values": pixels, "pixel_attention_mask": (pixels[:, :, 0] != 0).long()}
    return {"pixel_values": random(total, 3, 8, 8)}


def micro_batch(architecture, counts=ROWS["none behind"], padding=None, seed=0):
    """Rows with so many images at different places; labels are text."""
    generator, sizes, number = torch.Generator().manual_seed(seed), SIZES[architecture], 0
    ids = torch.randint(6, 61, (len(counts), 2 * max(sizes) + 11), generator=generator)
    mask = torch.ones_like(ids)
    if padding == "right":
        mask[1, -3:] = 0
    elif padding == "left":
        mask[1, :3] = 0
    for row, count in enumerate(counts):
        start = 3 + row
        for _ in range(count):
            size = sizes[number % len(sizes)]
            ids[row, start : start + size] = IMAGE
            start, number = start + size + 1 + row, number + 1
    labels = ids.masked_fill((mask == 0) | (ids == IMAGE), -100)
    batch = {"input_ids": ids, "labels": labels, **images_of(architecture, counts, generator)}
    if architecture == "qwen3_vl":
        batch["mm_token_type_ids"] = (ids == IMAGE).long()
    if architecture == "paligemma":
        # Text before an answer sees all of itself.
        batch["token_type_ids"] = (torch.arange(ids.shape[1]) >= ids.shape[1] - 5).long().repeat(len(counts), 1)
    return batch if padding is None else {**batch, "attention_mask": mask}


@pytest.mark.sample(8, ci=14)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("padding", [None, "right", "left"])
@pytest.mark.parametrize("images", ROWS)
@pytest.mark.parametrize("architecture", CONFIGS)
def test_loss_and_every_gradient_are_those_of_one_process(architecture, images, padding, mesh):
    batch = micro_batch(architecture, ROWS[images], padding)
    assert_as_alone(built(architecture), mesh, step_of(**batch), MeshVerdict(inputs="media"))


def trained(model, architecture):
    """The losses of three steps of SGD, with images in other rows in each."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
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
@pytest.mark.parametrize("architecture", ["llava_next", "qwen3_vl", "llama4", "idefics3", "pixtral"])
def test_training_from_slices_is_that_of_plain_transformers(pool, tmp_path, architecture, mesh):
    plain, out = built(architecture), tmp_path / "out"
    plain.save_pretrained(tmp_path / "start")
    args = (str(tmp_path / "start"), architecture, mesh, str(out))
    results = pool.run(2, trained_from_slices, *args, timeout_s=TIMEOUT_S)
    with KeepFloat64():
        losses = trained(plain, architecture)
    assert [result[0] for result in results] == [pytest.approx(losses, rel=1e-9)] * 2
    saved = AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float64).state_dict()
    for name, x in plain.state_dict().items():
        torch.testing.assert_close(results[0][1][name], x, rtol=1e-9, atol=1e-9)
        assert torch.equal(saved[name], results[0][1][name])


def test_text_before_an_answer_does_not_see_what_a_mesh_fills_rows_up_with():
    batch = micro_batch("paligemma")
    batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
    assert_as_alone(built("paligemma"), "1x2x1", step_of(**batch), MeshVerdict(inputs="media"))


# --- certification ----------------------------------------------------------------------------------------------------

PROBED = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "paligemma", "llava_next", "llava_onevision", "vipllava", "idefics2"),
    *("idefics3", "smolvlm", "internvl", "mistral3", "llama4", "glm4v", "lfm2_vl", "aya_vision"),
)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", PROBED)
def test_default_configs_pass_the_probe(model_type):
    config = default_config(model_type)
    verdict = check_meshes(AutoModelForImageTextToText._model_mapping[type(config)], config)
    assert "whole rows" not in verdict.refused
    assert not verdict.blocks


def test_a_small_model_has_the_text_model_and_the_tower_of_the_real_one():
    text = {"model_type": "mistral", "sliding_window": 4096}
    config = LlavaConfig(text_config=text, vision_config={"model_type": "pixtral"})
    small = small_config(config)
    assert (small.text_config.model_type, small.vision_config.model_type) == ("mistral", "pixtral")
    assert small.text_config.sliding_window is not None


def test_widths_that_parts_of_a_model_share_stay_the_same():
    small = small_config(AutoConfig.for_model("paligemma"))
    assert small.vision_config.projection_dim == small.text_config.hidden_size
    small = small_config(default_config("llama4"))
    vision = small.vision_config
    # Four patches are one feature.
    assert vision.intermediate_size == 4 * vision.hidden_size
    assert vision.vision_output_dim == vision.projector_output_dim


def test_layers_of_a_tower_that_differ_are_kept():
    small = small_config(AutoConfig.for_model("qwen3_vl")).vision_config
    assert small.depth > len(small.deepstack_visual_indexes) > 0
    assert max(small.deepstack_visual_indexes) < small.depth
    assert max(map(abs, small_config(AutoConfig.for_model("vipllava")).vision_feature_layers)) <= 4


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_tower_that_drops_images_at_random_is_refused_by_the_key():
    config = AutoConfig.for_model("qianfan_ocr")
    kind = kind_of_class(AutoModelForImageTextToText._model_mapping[type(config)])
    with pytest.raises(CannotProbe, match=r"drop_path_rate is 0\.1: it drops rows .* set it to 0\.0"):
        kind.probe_config(config, lambda one: one)


@pytest.mark.ci
def test_a_type_without_a_small_model_is_refused_in_a_sentence_with_its_name():
    config = AutoConfig.for_model("molmo2")
    cls = AutoModelForImageTextToText._model_mapping[type(config)]
    words = f"(?s){cls.__name__} can't be probed .* can't be made small.* train it"
    with pytest.raises(UnsupportedModelError, match=words):
        mesh_verdict(cls, config)


def test_a_model_of_audio_is_refused_by_what_it_is_given():
    with pytest.raises(UnsupportedModelError, match="MoonshineForConditionalGeneration is for generation from input_v"):
        check_class(MoonshineForConditionalGeneration)


def test_inputs_that_a_text_model_alone_does_not_see_are_named():
    threaded = Threaded(AutoModelForCausalLM.from_config(LlamaConfig(**TEXT)), "1x2x1")
    batch = micro_batch("paligemma")
    text = {name: batch[name] for name in ("input_ids", "labels")}
    with pytest.raises(UnsupportedModelError, match="image_pixel_values has no rule on a sharded model, whose inputs"):
        threaded.run(step_of(**text, image_pixel_values=torch.zeros(1, 3, 8, 8)))


def test_images_that_have_other_numbers_of_features_than_placeholders_are_named():
    batch = micro_batch("mistral3", (2, 1))
    batch["image_sizes"][0, 1] = 8
    threaded = Threaded(built("mistral3"), "2x1x1", MeshVerdict(inputs="media"))
    with pytest.raises(CuboidError, match="the images have 8 features, and input_ids have 10 placeholders"):
        threaded.run(step_of(**batch))


def test_rows_of_images_are_those_of_ids():
    images = {"pixel_values": torch.zeros(2, 1, 3, 8, 8)}
    with pytest.raises(CuboidError, match="pixel_values has 2 rows, and input_ids have 3"):
        media_of_rows(IMAGES, images, [1, 1, 0], [0])
    local, of_rank = media_of_rows(IMAGES, images, [0, 1], [0])
    assert local["pixel_values"].shape[0] == 0
    assert of_rank.spare["pixel_values"].shape[0] == 1


def test_layers_that_take_features_are_plain_again_in_a_copy_of_the_class():
    threaded = Threaded(built("qwen3_vl"), "1x2x1", MeshVerdict(inputs="media"))
    text = threaded.models[0].model.language_model
    assert type(text).__name__ == type(built("qwen3_vl").model.language_model).__name__
    assert isinstance(threaded.models[0], Qwen3VLForConditionalGeneration)
    assert copy.deepcopy(threaded.models[0]).model.language_model.cuboid is not None
