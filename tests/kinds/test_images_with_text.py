"""Vision-language models on a mesh: features of images among the embeddings, of a tower that is computed whole."""

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForImageTextToText, Gemma3Config, LlavaConfig

import cuboid
from comparing import mesh_section
from conftest import TIMEOUT_S
from cuboid.distributed.topology import MeshShape
from cuboid.models.certification.float64 import KeepFloat64
from cuboid.models.certification.mesh_certificates import mesh_verdict
from threaded import assert_as_alone, step_of

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
}
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
    for row, count in enumerate(images):
        start = 4 if padding == "left" else 1
        for image in range(count):
            # The second image begins where the first ends, unless a token of text is between them.
            first = start + 4 * image + (image if architecture_of(model) == "gemma3" else 0)
            ids[row, first : first + 4] = IMAGE
    labels = ids.masked_fill((mask == 0) | (ids == IMAGE), -100)
    size = model.config.vision_config.image_size
    pixels = torch.randn((sum(images), 3, size, size), generator=generator, dtype=torch.float64)
    batch = {"input_ids": ids, "labels": labels, "pixel_values": pixels}
    if padding is not None:
        batch["attention_mask"] = mask
    if architecture_of(model) == "gemma3":
        batch["token_type_ids"] = (ids == IMAGE).long()
    return batch


def architecture_of(model):
    return model.config.model_type


@pytest.mark.sample(6)
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
