"""Encoders, and heads for other tasks than causal language modelling, on a mesh."""

import copy
import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BartConfig,
    BartForCausalLM,
)

import cuboid
from conftest import TIMEOUT_S
from cuboid.config.schema import CuboidConfig
from cuboid.distributed.thread_ranks import ThreadRanks
from cuboid.distributed.topology import MeshShape
from cuboid.errors import CheckpointError, CuboidError, UnsupportedModelError
from cuboid.models.architectures.certificate import MeshVerdict
from cuboid.models.batch.local_batch import LocalBatch
from cuboid.models.certification.mesh_certificates import certified_plan
from cuboid.models.certification.mesh_check import check_meshes
from cuboid.models.kinds.model_kind import TARGETS
from cuboid.models.kinds.registry import auto_class_of, check_class, kind_of, kind_of_class
from cuboid.models.sharded.sharded_model import shard_modules
from cuboid.tensor3d.layers.dropout import CommonDropout
from cuboid.tensor3d.sharding.sharding_spec import put_shard, take_shard
from cuboid.weights.state_dict_map import sharding_specs
from threaded import assert_as_alone

SIZES = {"vocab_size": 67, "num_hidden_layers": 3, "num_attention_heads": 4, "pad_token_id": 1}
WIDTHS = {"hidden_size": 32, "intermediate_size": 48}
#: By architecture, options for small models without dropout.
OPTIONS = {
    "llama": {**SIZES, **WIDTHS},
    "gpt2": {"vocab_size": 67, "n_layer": 3, "n_head": 4, "n_embd": 32, "pad_token_id": 1},
    "distilbert": {"vocab_size": 67, "n_layers": 3, "n_heads": 4, "dim": 32, "hidden_dim": 48, "pad_token_id": 1},
    "modernbert": {**SIZES, **WIDTHS, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3},
    **{name: {**SIZES, **WIDTHS, "max_position_embeddings": 40} for name in ("bert", "roberta", "electra")},
}
AUTO = {
    "masked": AutoModelForMaskedLM,
    "sequence": AutoModelForSequenceClassification,
    "tokens": AutoModelForTokenClassification,
    "answers": AutoModelForQuestionAnswering,
    "hidden": AutoModel,
}


def small_config(architecture, **more):
    config = AutoConfig.for_model(architecture, **{**OPTIONS[architecture], **more})
    for name in vars(config).copy():
        if name.endswith(("dropout", "pdrop", "dropout_prob")) and getattr(config, name) is not None:
            setattr(config, name, 0.0)
    return config


def built(architecture, task, **more):
    torch.manual_seed(0)
    return AUTO[task].from_config(small_config(architecture, **more), dtype=torch.float64).train()


def micro_batch(model, rows=3, length=13):
    """With padding on the right of the first row, in ids and mask."""
    kind = kind_of(type(model), model.config)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 67, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, -4:] = 0
    batch = {"input_ids": ids.masked_fill(mask == 0, 1), "attention_mask": mask}
    if kind.name == "masked":
        batch["labels"] = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.7, -100)
    elif kind.name == "tokens":
        batch["labels"] = torch.where(mask == 0, -100, ids % kind.outputs)
    elif kind.name == "answers":
        batch |= {name: torch.randint(0, length, (rows,), generator=generator) for name in TARGETS[2:]}
    elif kind.name == "sequence":
        is_regression = kind.classes is None
        batch["labels"] = torch.rand(rows, generator=generator) if is_regression else ids[:, 0] % kind.outputs
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


def whole_of(models, tensors):
    """Whole tensors of what all ranks have by the names of parameters."""
    full_tensors = {}
    for model, shards in zip(models, tensors, strict=True):
        mesh, specs = model.cuboid.mesh, sharding_specs(model)
        for name, shard in shards.items():
            full = full_tensors.setdefault(name, torch.full(specs[name].shape, torch.nan, dtype=shard.dtype))
            put_shard(full, shard, specs[name], mesh.shape, mesh.coordinate)
    return full_tensors


def score(output, batch):
    """A loss: the model's own, or one of hidden states."""
    if getattr(output, "loss", None) is not None:
        return output.loss
    hidden = output.last_hidden_state * batch["attention_mask"].unsqueeze(-1)
    pooled = getattr(output, "pooler_output", None)
    return hidden.sin().mean() + (0 if pooled is None else pooled.cos().mean())


# --- parity with plain transformers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", ["1x2x1", "2x1x2"])
def test_a_bias_beside_the_head_that_nothing_uses_is_left_alone(mesh):
    # RoBERTa's is the head's only if weights are tied.
    options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 40}
    config = AutoConfig.for_model("roberta", **SIZES, **WIDTHS, **options, tie_word_embeddings=False)
    model = AutoModelForMaskedLM.from_config(config).double()
    ids = torch.randint(4, config.vocab_size, (3, 17), generator=torch.Generator().manual_seed(0))

    def step(model):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    assert_as_alone(model, mesh, step, MeshVerdict(inputs="only ids", counts_items=False))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("architecture", "task", "mesh", "more"),
    [
        ("llama", "sequence", "2x2x2", {"num_labels": 1}),
        ("gpt2", "sequence", "1x2x1", {"num_labels": 3}),
        ("llama", "tokens", "2x1x2", {"num_labels": 3, "classifier_dropout": 0.0}),
        ("gpt2", "answers", "1x2x2", {}),
        ("bert", "masked", "2x2x2", {}),
        ("bert", "sequence", "2x1x2", {"num_labels": 3, "problem_type": "single_label_classification"}),
        ("bert", "hidden", "2x2x1", {}),
        ("roberta", "masked", "2x2x1", {}),
        ("roberta", "tokens", "1x1x2", {"num_labels": 3}),
        ("roberta", "sequence", "2x2x2", {"num_labels": 3}),
        ("electra", "answers", "1x2x2", {}),
        ("electra", "masked", "2x2x2", {"embedding_size": 16}),
        ("modernbert", "masked", "2x2x2", {}),
        ("modernbert", "sequence", "1x2x2", {"num_labels": 3, "classifier_pooling": "mean"}),
        ("distilbert", "sequence", "2x2x2", {"num_labels": 3}),
    ],
)
def test_loss_logits_and_every_gradient_are_those_of_the_plain_model(architecture, task, mesh, more):
    plain = built(architecture, task, **more)
    batch = micro_batch(plain)
    ranks, models = on_threads(plain, mesh)
    expected = plain(**batch)
    score(expected, batch).backward()

    def step(mesh):
        model = models[mesh.rank]
        output = model(**batch)
        loss = score(output, batch)
        loss.backward()
        with torch.no_grad():
            answer = model.eval()(**batch)
        return loss.detach(), answer

    results = ranks.run(step)
    names = [name for name in ("logits", "start_logits", "last_hidden_state", "pooler_output") if name in expected]
    assert names
    for loss, answer in results:
        # Some of transformers' losses are in float32 whatever the model is in.
        assert torch.allclose(loss.double(), score(expected, batch).double(), atol=1e-6)
        for name in names:
            # What some models compute in float32, such as rotary embeddings, is rounded.
            assert torch.allclose(answer[name], expected[name], atol=1e-5), name
    gradients = whole_of(models, [{n: x.grad for n, x in m.named_parameters() if x.grad is not None} for m in models])
    trained = {name: x.grad for name, x in plain.named_parameters() if x.grad is not None}
    assert gradients.keys() == trained.keys()
    for name, gradient in trained.items():
        assert torch.allclose(gradients[name], gradient, atol=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", ["llama", "qwen2", "qwen3", "gpt2", "bert", "roberta", "distilbert", "electra"]
)
@pytest.mark.parametrize("task", ["masked", "sequence", "tokens", "answers", "hidden"])
def test_certification_splits_every_block_of_encoders_and_heads(architecture, task):
    config = AutoConfig.for_model(architecture, pad_token_id=1)
    mapping = AUTO[task]._model_mapping
    if type(config) not in mapping:
        pytest.skip("transformers has no such head")
    verdict = check_meshes(mapping[type(config)], config)
    assert not verdict.refused
    assert not verdict.blocks
    assert verdict.error < 1e-9
    linear = task in ("tokens", "answers") or (
        task == "sequence" and architecture in ("llama", "qwen2", "qwen3", "gpt2")
    )
    assert verdict.head == {"masked": "split", "hidden": "split"}.get(task, "labels" if linear else "whole")
    assert verdict.inputs == {"roberta": "only ids", "bert": "ids", "electra": "ids"}.get(architecture, "embeddings")


def fine_tuned(path, axes, task, batch):
    """Two steps of SGD on a mesh, from a checkpoint; the losses, and what is saved."""
    section = {"tensor_parallel": {"mode": "3d_tensor", "mesh": axes}}
    model = cuboid.from_pretrained(path, section, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        loss = score(model(**batch), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(f"{path}-{task}")
    return losses, type(model).__name__, sum(x.numel() for x in model.parameters()) / model.num_parameters()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("architecture", "task", "axes"),
    [
        ("roberta", "sequence", {"batch": 2, "hidden": 2}),
        ("llama", "sequence", {"sequence": 2, "hidden": 2}),
        ("bert", "masked", {"batch": 2, "sequence": 2}),
        ("distilbert", "hidden", {"batch": 2, "sequence": 2}),
    ],
)
def test_the_task_is_read_from_the_checkpoint_and_what_is_saved_is_plain(pool, tmp_path, architecture, task, axes):
    plain = built(architecture, task)
    plain.save_pretrained(tmp_path / "model")
    batch = micro_batch(plain)
    path = str(tmp_path / "model")
    results = pool.run(4, fine_tuned, path, axes, task, batch, timeout_s=TIMEOUT_S)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        loss = score(plain(**batch), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(abs(losses[step] - loss.item()) < 1e-6 for losses, _, _ in results)
    saved = AUTO[task].from_pretrained(f"{path}-{task}", dtype=torch.float64)
    for (name, parameter), other in zip(plain.named_parameters(), saved.parameters(), strict=True):
        assert torch.allclose(parameter, other, atol=1e-6), name
    for _, name, share in results:
        assert name == type(plain).__name__
        assert share < 0.35


# --- heads that a checkpoint doesn't have ----------------------------------------------------------------------------


def loaded_by_rank(monkeypatch, path, mesh, auto_class, rank):
    shape = MeshShape.parse(mesh)
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(shape.size))
    axes = {"batch": shape.batch, "sequence": shape.sequence, "hidden": shape.hidden}
    section = {"tensor_parallel": {"mode": "3d_tensor", "mesh": axes}}
    return cuboid.from_pretrained(path, section, auto_class=auto_class)


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("architecture", ["llama", "bert"])
def test_a_new_head_is_the_same_on_every_mesh_and_all_else_is_the_checkpoints(monkeypatch, tmp_path, architecture):
    torch.manual_seed(0)
    language = AutoModelForCausalLM if architecture == "llama" else AutoModelForMaskedLM
    trained = language.from_config(small_config(architecture))
    trained.save_pretrained(tmp_path)
    wanted = AutoModelForSequenceClassification
    (alone,) = [loaded_by_rank(monkeypatch, tmp_path, "1x1x1", wanted, 0)]
    expected = dict(alone.named_parameters())
    torch.manual_seed(1)
    models = [loaded_by_rank(monkeypatch, tmp_path, "2x1x2", wanted, rank) for rank in range(4)]
    weights = whole_of(models, [{n: x.detach() for n, x in m.named_parameters()} for m in models])
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, expected[name]), name
    head = "score.weight" if architecture == "llama" else "classifier.weight"
    assert 0.01 < weights[head].std() < 0.04
    prefix = f"{trained.base_model_prefix}."
    for name, value in trained.base_model.named_parameters():
        assert torch.equal(weights[prefix + name], value), name


def test_a_language_model_without_its_head_is_damaged(monkeypatch, tmp_path):
    AutoModel.from_config(small_config("llama")).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"has no \(fitting\) tensor for lm_head.weight"):
        loaded_by_rank(monkeypatch, tmp_path, "1x1x1", AutoModelForCausalLM, 0)


# --- what a micro-batch may hold -------------------------------------------------------------------------------------


def message_of(model, batch):
    ranks, models = on_threads(model, "1x2x1")

    def run(mesh):
        with pytest.raises(CuboidError) as error:
            models[mesh.rank](**batch)
        return str(error.value)

    first, second = ranks.run(run)
    assert first == second
    return first


def test_labels_that_the_task_does_not_have_are_named():
    classifier = built("bert", "sequence", num_labels=3)
    batch = micro_batch(classifier)
    labels = batch["labels"]
    shapes = message_of(classifier, {**batch, "labels": batch["input_ids"]})
    assert shapes == "labels is [3, 13], but input_ids is [3, 13]: sequence classification needs [3] or [3, 1]"
    beyond = message_of(classifier, {**batch, "labels": labels.clone().fill_(3)})
    assert beyond.startswith("labels[0] (and 2 more) is 3, but the model's head has 3 classes, 0 to 2")
    other = message_of(classifier, {**batch, "start_positions": labels})
    assert other == "start_positions were given to a model for sequence classification, which takes labels"
    types = message_of(classifier, {**batch, "token_type_ids": torch.full_like(batch["input_ids"], 2)})
    assert "token_type_ids[0, 0] (and 38 more) is 2, but the model's table of token types has 2 entries" in types


def test_a_sequence_longer_than_positions_that_a_model_counts_by_itself_is_an_error():
    # Its positions begin behind that of padding, so that the table of 40 has 38.
    model = built("roberta", "hidden")
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((2, 39), 5))
    assert "position_ids[0, 38] is 40, but the model's position table has 40 entries" in message_of(
        model, {"input_ids": torch.full((2, 39), 5)}
    )
    # The longest one fits, though three ranks fill it up.
    ids = torch.full((2, 38), 5)
    ranks, models = on_threads(built("roberta", "hidden", hidden_size=36, num_attention_heads=3), "1x3x1")
    assert {tuple(x.shape) for x in ranks.run(lambda mesh: models[mesh.rank](ids).last_hidden_state)} == {(2, 38, 36)}


def batches_alive():
    gc.collect()
    return [x for x in gc.get_objects() if isinstance(x, LocalBatch)]


def test_no_micro_batch_is_kept_after_a_forward():
    decoder = BartForCausalLM(BartConfig(d_model=32, decoder_layers=2, decoder_attention_heads=4, vocab_size=67))
    hidden, classifier = built("bert", "hidden"), built("bert", "sequence", num_labels=3)
    ids = torch.arange(24).view(2, 12)
    for plain, batch in ((hidden, {}), (classifier, {"labels": torch.tensor([0, 2])}), (decoder, {"labels": ids})):
        ranks, models = on_threads(plain, "1x2x1")
        ranks.run(lambda mesh: models[mesh.rank](input_ids=ids, **batch))  # noqa: B023
        assert not batches_alive()
    assert models[0].cuboid.verdict.gathers_logits
    # Nor after that of a base model which a script calls itself, where no head follows.
    ranks, models = on_threads(classifier, "1x2x1")
    ranks.run(lambda mesh: models[mesh.rank].base_model(input_ids=ids))
    assert not batches_alive()


@given(
    st.sampled_from(["masked", "tokens", "sequence", "answers"]), st.lists(st.integers(1, 4), min_size=1, max_size=3)
)
def test_targets_have_the_shapes_that_losses_can_take(task, shape):
    cls = AUTO[task]._model_mapping[type(small_config("bert"))]
    kind = kind_of(cls, small_config("bert", num_labels=3))
    arguments = {"input_ids": torch.zeros(2, 3), TARGETS[0 if task != "answers" else 2]: torch.zeros(shape).long()}
    right = [[2, 3]] if task in ("masked", "tokens") else [[2], [2, 1]]
    if shape in right:
        kind.check(arguments)
    else:
        with pytest.raises(CuboidError, match=rf"\[{', '.join(map(str, shape))}\]"):
            kind.check(arguments)


@pytest.mark.parametrize("task", ["masked", "tokens", "sequence", "answers"])
def test_ids_that_are_no_rows_are_named_before_what_they_are_compared_with(task):
    ranks, models = on_threads(built("bert", task), "1x2x1")

    def refused(mesh):
        with pytest.raises(CuboidError, match=r"input_ids must be \[batch, sequence\], not \[8\]"):
            models[mesh.rank](input_ids=torch.arange(8))

    ranks.run(refused)


# --- the rest --------------------------------------------------------------------------------------------------------


def test_dropout_of_what_all_ranks_have_is_the_same_on_all_of_them():
    ranks = ThreadRanks(MeshShape(2, 2, 1))
    ones = torch.ones(50, 20)
    torch.manual_seed(0)
    first, *others = ranks.run(lambda mesh: CommonDropout(0.25, mesh)(ones))
    assert all(torch.equal(first, other) for other in others)
    assert first.unique().tolist() == pytest.approx([0, 4 / 3])
    assert first.mean().item() == pytest.approx(1, abs=0.1)
    assert not any(ranks.run(lambda mesh: CommonDropout(1.0, mesh)(ones).any().item()))


def test_what_a_class_is_for_and_its_auto_class_follow_from_its_name():
    for task, auto in AUTO.items():
        cls = auto._model_mapping[type(small_config("bert"))]
        assert kind_of_class(cls).name == task
        assert auto_class_of([cls.__name__]) is auto
    assert auto_class_of(None) is auto_class_of(["WhisperForAudioClassification"]) is AutoModelForCausalLM
    assert auto_class_of(["LlavaForConditionalGeneration"]) is AutoModelForImageTextToText


@pytest.mark.parametrize("task", AUTO)
def test_a_pipeline_takes_models_with_a_head_and_says_what_takes_the_others(task):
    cls = AUTO[task]._model_mapping[type(small_config("bert"))]
    check_class(cls)
    if task != "hidden":
        check_class(cls, stages=True)
        return
    with pytest.raises(UnsupportedModelError, match=r"a pipeline has rules for .*Leave the pipeline section out"):
        check_class(cls, stages=True)
