"""Vision-language models on a mesh: features of images among the embeddings, of a tower that is computed whole."""

import math
import re

import deepspeed
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText, Gemma3Config, LlavaConfig, Qwen2_5_VLConfig

import cuboid
from comparing import mesh_section
from conftest import TIMEOUT_S
from cuboid.distributed.topology import MeshShape
from cuboid.errors import CuboidError, UnsupportedModelError
from cuboid.models.architectures.media import IMAGES
from cuboid.models.batch.row_media import media_of_rows
from cuboid.models.certification.float64 import KeepFloat64
from cuboid.models.certification.mesh_certificates import mesh_verdict
from cuboid.models.kinds.registry import check_class
from launching import BIN, ROOT, free_port, run
from threaded import assert_as_alone, step_of
from warm_python import warm_python

IMAGE = 5  # the placeholder's id
_TEXT = {
    **{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0},
}
_VISION = {
    **{"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3},
    **{"image_size": 8, "patch_size": 4},
}
#: Four features of an image, of two layers of a CLIP; or one of four patches of a SigLIP, in a window of attention.
CONFIGS = {
    "llava": lambda: LlavaConfig(
        text_config={"model_type": "llama", **_TEXT},
        vision_config={"model_type": "clip_vision_model", **_VISION, "projection_dim": 24},
        image_token_index=IMAGE,
    ),
    "gemma3": lambda: Gemma3Config(
        text_config={**_TEXT, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
        vision_config={**_VISION, "image_size": 16},
        image_token_id=IMAGE,
        mm_tokens_per_image=4,
    ),
    "qwen2_5_vl": lambda: Qwen2_5_VLConfig(
        text_config={
            **_TEXT,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        },
        vision_config={
            **{"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 40, "out_hidden_size": 32},
            **{"patch_size": 2, "window_size": 8, "fullatt_block_indexes": [1]},
        },
        image_token_id=IMAGE,
        video_token_id=4,
        vision_start_token_id=3,
        vision_end_token_id=2,
    ),
}
#: Of Qwen's images, patches in time, height and width, in turn; four of them are one feature.
GRIDS = ((1, 4, 4), (1, 2, 4))
MESHES = ("1x2x1", "1x1x2", "2x1x1", "2x2x2")
#: Images in each row: none on the second rank of `batch`, a row twice on it, or one image alone.
ROWS = {"none behind": (2, 1, 0), "none before": (0, 0, 3), "filled up": (1, 0, 2), "one": (0, 1, 0)}


def built(architecture):
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIGS[architecture](), dtype=torch.float64).train()
    with torch.no_grad():
        for parameter in model.parameters():
            # Far from zero, also where transformers' own initialization is small.
            parameter.normal_(0.5 * (parameter.dim() == 1), 0.2)
    return model


def micro_batch(model, images=ROWS["none behind"], padding="right", length=19, seed=0):
    """Rows with so many images, some right after one another, with padding; labels are text."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(6, 61, (len(images), length), generator=generator)
    mask = torch.ones_like(ids)
    if padding == "right":
        mask[1, -3:] = 0
    elif padding == "left":
        mask[1, :3] = 0
    architecture, number = model.config.model_type, 0
    for row, count in enumerate(images):
        start = 4 if padding == "left" else 1
        for _ in range(count):
            size = 4 if architecture != "qwen2_5_vl" else math.prod(GRIDS[number % 2]) // 4
            ids[row, start : start + size] = IMAGE
            # In LLaVA, images follow right after one another; others tell them apart by text between them.
            start, number = start + size + (architecture != "llava"), number + 1
    labels = ids.masked_fill((mask == 0) | (ids == IMAGE), -100)
    batch = {"input_ids": ids, "labels": labels}
    if architecture == "qwen2_5_vl":
        grid = torch.tensor([GRIDS[number % 2] for number in range(sum(images))])
        pixels = torch.randn((int(grid.prod(-1).sum()), 24), generator=generator, dtype=torch.float64)
        batch |= {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": (ids == IMAGE).long()}
    else:
        edge = model.config.vision_config.image_size
        shape = (sum(images), 3, edge, edge)
        batch["pixel_values"] = torch.randn(shape, generator=generator, dtype=torch.float64)
    if architecture == "gemma3":
        batch["token_type_ids"] = (ids == IMAGE).long()
    return batch if padding is None else {**batch, "attention_mask": mask}


@pytest.mark.sample(2, ci=4)
@pytest.mark.parametrize("padding", ["right", "left", None])
@pytest.mark.parametrize("images", ROWS)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("architecture", CONFIGS)
def test_loss_and_every_gradient_are_those_of_one_process(architecture, mesh, images, padding):
    model = built(architecture)
    batch = micro_batch(model, ROWS[images], padding)
    assert_as_alone(model, mesh, step_of(**batch), mesh_verdict(type(model), model.config))


# --- training from slices ---------------------------------------------------------------------------------------------


def freeze(model, frozen):
    for name, parameter in model.named_parameters():
        if any(part in name for part in frozen):
            parameter.requires_grad_(False)


def three_steps(model, full_gradients, norm):
    """Loss, norm and all gradients of each of three steps of SGD with momentum, and logits afterwards."""
    optimizer = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], 1e-2, momentum=0.9)
    steps = []
    for seed, images in enumerate(("none behind", "filled up", "one")):
        optimizer.zero_grad()
        loss = model(**micro_batch(model, ROWS[images], seed=seed)).loss
        loss.backward()
        steps.append((loss.item(), norm(model), full_gradients(model)))
        optimizer.step()
    with torch.no_grad():
        logits = model.eval()(**micro_batch(model, ROWS["filled up"], seed=7)).logits
    return steps, logits


def plain_gradients(model):
    return {name: x.grad.clone() for name, x in model.named_parameters(remove_duplicate=False) if x.grad is not None}


def plain_norm(model):
    return torch.stack([x.grad.norm() for x in model.parameters() if x.grad is not None]).norm().item()


def sharded_norm(model):
    squares = sum(x.grad.square().sum() for x in model.counted_parameters() if x.grad is not None)
    dist.all_reduce(squares)
    return squares.sqrt().item()


def train_from_slices(path, mesh, frozen, out, checkpoints):
    """On a rank: loaded, trained for three steps, saved."""
    section = {"tensor_parallel": mesh_section(mesh)}
    model = cuboid.from_pretrained(path, section, dtype=torch.float64).train()
    freeze(model, frozen)
    if checkpoints:
        model.gradient_checkpointing_enable()
    with KeepFloat64():
        steps, logits = three_steps(model, cuboid.full_gradients, sharded_norm)
    model.save_pretrained(out)
    return steps, logits, cuboid.full_state_dict(model)


TOWER = ("vision_tower",)


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(
    ("architecture", "mesh", "frozen", "checkpoints"),
    [
        ("llava", "1x2x1", TOWER, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *((architecture, mesh, (), False) for architecture in CONFIGS for mesh in MESHES),
                *((architecture, "2x2x2", TOWER, False) for architecture in CONFIGS),
                ("llava", "2x2x2", ("vision_tower", "language_model", "lm_head"), False),
                ("llava", "2x2x1", (), True),
            )
        ),
    ],
)
def test_training_from_slices_is_that_of_plain_transformers(pool, tmp_path, architecture, mesh, frozen, checkpoints):
    plain = built(architecture)
    plain.save_pretrained(tmp_path / "start")
    size, out = MeshShape.parse(mesh).size, tmp_path / "out"
    args = (str(tmp_path / "start"), mesh, frozen, str(out), checkpoints)
    results = pool.run(size, train_from_slices, *args, timeout_s=TIMEOUT_S)
    freeze(plain, frozen)
    with KeepFloat64():
        expected, expected_logits = three_steps(plain, plain_gradients, plain_norm)
    for steps, logits, _ in results:
        assert [step[:2] for step in steps] == [pytest.approx(step[:2], rel=1e-9) for step in expected]
        torch.testing.assert_close(logits, expected_logits, rtol=1e-9, atol=1e-9)
    for (_, _, gradients), (_, _, wanted) in zip(results[0][0], expected, strict=True):
        assert gradients.keys() == wanted.keys()
        assert_close(gradients, wanted)
    weights = results[0][2]
    assert_close(weights, plain.state_dict())
    again = AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float64).eval()
    assert all(torch.equal(x, weights[name]) for name, x in again.state_dict().items())
    with torch.no_grad(), KeepFloat64():
        logits = again(**micro_batch(again, ROWS["filled up"], seed=7)).logits
    torch.testing.assert_close(logits, expected_logits, rtol=1e-9, atol=1e-9)


def assert_close(actual, wanted):
    for name, x in wanted.items():
        assert (actual[name] - x).norm() <= 1e-9 * x.norm() + 1e-12, name


@pytest.mark.ci
def test_a_launched_script_trains_a_model_with_a_frozen_tower_as_plain_transformers_does(tmp_path):
    model = built("llava").float()
    model.save_pretrained(tmp_path / "model")
    batch = micro_batch(model, ROWS["none before"])
    batch["pixel_values"] = batch["pixel_values"].float()
    save_file(batch, tmp_path / "samples.safetensors")
    launcher = (BIN / "deepspeed", "--quiet", "--num_accelerators", 2, "--master_port", free_port())
    paths = (tmp_path / "model", tmp_path / "samples.safetensors", tmp_path / "out")
    status, output = run(warm_python(), *launcher, ROOT / "docs/examples/describe.py", *paths)
    assert status == 0, output
    before = {name: x.clone() for name, x in model.state_dict().items()}
    freeze(model, TOWER)
    optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], 1e-3, weight_decay=0.0)
    losses = []
    for _ in range(3):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert [float(x) for x in re.findall(r"loss ([\d.]+)", output)] == pytest.approx(losses, rel=1e-4)
    weights = AutoModelForImageTextToText.from_pretrained(tmp_path / "out").state_dict()
    for name, x in model.state_dict().items():
        # Adam makes rounding errors of small gradients large, but not as large as its steps.
        torch.testing.assert_close(weights[name], x, rtol=0, atol=1e-3)
        assert (weights[name] - x).norm() <= 0.02 * (x - before[name]).norm(), name


def step_of_replicas(path, batches):
    """On one of two replicas with ZeRO 1: the losses, and the weights after a step."""
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-2}},
        "tensor_parallel": mesh_section("1x1x1"),
    }
    model = cuboid.from_pretrained(path, config).train()
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.backward(engine(**batches[dist.get_rank()]).loss)
    engine.step()
    return cuboid.full_state_dict(engine)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_replica_without_images_adds_nothing_to_the_gradients_of_the_tower(pool, tmp_path, architecture):
    model = built(architecture).float()
    model.save_pretrained(tmp_path)
    batches = [micro_batch(model, ROWS[images], None, seed=seed) for seed, images in enumerate(("none behind", "one"))]
    batches[0]["pixel_values"] = batches[0]["pixel_values"].float()
    batches[1] = {"input_ids": batches[1]["labels"].clamp(min=6), "labels": batches[1]["labels"]}
    weights = pool.run(2, step_of_replicas, str(tmp_path), batches, timeout_s=TIMEOUT_S)[0]
    (sum(model(**batch).loss for batch in batches) / 2).backward()
    for name, parameter in model.named_parameters():
        expected = parameter - (0 if parameter.grad is None else 1e-2 * parameter.grad)
        torch.testing.assert_close(weights[name], expected.detach(), rtol=1e-4, atol=1e-5)


def step_of_adapter(folder, mesh):
    """On a rank: loss and gradients of an adapter that is read from a folder."""
    model = built("llava")
    on_mesh = model if mesh is None else cuboid.shard(model, {"tensor_parallel": mesh_section(mesh)})
    adapted = PeftModel.from_pretrained(on_mesh, folder, is_trainable=True)
    with KeepFloat64():
        loss = adapted(**micro_batch(model)).loss
        loss.backward()
    return loss.detach(), plain_gradients(model) if mesh is None else cuboid.full_gradients(model)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["1x2x1", "1x1x2", "2x1x1"])
@pytest.mark.parametrize("targets", [r".*language_model.*(q_proj|v_proj)", "all-linear"])
def test_adapters_of_the_text_model_and_of_the_tower(threads, tmp_path, targets, mesh):
    adapted = get_peft_model(built("llava"), LoraConfig(r=2, target_modules=targets))
    for name, parameter in adapted.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter, 0, 0.3)
    adapted.save_pretrained(tmp_path)
    expected, wanted = step_of_adapter(str(tmp_path), None)
    results = threads.run(2, step_of_adapter, str(tmp_path), mesh)
    for loss, _ in results:
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    gradients = results[0][1]
    assert gradients.keys() == wanted.keys()
    assert_close(gradients, wanted)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return cuboid.shard(built("llava"), {"tensor_parallel": mesh_section("1x1x1")})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"pixel_values_videos": torch.zeros(1, 2, 3, 8, 8)},
            "pixel_values_videos has no rule .* videos and clips of audio",
        ),
        ({"image_sizes": torch.tensor([[8, 8]])}, "image_sizes has no rule"),
        ({"mm_encoder_outputs": {"image": None}}, "mm_encoder_outputs has no rule"),
        ({"pixel_values": torch.zeros(3, 8, 8)}, r"must be floats \[images, channels, height, width\], not .*3, 8, 8"),
        ({"pixel_values": [torch.zeros(3, 8, 8)]}, r"pixel_values must be floats .* not list"),
        ({"image_grid_thw": torch.tensor([[1, 4, 4]])}, "image_grid_thw has no rule on a sharded Llava"),
        ({"position_ids": torch.zeros(3, 3, 19, dtype=torch.long)}, "position_ids is"),
    ],
)
def test_what_there_is_no_rule_for_is_said(model, changes, words):
    with pytest.raises(CuboidError, match=words):
        model(**{**micro_batch(model), **changes})


def test_calls_without_a_rule_are_refused_by_name(model):
    batch = {name: x for name, x in micro_batch(model).items() if name != "labels"}
    with pytest.raises(UnsupportedModelError, match="generate with pixel_values has no rule on a mesh"):
        model.generate(**batch, max_new_tokens=2)
    with pytest.raises(UnsupportedModelError, match="LlavaModel was called by itself"):
        model.model(**batch)
    with pytest.raises(UnsupportedModelError, match="Leave the pipeline section out: a mesh takes it"):
        check_class(type(built("llava")), stages=True)


def test_text_alone_is_computed_and_generated(model):
    batch = {name: x for name, x in micro_batch(model, (0, 0, 0), None).items() if name != "pixel_values"}
    plain = built("llava")
    with KeepFloat64():
        torch.testing.assert_close(model(**batch).loss, plain(**batch).loss, rtol=1e-9, atol=1e-9)
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    ids = batch["input_ids"]
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))


@pytest.mark.parametrize(
    ("images", "placeholders", "words"),
    [
        (
            {"pixel_values": torch.zeros(2, 3, 8, 8)},
            [6, 2, 0],
            "row 0 of input_ids ends inside an image: 8 placeholders",
        ),
        ({"pixel_values": torch.zeros(2, 3, 8, 8)}, [0, 0, 0], "2 images, and input_ids have 0 placeholders"),
        (
            {"pixel_values": torch.zeros(9, 5), "image_grid_thw": torch.tensor([[1, 2, 4]])},
            [2],
            "images of 8 patches altogether, but pixel_values has 9",
        ),
    ],
)
def test_images_and_placeholders_that_contradict_each_other_are_named(images, placeholders, words):
    with pytest.raises(CuboidError, match=words):
        media_of_rows(IMAGES, images, placeholders, [0])


def test_a_rank_gets_the_images_of_its_rows():
    pixels, grid = torch.arange(24.0).reshape(24, 1), torch.tensor([[1, 2, 4], [1, 2, 2], [1, 2, 4], [1, 2, 2]])
    images = {"pixel_values": pixels, "image_grid_thw": grid}
    local, of_rank = media_of_rows(IMAGES, images, [3, 0, 2, 1], [2, 3, 3])
    assert local["image_grid_thw"].tolist() == [[1, 2, 4], [1, 2, 2], [1, 2, 2]]
    assert local["pixel_values"].flatten().tolist() == [*range(12, 20), *range(20, 24), *range(20, 24)]
    assert of_rank.spare is None
    local, of_rank = media_of_rows(IMAGES, images, [3, 0, 2, 1], [1])
    assert local["pixel_values"].shape == (0, 1)
    assert of_rank.spare["image_grid_thw"].tolist() == [[1, 2, 4]]
