"""Models of images on a mesh: patches are split at the first layer, and a class token makes them an odd number."""

import copy

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModel, AutoModelForImageClassification, AutoModelForMaskedImageModeling

import cuboid
from conftest import TIMEOUT_S
from cuboid.config.schema import CuboidConfig
from cuboid.distributed.thread_ranks import ThreadRanks
from cuboid.distributed.topology import MeshShape
from cuboid.errors import CuboidError, UnsupportedModelError
from cuboid.models.certification.mesh_certificates import certified_plan
from cuboid.models.kinds.registry import auto_class_of, check_class
from cuboid.models.sharded.sharded_model import shard_modules
from cuboid.tensor3d.sharding.sharding_spec import take_shard

AUTO = {
    "classes": AutoModelForImageClassification,
    "masks": AutoModelForMaskedImageModeling,
    "hidden": AutoModel,
}
_VIT = {
    **{"image_size": 12, "patch_size": 3, "encoder_stride": 3, "hidden_size": 32, "num_attention_heads": 4},
    **{"num_hidden_layers": 2, "num_labels": 5, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
#: Positions of 16 patches and a class token, and of DeiT's distillation token, or of registers.
OPTIONS = {
    "vit": {**_VIT, "intermediate_size": 48},
    "deit": {**_VIT, "intermediate_size": 48},
    "dinov2": {**_VIT, "mlp_ratio": 2},
}


def built(architecture, task, **more):
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **{**OPTIONS[architecture], **more})
    if architecture == "deit" and task == "classes":
        # Its config has a second class for the task.
        config.architectures = ["DeiTForImageClassification"]
    model = AUTO[task].from_config(config, dtype=torch.float64).train()
    for parameter in model.parameters():
        # Far from zero, also where transformers' own initialization is small.
        torch.nn.init.normal_(parameter, 0.5 * (parameter.dim() == 1), 0.2)
    return model


def micro_batch(task, rows=3, seed=0):
    """As many rows as no mesh with a batch axis divides."""
    generator = torch.Generator().manual_seed(seed)
    batch = {"pixel_values": torch.randn((rows, 3, 12, 12), generator=generator, dtype=torch.float64)}
    if task == "classes":
        batch["labels"] = torch.randint(0, 5, (rows,), generator=generator)
    elif task == "masks":
        batch["bool_masked_pos"] = torch.rand((rows, 16), generator=generator) < 0.5
    return batch


def score(output):
    """A loss: the model's own, or one of hidden states."""
    if getattr(output, "loss", None) is not None:
        return output.loss
    pooled = getattr(output, "pooler_output", None)
    return output.last_hidden_state.sin().mean() + (0 if pooled is None else pooled.cos().mean())


def two_steps(model, task, full_gradients, norm):
    """Loss, norm and all gradients of each of two steps of SGD with momentum."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    steps = []
    for step in range(2):
        optimizer.zero_grad()
        loss = score(model(**micro_batch(task, seed=step)))
        loss.backward()
        steps.append((loss.item(), norm(model), full_gradients(model)))
        optimizer.step()
    return steps


def plain_gradients(model):
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def plain_norm(model):
    return torch.stack([x.norm() for x in plain_gradients(model).values()]).norm().item()


def sharded_norm(model):
    squares = sum(x.grad.square().sum() for x in model.counted_parameters() if x.grad is not None)
    dist.all_reduce(squares)
    return squares.sqrt().item()


def ds_config(mesh):
    batch, sequence, hidden = map(int, mesh.split("x"))
    section = {"batch": batch, "sequence": sequence, "hidden": hidden}
    return {"tensor_parallel": {"mode": "3d_tensor", "mesh": section}}


def train_from_slices(path, mesh, task, out, checkpoints):
    """On a rank: loaded, trained for two steps, saved."""
    model = cuboid.from_pretrained(path, ds_config(mesh), auto_class=AUTO[task], dtype=torch.float64).train()
    if checkpoints:
        model.gradient_checkpointing_enable()
    steps = two_steps(model, task, cuboid.full_gradients, sharded_norm)
    model.save_pretrained(out)
    return steps, cuboid.full_state_dict(model)


def assert_as_plain(pool, tmp_path, architecture, task, mesh, checkpoints=False):
    plain = built(architecture, task)
    plain.save_pretrained(tmp_path / "start")
    size, out = MeshShape.parse(mesh).size, tmp_path / "out"
    args = (str(tmp_path / "start"), mesh, task, str(out), checkpoints)
    results = pool.run(size, train_from_slices, *args, timeout_s=TIMEOUT_S)
    expected = two_steps(plain, task, plain_gradients, plain_norm)
    for steps, _ in results:
        assert [step[:2] for step in steps] == [pytest.approx(step[:2], rel=1e-9) for step in expected]
    for (_, _, gradients), (_, _, wanted) in zip(results[0][0], expected, strict=True):
        assert gradients.keys() == wanted.keys()
        assert_close(gradients, wanted)
    weights = results[0][1]
    assert_close(weights, plain.state_dict())
    again = AUTO[task].from_pretrained(out, dtype=torch.float64).state_dict()
    assert again.keys() == weights.keys()
    assert all(torch.equal(x, weights[name]) for name, x in again.items())


def assert_close(actual, wanted):
    for name, x in wanted.items():
        assert (actual[name] - x).norm() <= 1e-9 * x.norm() + 1e-12, name


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(
    ("architecture", "task", "mesh"),
    [
        ("vit", "classes", "1x2x1"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *(("vit", task, mesh) for task in AUTO for mesh in ("2x1x1", "1x1x2", "2x2x2")),
                *(("deit", task, "2x2x2") for task in AUTO),
                *(("dinov2", task, "1x2x2") for task in ("classes", "hidden")),
                # 17 and 18 positions, filled up to 20.
                *((architecture, "classes", "1x4x1") for architecture in ("vit", "deit")),
            )
        ),
    ],
)
def test_training_from_slices_is_that_of_plain_transformers(pool, tmp_path, architecture, task, mesh):
    assert_as_plain(pool, tmp_path, architecture, task, mesh)


@pytest.mark.slow
def test_checkpointed_layers_give_the_same(pool, tmp_path):
    assert_as_plain(pool, tmp_path, "vit", "classes", "1x2x2", checkpoints=True)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return cuboid.shard(built("vit", "classes"), ds_config("1x1x1"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"interpolate_pos_encoding": True}, "all images have the size in the model's config"),
        ({"pixel_values": torch.zeros(3, 3, 15, 15)}, "the config's image_size is 12"),
        ({"pixel_values": torch.zeros(3, 3, 12)}, r"needs pixel_values, floats \[batch, channels, height, width\]"),
        ({"attention_mask": torch.ones(3, 17)}, "attention_mask has no rule"),
        ({"output_hidden_states": True}, "output_hidden_states has no rule"),
        ({"labels": torch.tensor([0, 1, 5])}, r"labels\[2\] is 5, but the model's head has 5 classes"),
        ({"labels": torch.zeros(3, 17, dtype=torch.long)}, r"image classification needs \[3\] or \[3, 1\]"),
        ({"input_ids": torch.ones(3, 17, dtype=torch.long)}, "input_ids has no rule on a sharded model of images"),
    ],
)
def test_what_there_is_no_rule_for_is_said(model, changes, words):
    with pytest.raises(CuboidError, match=words):
        model(**{**micro_batch("classes"), **changes})


def test_ranks_must_be_given_the_same_images():
    shape = MeshShape.parse("1x2x1")
    plain = built("vit", "classes")
    plan, ranks = certified_plan(plain, shape), ThreadRanks(shape)

    def step(mesh):
        copied = copy.deepcopy(plain)
        sharded = shard_modules(
            copied, plan, mesh, CuboidConfig().tensor_parallel, lambda x, spec: take_shard(x, spec, mesh)
        )
        with pytest.raises(CuboidError, match="theirs differ in pixel_values, labels"):
            sharded(**micro_batch("classes", seed=mesh.rank))
        return True

    assert all(ranks.run(step))


def test_a_pipeline_takes_no_models_of_images():
    with pytest.raises(UnsupportedModelError, match="for image classification; a pipeline has rules for the heads"):
        check_class(type(built("vit", "classes")), stages=True)


def test_rows_dropped_at_random_are_refused():
    config = AutoConfig.for_model("dinov2", **OPTIONS["dinov2"], drop_path_rate=0.1)
    with pytest.raises(UnsupportedModelError, match=r"drop_path_rate is 0\.1: it drops rows in layers at random"):
        certified_plan(AutoModel.from_config(config), MeshShape(1, 2, 1))


def test_the_planner_refuses_models_of_images(monkeypatch):
    config = {"train_batch_size": 4, "tensor_parallel": {"mode": "3d_tensor", "mesh": "auto"}}
    model_config = AutoConfig.for_model("vit", **OPTIONS["vit"])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UnsupportedModelError, match="give the axes of the mesh in place of"):
        cuboid.from_config(model_config, config, auto_class=AutoModelForImageClassification)


def test_checkpoints_name_their_auto_class():
    assert auto_class_of(["ViTForImageClassification"]) is AutoModelForImageClassification
    assert auto_class_of(["ViTForMaskedImageModeling"]) is AutoModelForMaskedImageModeling
    assert auto_class_of(["ViTModel"]) is AutoModel
