"""Encoder-decoders, whose two stacks run on two sequences, on a mesh."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSeq2SeqLM, BartForConditionalGeneration, T5ForConditionalGeneration

import cuboid
from conftest import TIMEOUT_S
from cuboid.config.schema import CuboidConfig
from cuboid.distributed.thread_ranks import ThreadRanks
from cuboid.distributed.topology import MeshShape
from cuboid.errors import CuboidError, MeshError, UnsupportedModelError
from cuboid.models.certification.mesh_certificates import certified_plan
from cuboid.models.certification.mesh_check import check_meshes
from cuboid.models.kinds.registry import auto_class_of, check_class, kind_of_class
from cuboid.models.sharded.sharded_model import shard_modules
from cuboid.tensor3d.sharding.sharding_spec import put_shard, take_shard
from cuboid.weights.state_dict_map import sharding_specs

_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 3}
_BART = {
    **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "max_position_embeddings": 40},
    **{f"{stack}_{name}": size for stack in ("encoder", "decoder") for name, size in (("ffn_dim", 48),)},
    **{f"{stack}_attention_heads": 4 for stack in ("encoder", "decoder")},
}
#: By architecture, options for small models.
OPTIONS = {
    "t5": _T5,
    "mt5": {**_T5, "feed_forward_proj": "gated-gelu"},
    "bart": _BART,
    "marian": {**_BART, "decoder_vocab_size": 67},
    "mbart": {**_BART, "scale_embedding": True},
}


def small_config(architecture, **more):
    tokens = {"vocab_size": 67, "pad_token_id": 1, "eos_token_id": 3, "decoder_start_token_id": 2}
    config = AutoConfig.for_model(architecture, **{**OPTIONS[architecture], **tokens, **more})
    for name in vars(config).copy():
        if name.endswith(("dropout", "dropout_rate", "layerdrop")):
            setattr(config, name, 0.0)
    return config


def built(architecture, **more):
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(small_config(architecture, **more), dtype=torch.float64).train()
    for parameter in model.parameters():
        # Far from zero, also where transformers' own initialization is small.
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, 0.5 * (parameter.dim() == 1), 0.2)
    for name, buffer in model.named_buffers():
        if name == "final_logits_bias":
            buffer.normal_()
    return model


def micro_batch(source=13, target=8, *, masks=True, shifted=False, rows=3):
    """Rows with padding on the right of sources and of targets; with ``shifted`` the decoder's ids are given too."""
    generator = torch.Generator().manual_seed(source)
    batch = {
        "input_ids": torch.randint(4, 67, (rows, source), generator=generator),
        "labels": torch.randint(4, 67, (rows, target), generator=generator),
    }
    if masks:
        batch["attention_mask"] = torch.ones(rows, source, dtype=torch.long)
        batch["attention_mask"][0, -4:] = 0
        batch["labels"][1, -3:] = -100
    if shifted:
        batch["decoder_attention_mask"] = (batch["labels"] != -100).long()
        batch["decoder_input_ids"] = torch.randint(4, 67, (rows, target), generator=generator)
    return batch


def on_threads(model, mesh):
    """The ranks of a mesh, and the model of each."""
    shape = MeshShape.parse(mesh)
    plan, ranks = certified_plan(model, shape), ThreadRanks(shape)

    def sharded(mesh):
        copied = copy.deepcopy(model)
        return shard_modules(
            copied, plan, mesh, CuboidConfig().tensor_parallel, lambda x, spec: take_shard(x, spec, mesh)
        )

    return ranks, [sharded(mesh) for mesh in ranks.meshes]


def whole_gradients(models):
    """Of all ranks' shards."""
    gradients = {}
    for model in models:
        mesh, specs = model.cuboid.mesh, sharding_specs(model)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                full = gradients.setdefault(name, torch.full(specs[name].shape, torch.nan, dtype=parameter.dtype))
                put_shard(full, parameter.grad, specs[name], mesh.shape, mesh.coordinate)
    return gradients


def assert_as_plain(plain, mesh, batch, prepare=lambda model: None):
    """Loss, every gradient, and the logits and the encoder's states of an evaluation."""
    ranks, models = on_threads(plain, mesh)
    expected = plain(**batch)
    expected.loss.backward()
    with torch.no_grad():
        outputs = copy.deepcopy(plain).eval()(**batch)

    def step(mesh):
        model = models[mesh.rank]
        prepare(model)
        loss = model(**batch).loss
        loss.backward()
        with torch.no_grad():
            return loss.detach(), model.eval()(**batch)

    for loss, answer in ranks.run(step):
        assert torch.allclose(loss, expected.loss, atol=1e-6)
        for name in ("logits", "encoder_last_hidden_state"):
            # Norms are in float32 whatever the model is in.
            assert torch.allclose(answer[name], outputs[name], atol=1e-4), name
    gradients = whole_gradients(models)
    trained = {name: x.grad for name, x in plain.named_parameters() if x.grad is not None}
    assert gradients.keys() == trained.keys()
    for name, gradient in trained.items():
        assert (gradients[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-9, name


# --- parity with plain transformers ----------------------------------------------------------------------------------


@pytest.mark.sample(1, ci=2)
@pytest.mark.parametrize(
    ("architecture", "mesh", "options"),
    [
        ("t5", "2x2x2", {}),
        ("bart", "1x2x2", {}),
        # A rank's part of the source is as long as the target.
        ("bart", "1x2x1", {"source": 16, "target": 8, "masks": False}),
        ("bart", "2x2x1", {"shifted": True}),
        ("t5", "1x2x2", {"shifted": True}),
        ("t5", "1x2x1", {"source": 5, "target": 21}),
        ("mt5", "2x1x2", {}),
        ("mt5", "1x1x2", {"masks": False}),
        ("marian", "1x2x2", {}),
        pytest.param("mbart", "2x2x2", {}, marks=pytest.mark.slow),
        # Neither rows nor lengths nor the vocabulary divide.
        ("t5", "2x4x1", {"source": 9, "target": 7, "rows": 3}),
    ],
)
def test_loss_logits_and_every_gradient_are_those_of_the_plain_model(architecture, mesh, options):
    assert_as_plain(built(architecture), mesh, micro_batch(**options))


@pytest.mark.sample(1, ci=1)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("architecture", ["t5", "bart"])
def test_activation_checkpointing_changes_nothing(architecture, reentrant):
    def prepare(model):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})

    assert_as_plain(built(architecture), "1x2x2", micro_batch(16, 8), prepare)


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    ["t5", "mt5", "umt5", "bart", "mbart", "plbart", "pegasus", "marian", "m2m_100", "blenderbot", "blenderbot-small"],
)
def test_certification_splits_every_block(architecture):
    config = AutoConfig.for_model(architecture)
    verdict = check_meshes(AutoModelForSeq2SeqLM._model_mapping[type(config)], config)
    assert not verdict.refused
    assert not verdict.blocks
    assert verdict.error < 1e-9
    assert verdict.splits_late == (architecture not in ("t5", "mt5", "umt5"))


# --- checkpoints -----------------------------------------------------------------------------------------------------


def trained(path, axes, batch):
    """Two steps of SGD on a mesh, from a checkpoint; the losses, and what is saved."""
    section = {"tensor_parallel": {"mode": "3d_tensor", "mesh": axes}}
    model = cuboid.from_pretrained(path, section, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(f"{path}-saved")
    again = cuboid.from_pretrained(f"{path}-saved", section, dtype=torch.float64)
    losses.append(again(**batch).loss.item())
    return losses, type(model).__name__, sum(x.numel() for x in model.parameters()) / model.num_parameters()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("architecture", "axes"), [("t5", {"batch": 2, "hidden": 2}), ("bart", {"sequence": 2, "hidden": 2})]
)
def test_a_checkpoint_is_read_as_slices_trained_and_saved_for_plain_transformers(pool, tmp_path, architecture, axes):
    plain, batch = built(architecture), micro_batch()
    path = tmp_path / "model"
    plain.save_pretrained(path)
    if architecture == "t5":
        # As T5 1.1 and Flan-T5, whose heads aren't their embeddings.
        tensors = load_file(path / "model.safetensors")
        tensors["lm_head.weight"] = tensors["shared.weight"].flip(0).contiguous()
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        plain = AutoModelForSeq2SeqLM.from_pretrained(path, dtype=torch.float64).train()
        assert not torch.equal(plain.lm_head.weight, plain.shared.weight)
    results = pool.run(4, trained, str(path), axes, batch, timeout_s=TIMEOUT_S)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = []
    for _ in range(2):
        loss = plain(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    expected.append(plain(**batch).loss.item())
    saved = AutoModelForSeq2SeqLM.from_pretrained(f"{path}-saved", dtype=torch.float64)
    for (name, parameter), other in zip(plain.state_dict().items(), saved.state_dict().values(), strict=True):
        assert torch.allclose(parameter, other, atol=1e-5), name
    for losses, name, share in results:
        assert losses == pytest.approx(expected, abs=1e-5)
        assert name == type(plain).__name__
        assert share < 0.35


@pytest.mark.sample(2, ci="others")
@pytest.mark.parametrize("options", [{"subfolder": "x"}, {"variant": "x"}, {"subfolder": "x", "variant": "x"}], ids=str)
@pytest.mark.parametrize("shards", [False, True], ids=["one file", "files"])
def test_a_head_of_its_own_is_found_in_the_files_that_are_read(monkeypatch, tmp_path, options, shards):
    # The folder has another checkpoint, in which head and embedding are stored alike.
    plain, others = built("t5"), tmp_path / "model.safetensors"
    plain.save_pretrained(tmp_path)
    save_file({**load_file(others), "lm_head.weight": plain.shared.weight.detach().clone()}, others, {"format": "pt"})
    tied = copy.deepcopy(plain.config)
    plain.config.tie_word_embeddings = False
    plain.lm_head.weight = torch.nn.Parameter(plain.shared.weight.detach().flip(0))
    inner = tmp_path / options.get("subfolder", "")
    plain.save_pretrained(inner, variant=options.get("variant"), max_shard_size="20KB" if shards else "1GB")
    tied.save_pretrained(inner)
    monkeypatch.setenv("WORLD_SIZE", "2")
    section = {"tensor_parallel": {"mode": "3d_tensor", "mesh": {"hidden": 2}}}
    model = cuboid.from_pretrained(tmp_path, section, dtype=torch.float64, **options)
    specs = sharding_specs(model)
    for name in ("lm_head.weight", "shared.weight"):
        shard = take_shard(plain.get_parameter(name).detach(), specs[name], model.cuboid.mesh)
        assert torch.equal(model.get_parameter(name), shard), name


# --- what is refused -------------------------------------------------------------------------------------------------


def message_of(model, batch, call=lambda model, batch: model(**batch)):
    ranks, models = on_threads(model, "1x2x1")

    def run(mesh):
        with pytest.raises(CuboidError) as error:
            call(models[mesh.rank], batch)
        return str(error.value)

    first, second = ranks.run(run)
    assert first == second
    return first


def test_what_a_micro_batch_may_not_hold_is_named():
    model, batch = built("bart"), micro_batch()
    assert "labels is [3, 8, 1], but input_ids is [3, 13]" in message_of(
        model, {**batch, "labels": batch["labels"].unsqueeze(-1)}
    )
    decoding = {**batch, "decoder_input_ids": batch["labels"][:, :5].clamp(min=0)}
    assert "labels is [3, 8], but input_ids is [3, 13] and decoder_input_ids is [3, 5]" in message_of(model, decoding)
    assert "needs labels or decoder_input_ids" in message_of(model, {"input_ids": batch["input_ids"]})
    rows = {"input_ids": batch["input_ids"], "decoder_input_ids": batch["input_ids"][:2]}
    assert "input_ids has 3 rows, but decoder_input_ids has 2" in message_of(model, rows)
    mask = {**decoding, "labels": decoding["decoder_input_ids"], "decoder_attention_mask": torch.ones(3, 7)}
    assert message_of(model, mask) == "decoder_attention_mask is [3, 7], but decoder_input_ids is [3, 5]"
    flat = {**batch, "input_ids": torch.arange(8)}
    assert message_of(model, flat) == "input_ids must be [batch, sequence], not [8]"
    flat = {"input_ids": batch["input_ids"], "decoder_input_ids": torch.arange(8)}
    assert message_of(model, flat) == "decoder_input_ids must be [batch, sequence], not [8]"
    positions = torch.arange(13).unsqueeze(0)
    assert message_of(model, {**batch, "position_ids": positions}).startswith("position_ids has no rule")
    beyond = {**batch, "decoder_input_ids": torch.full((3, 8), 67)}
    assert "decoder_input_ids[0, 0] (and 23 more) is 67" in message_of(model, beyond)
    long = {"input_ids": batch["input_ids"], "labels": torch.full((3, 41), 5)}
    assert "position_ids[0, 40] is 40, but the model's position table has 40 entries" in message_of(model, long)
    outputs = {**batch, "encoder_outputs": (torch.zeros(3, 13, 32),)}
    assert message_of(model, outputs).startswith("encoder_outputs has no rule")


def test_rows_that_a_mask_hides_altogether():
    """Eager attention spreads over all positions there, also over those that a mesh has added."""
    model, batch = built("t5"), micro_batch()
    hidden = {**batch, "attention_mask": torch.ones(3, 13, dtype=torch.long)}
    hidden["attention_mask"][1] = 0
    assert message_of(model, hidden).startswith("attention_mask[1] hides all tokens of its row, which then attend to")
    # Of an even length, or without labels, nothing is lost.
    even = {name: x[:, :12] for name, x in hidden.items() if name != "labels"} | {"labels": batch["labels"]}
    unlabelled = {**hidden, "labels": batch["labels"].clone()}
    unlabelled["labels"][1] = -100
    ranks, models = on_threads(model, "1x2x1")
    for micro in (even, unlabelled):
        expected = model(**micro).loss
        for loss in ranks.run(lambda mesh, micro=micro: models[mesh.rank](**micro).loss.detach()):
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-9, atol=0)


def test_parts_are_refused():
    model, batch = built("bart"), micro_batch()
    ids = {"input_ids": batch["input_ids"]}
    assert "BartModel was called by itself" in message_of(model, ids, lambda model, batch: model.model(**batch))
    assert "Embedding of a sharded model was called" in message_of(
        model, ids, lambda model, batch: model.get_encoder()(**batch)
    )
    arguments = {**ids, "encoder_outputs": object()}
    assert message_of(model, arguments, lambda model, batch: model.generate(**batch)).startswith(
        "encoder_outputs has no"
    )


@pytest.mark.parametrize(("architecture", "more"), [("bart", {"decoder_attention_heads": 2}), ("t5", {"num_heads": 3})])
def test_heads_that_a_mesh_does_not_divide_are_refused(architecture, more):
    model = AutoModelForSeq2SeqLM.from_config(small_config(architecture, **more))
    reason = "encoder_attention_heads is 4 and decoder_attention_heads is 2|3 attention heads don't divide"
    with pytest.raises((UnsupportedModelError, MeshError), match=reason):
        certified_plan(model, MeshShape(1, 2, 1))


def test_the_task_follows_from_what_a_class_is_given():
    for cls in (T5ForConditionalGeneration, BartForConditionalGeneration):
        assert kind_of_class(cls).name == "seq2seq"
        assert auto_class_of([cls.__name__]) is AutoModelForSeq2SeqLM
        check_class(cls)
        with pytest.raises(UnsupportedModelError, match=r"encoder-decoder; a pipeline .*Leave the pipeline"):
            check_class(cls, stages=True)
    assert auto_class_of(["MarianMTModel"]) is AutoModelForSeq2SeqLM
