"""What a pipeline tells of each label token, and what a trainer's ``compute_loss`` makes of it."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import cuboid
from comparing import mesh_section
from conftest import TIMEOUT_S
from cuboid.distributed.topology import MeshShape
from cuboid.errors import CuboidError
from cuboid.integrations.trainer_loss import (
    PipelineModel,
    TokenModel,
    TokenOutput,
    check_own_loss,
)
from cuboid.models.certification.float64 import KeepFloat64, precision
from cuboid.models.cross_entropy.incomplete_output import MissingOutputError
from cuboid.models.pipeline.training_pipeline import Pipeline
from cuboid.tensor3d.sharding.sharding_spec import put_shard
from cuboid.verify import SmallModel
from cuboid.weights.state_dict_map import sharding_specs

SMALL = SmallModel("gemma2", heads=6, kv_heads=2, vocabulary=131, layers=2)
LENGTHS = (13, 8)


def built():
    torch.manual_seed(SMALL.seed)
    model = AutoModelForCausalLM.from_config(SMALL.config(), dtype=torch.float64).eval()
    weight = model.get_output_embeddings().weight
    with torch.no_grad():
        # The last two words have equal logits in any order of summing, the largest where a feature is positive.
        weight[-2:] = 0
        weight[-2:, 0] = 20
    return model


def ids_of(length):
    return torch.randint(0, SMALL.vocabulary - 2, (3, length), generator=torch.Generator().manual_seed(length))


def logits_of(model, ids):
    with torch.no_grad(), KeepFloat64():
        return model(input_ids=ids).logits


def batches(model):
    """The labels of the second row are the most probable words, and the last row has the second one of equals."""
    micro_batches = []
    for length in LENGTHS:
        ids = ids_of(length)
        labels = ids.masked_fill(torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) < 0.3, -100)
        best = logits_of(model, ids).argmax(-1)
        labels[0], labels[1, 1:], labels[2, 2:] = -100, best[1, :-1], best[2, 1:-1]
        labels[2] = labels[2].where(labels[2] != SMALL.vocabulary - 2, SMALL.vocabulary - 1)
        micro_batches.append({"input_ids": ids, "labels": labels})
    return micro_batches


def expected(model, batch):
    """From all logits: ``[5, B, S]``, 0 where the next position has no label."""
    logits = logits_of(model, batch["input_ids"])
    labels = nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    distribution = logits.log_softmax(-1)
    values = torch.stack(
        [
            distribution.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1),
            -(distribution.exp() * distribution).sum(-1),
            (logits.argmax(-1) == labels).double(),
            logits.mean(-1),
            (2 * distribution).logsumexp(-1),
        ]
    )
    return values.masked_fill(labels == -100, 0)


def told(mesh, stages, segments, evaluates):
    """What one rank is told, in two steps."""
    keys = {"engine": "seq1f1b", "stages": stages, "segments": segments, "stage_balance": [1] * stages}
    if stages == 1:
        del keys["stage_balance"]
    with precision(keep_float64=True):
        model = built()
        micro_batches = batches(model)
        model = cuboid.shard(model, {"pipeline": keys, "tensor_parallel": mesh_section(mesh)})
        # A few positions, so that each segment takes several chunks.
        model.cuboid.state.chunk_bytes = 4 * 1024
        pipeline, seen = Pipeline(model), []
        for _ in range(2):
            pipeline.observe_outputs = seen.append
            (pipeline.evaluate if evaluates else pipeline.train)(iter(micro_batches), 2)
            pipeline.observe_outputs = None
        pipeline.evaluate(iter(micro_batches), 2)
    return seen


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(
    ("mesh", "stages", "segments", "evaluates"),
    [
        ("1x1x1", 2, 3, False),
        ("1x2x1", 1, 2, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("2x2x1", 1, 2, True), ("1x1x2", 2, 2, False), ("1x3x2", 1, 1, False))
        ),
    ],
)
def test_values_are_those_of_all_logits_on_every_rank(pool, mesh, stages, segments, evaluates):
    model = built()
    micro_batches = batches(model)
    wanted = [expected(model, batch) for batch in micro_batches]
    assert wanted[0][2, 1].sum() == LENGTHS[0] - 1
    assert (micro_batches[0]["labels"][2] == SMALL.vocabulary - 1).any()
    ranks = MeshShape.parse(mesh).size * stages
    for seen in pool.run(ranks, told, mesh, stages, segments, evaluates, timeout_s=TIMEOUT_S):
        assert len(seen) == 2
        for values in seen:
            for one, of_all_logits in zip(values, wanted, strict=True):
                torch.testing.assert_close(one, of_all_logits, rtol=1e-9, atol=1e-9)


def preference(output, reference):
    """Of pairs of rows, as DPO's: not a sum over tokens."""
    better, worse = (output.log_probs.sum(1) - reference.log_probs.sum(1)).chunk(2)
    return -nn.functional.logsigmoid(0.3 * (better - worse)).mean() + 0.1 * (better**2).mean()


def pairs():
    ids = [ids_of(length)[:2] for length in LENGTHS]
    return [{"input_ids": rows, "labels": rows.masked_fill(rows % 3 == 0, -100)} for rows in ids]


def trained(mesh, stages, segments, schedule):
    """One rank's gradients of a loss of pairs whose reference is the model itself, and the step's loss."""
    keys = {"engine": "seq1f1b", "stages": stages, "segments": segments, "stage_balance": [1] * stages}
    with precision(keep_float64=True):
        model = cuboid.shard(
            built(), {"pipeline": keys | {"schedule": schedule}, "tensor_parallel": mesh_section(mesh)}
        )
        model.cuboid.state.chunk_bytes = 4 * 1024
        pipeline, scored = Pipeline(model), []
        for batch in pairs():
            called = PipelineModel(model, pipeline, "Mine")
            with torch.no_grad():
                reference = called(**batch)
            scored.append(called.given(preference(called(**batch), reference)))
        pipeline.given_losses = [loss for _, loss in scored]
        loss = pipeline.train(iter([batch for batch, _ in scored]), 2)
        gradients = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
        pipeline.given_losses = [replace(pipeline.given_losses[0], values=2 * scored[0][1].values), scored[1][1]]
        with pytest.raises(CuboidError, match="was given other outputs of the model than the pipeline then trained"):
            pipeline.train(iter([batch for batch, _ in scored]), 2)
    return loss, gradients, sharding_specs(model), model.cuboid.mesh.coordinate


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(
    ("mesh", "stages", "segments", "schedule"),
    [("1x1x1", 2, 3, "zero_bubble"), ("1x2x1", 2, 2, "seq1f1b"), ("2x1x1", 2, 2, "seq1f1b")],
)
def test_a_loss_of_pairs_is_trained(pool, mesh, stages, segments, schedule):
    model, shape = built(), MeshShape.parse(mesh)
    losses = []
    with KeepFloat64():
        for batch in pairs():
            labels = batch["labels"][:, 1:]
            logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
            chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
            chosen = chosen.masked_fill(labels == -100, 0)
            losses.append(preference(TokenOutput(log_probs=chosen), TokenOutput(log_probs=chosen.detach())))
        wanted = torch.stack(losses).mean()
        wanted.backward()
    full_gradients = {}
    for loss, gradients, specs, coordinate in pool.run(
        shape.size * stages, trained, mesh, stages, segments, schedule, timeout_s=TIMEOUT_S
    ):
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-9, atol=1e-9)
        for name, gradient in gradients.items():
            if name not in specs:
                full_gradients[name] = gradient
                continue
            full = full_gradients.setdefault(name, gradient.new_zeros(specs[name].shape))
            put_shard(full, gradient, specs[name], shape, coordinate)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(full_gradients[name], parameter.grad, rtol=1e-9, atol=1e-9, msg=name)


def token_model():
    labels = torch.tensor([[5, 3, -100, 4], [-100, 2, -100, -100]])
    mask = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:] != -100
    values = torch.rand(5, 2, 4).log() * mask
    return TokenModel(nn.Linear(1, 1), values), labels, mask


@pytest.mark.parametrize("items", [None, torch.tensor(7)])
def test_the_own_loss_is_accepted_and_reported(items):
    model, labels, mask = token_model()
    output = model(labels=labels, input_ids=labels, num_items_in_batch=items, fused_lm_head=True)
    count = 3 if items is None else 7
    assert output.log_probs.shape == output.entropy.shape == output.is_top1.shape == output.label_mask.shape == (2, 3)
    assert output.loss.item() == pytest.approx(-model.log_probs.sum().item() / count)
    assert output["loss"] is output.loss
    assert model.in_features == 1
    check_own_loss("Mine", 2 * output.loss, model, mask, 2 / count)
    shifted = model(shift_labels=nn.functional.pad(labels, (0, 1), value=-100)[:, 1:])
    assert shifted.log_probs.shape == (2, 4)
    check_own_loss("Mine", shifted.loss, model, mask, 1 / 3)


@pytest.mark.parametrize(
    "other",
    [
        lambda output: -(output.log_probs * output.log_probs.exp().detach()).sum() / 3,
        # The own loss's value, and no derivative.
        lambda output: output.loss.detach() + 0 * output.log_probs.sum(),
        lambda output: output.loss.detach(),
        lambda output: 1.01 * output.loss,
        lambda output: -output.log_probs[:, 1:].sum() / 3,
        lambda output: output.loss - 0.1 * output.entropy.mean(),
        lambda _: 0.0,
    ],
)
def test_another_loss_is_refused(other):
    model, labels, mask = token_model()
    with pytest.raises(CuboidError, match=r"Mine\.compute_loss isn't the model's own loss"):
        check_own_loss("Mine", other(model(labels=labels)), model, mask, 1 / 3)


@pytest.mark.parametrize("name", ["logits", "hidden_states", "aux_loss"])
def test_entries_that_a_pipeline_has_not_are_named(name):
    model, labels, _ = token_model()
    output = model(labels=labels)
    with pytest.raises(MissingOutputError, match=f"^{name}: a pipeline frees the logits"):
        getattr(output, name)
    with pytest.raises(MissingOutputError, match=f"^{name}: a pipeline frees the logits"):
        output[name]
    assert not hasattr(output, name)
    with pytest.raises(CuboidError, match="calls the model without labels"):
        model(input_ids=labels)
