"""A head that is spread over the stages computes what plain transformers computes, to float64's last digits.

Every case compares the losses, all gradients (the head's whole matrix included), norms and weights after steps with
plain transformers; batches have padding and ignored labels, and the loss is computed whole and in chunks, in turn.
"""

import functools
import math
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
)

import cuboid
from cuboid.config.schema import parse_config
from cuboid.distributed.axis_collectives import own_slice
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.thread_ranks import ThreadRanks
from cuboid.distributed.topology import MeshShape
from cuboid.errors import ConfigError, UnsupportedModelError
from cuboid.models.architectures.certificate import MeshVerdict
from cuboid.models.certification.float64 import KeepFloat64
from cuboid.models.certification.sides import make_stage
from cuboid.models.certification.small_config import small_config
from cuboid.models.cross_entropy.lm_head import Head
from cuboid.models.pipeline.head_share import HeadRows, VocabularyShare, check_spread_head, linear, parts_of
from cuboid.models.sharded.parallel_plan import make_parallel_plan
from cuboid.models.stages.stage_cut import draw_outline
from cuboid.verify import PassReport, SmallModel, WorkerPool
from proofs.late_copies import LateCopies
from test_pipeline_parity import ZERO_1, Compare, compare, name_of
from training import make_engine, settings, train

SPREAD = {"stages": 2, "segments": 2, "schedule": "zero_bubble", "memory_limit": 4, "head": "spread"}
SLOW = pytest.mark.slow
SCHEDULES = ("zero_bubble", "zero_bubble-interleaved", "zero_bubble-v")


@pytest.fixture
def parity(pool: WorkerPool, checkpoint: Callable[[SmallModel], str]) -> Compare:
    """Verifies a small model whose head is spread and asserts that it passed."""

    def run(small: SmallModel, changes: dict[str, Any], **options: Any) -> PassReport:
        return compare(pool, checkpoint, {**SPREAD, **changes}, small, **options)

    return run


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(
    ("small", "changes", "options"),
    [
        (SmallModel("llama", layers=4), {}, {}),
        pytest.param(
            SmallModel("llama", layers=4, tied=True), {"stages": 3, "segments": 3}, {"accumulate": 3}, marks=SLOW
        ),
        # Soft-capped logits.
        (SmallModel("gemma2", layers=5), {"stages": 4, "segments": 1}, {}),
        # One matrix on one rank, for embedding and head.
        (SmallModel("gpt2", layers=4, tied=True), {"schedule": "zero_bubble-v", "chunks": 2}, {"data_parallel": 2}),
        pytest.param(
            SmallModel("qwen3", layers=8),
            {"stages": 4, "schedule": "zero_bubble-interleaved", "chunks": 2},
            {},
            marks=SLOW,
        ),
        pytest.param(SmallModel("mixtral", layers=4), {"schedule": "auto"}, {"checkpointing": True}, marks=SLOW),
        pytest.param(SmallModel("gpt_neox", layers=4, tied=True), {"segments": 3}, {"accumulate": 5}, marks=SLOW),
        pytest.param(SmallModel("gemma3", layers=5), {"partition": "even"}, {}, marks=SLOW),
    ],
    ids=name_of,
)
def test_every_output_gradient_and_weight(
    parity: Compare, small: SmallModel, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    report = parity(small, changes, **options)
    assert report.tolerance == 1e-9


@SLOW
@pytest.mark.parametrize(("stages", "segments", "schedule"), list(product((2, 3, 4), (1, 2, 3), SCHEDULES)))
def test_the_whole_product(parity: Compare, stages: int, segments: int, schedule: str) -> None:
    chunks = 1 if schedule == "zero_bubble" else 2
    changes = {"stages": stages, "segments": segments, "schedule": schedule, "chunks": chunks}
    parity(SmallModel("llama", layers=stages * chunks, tied=segments == 2), changes, accumulate=2)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("small", "changes", "options"),
    [
        (SmallModel("llama", layers=4, tied=True), {}, {"settings": {**ZERO_1, "gradient_clipping": 0.25}}),
        (SmallModel("llama", layers=4), {"stages": 4}, {"settings": ZERO_1, "dtype": "bfloat16", "accumulate": 3}),
        (SmallModel("qwen3", layers=4), {"segments": 3}, {"settings": {"zero_optimization": {"stage": 0}}}),
        (SmallModel("llama", layers=4), {}, {"settings": ZERO_1, "data_parallel": 2, "checkpointing": True}),
        (SmallModel("llama", layers=4), {}, {"settings": ZERO_1, "mesh": "1x2x1", "dtype": "bfloat16"}),
        (SmallModel("qwen3", layers=4, tied=True), {"stages": 3}, {"settings": ZERO_1, "mesh": "2x1x1"}),
    ],
    ids=name_of,
)
def test_in_the_engine(parity: Compare, small: SmallModel, changes: dict[str, Any], options: dict[str, Any]) -> None:
    """Its checkpoint, and the model that it saves, are compared too."""
    parity(small, changes, name="engine", **options)


#: On meshes inside the stages, which cut the vocabulary and the hidden states first. Not all of them cut it evenly.
MESHES = {"2x1x1": "gpt2", "1x2x1": "gemma2", "1x1x2": "llama", "1x2x2": "qwen3", "2x1x2": "llama"}


@pytest.mark.sample(0, ci=1)
@pytest.mark.parametrize(("tied", "mesh", "gather"), list(product((True, False), MESHES, ("step", "layer"))))
def test_on_meshes(parity: Compare, mesh: str, tied: bool, gather: str) -> None:
    small = SmallModel(MESHES[mesh], layers=4, tied=tied)
    # Gradients of the head come once a step, whichever of them waits.
    sync = "step" if tied == (gather == "step") else "unit"
    parity(small, {"segments": 3}, mesh=mesh, weight_gather=gather, gradient_sync=sync)


def stepped(path, config):
    """The bits of a step's gradients on one rank, and the bytes that went to the host."""
    model = cuboid.from_pretrained(path, config, dtype=torch.float64).train()
    generator, store = torch.Generator().manual_seed(0), model.cuboid.state.host_store
    if store is not None:
        store.make_copies = LateCopies
    every = [torch.randint(131, (rows, length), generator=generator) for rows, length in ((2, 12), (1, 16), (3, 9))]
    cuboid.Pipeline(model).train(iter([{"input_ids": ids, "labels": ids} for ids in every]), None)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return gradients, 0 if store is None else store.out_bytes


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mode", ["layers", "attention"])
def test_activations_on_the_host_beside_shares_of_the_head(pool, checkpoint, mode, schedule):
    tied, chunks = schedule == "zero_bubble-v", 1 + (len(schedule) > 11)
    path = checkpoint(SmallModel("gemma2" if tied else "llama", layers=4, tied=tied))
    pipeline = {"engine": "seq1f1b", **SPREAD, "segments": 3, "schedule": schedule, "chunks": chunks}
    on_device, on_host = (
        pool.run(2, stepped, path, {"pipeline": pipeline, "activation_checkpointing": {"mode": mode, **host}})
        for host in ({}, {"cpu_checkpointing": True})
    )
    for (expected, _), (gradients, moved) in zip(on_device, on_host, strict=True):
        assert moved > 0
        assert gradients.keys() == expected.keys()
        assert all(torch.equal(gradients[name], expected[name]) for name in expected)


# The shares by themselves


class Rows(HeadRows):
    """One rank's rows, without messages."""

    def __init__(self, stage, blocks, rank, ranks):
        self._mesh, self._name, self._sums, self.rank = stage.cuboid.mesh, "lm_head", {}, rank
        self._arriving = []
        weight, bias = blocks["weight"], blocks.get("bias")
        self._shape, self.parts = tuple(weight.shape), parts_of(weight.shape[0], ranks)
        rows = slice(*self.local_rows)
        self.part = linear(weight[rows], None if bias is None else bias[rows], trains=(True, True), mesh=self._mesh)
        self.dtype = self.hidden_dtype = weight.dtype
        self.head = Head(stage, stage.staging.plan.outline, stage.cuboid.base.forward)

    @property
    def local_rows(self):
        return self.parts[self.rank]


def steps_of_shares(stage, hidden, labels, ranks):
    """What shares of P ranks compute together of a unit: loss, gradient of the hidden states, and of each block."""
    head = Head(stage, stage.staging.plan.outline, stage.cuboid.base.forward)
    length = labels.shape[1]
    batch = SimpleNamespace(ids=labels, labels=labels, cut=lambda x, _: x, segment_length=lambda _: length)
    module = stage.get_submodule("lm_head")
    with head.unsharded():
        blocks = {name: block.detach().clone() for name, block in module.named_parameters(recurse=False)}
    all_rows = [Rows(stage, blocks, rank, ranks) for rank in range(ranks)]
    shares = [VocabularyShare(stage, rows, [batch], 0.125) for rows in all_rows]
    statistics = torch.stack([share.forward(0, 0, hidden) for share in shares])
    gradient = sum(share.backward(0, 0, statistics) for share in shares)
    assert not any(share._open for share in shares)
    losses = [share.total() for share in shares]
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    return losses[0], gradient, {name: torch.cat([rows._sums[name] for rows in all_rows]) for name in blocks}


def whole_step(model, outline, hidden, labels):
    logits = Head(model, outline).logits(hidden)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") * 0.125
    loss.backward()
    return loss.detach(), hidden.grad, dict(model.get_output_embeddings().named_parameters())


def unit_of(config, rows, length):
    torch.manual_seed(0)
    hidden = torch.randn((rows, length, config.hidden_size), dtype=torch.float64, requires_grad=True)
    labels = torch.randint(config.vocab_size, (rows, length))
    labels[0, :4] = labels[1] = -100
    return hidden, labels


def head_config(name):
    """Soft-capped logits, a bias, and logits that are multiplied or divided by a number."""
    if name == "gemma2":
        return SmallModel("gemma2").config()
    options = {"phi": {}, "cohere": {"logit_scale": 0.3}, "granite": {"logits_scaling": 3.0}}[name]
    return small_config(AutoConfig.for_model(name, **options))


close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-14)


@pytest.mark.sample(6, ci="others")
@pytest.mark.parametrize("chunk_bytes", [None, 700], ids=["whole", "chunks"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["gemma2", "phi", "cohere", "granite"])
def test_shares_together_are_the_whole_head(name, ranks, chunk_bytes):
    config = head_config(name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    outline = draw_outline(type(model), config)
    only = Mesh(MeshShape(), pipe=1, rank=0, world_size=1)
    stage = make_stage(model, outline, (outline.count,), only, gives_cache=True)
    stage.cuboid.state.chunk_bytes = chunk_bytes
    hidden, labels = unit_of(config, 3, 7)
    with KeepFloat64():
        expected = whole_step(model, outline, hidden, labels)
        loss, gradient, blocks = steps_of_shares(stage, hidden.detach(), labels, ranks)
    close(loss, expected[0])
    close(gradient, expected[1])
    for key, parameter in expected[2].items():
        close(blocks[key], parameter.grad)


@pytest.mark.sample(3, ci=9)
@pytest.mark.parametrize("chunk_bytes", [None, 700, "smallest part"])
@pytest.mark.parametrize("mesh", ["2x1x1", "1x2x1", "1x1x2", "1x2x2", "2x2x1"])
@pytest.mark.parametrize("name", ["gemma2", "phi"])
def test_shares_on_a_mesh_are_the_whole_head(name, mesh, chunk_bytes):
    """Their vocabulary is cut by the mesh first, and padded: it divides by none of these.

    With as many bytes as exactly half of the positions take in the smallest part, the largest has to be cut more
    finely; all must be cut alike.
    """
    config = head_config(name)
    config.vocab_size = 97
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    outline, shape = draw_outline(type(model), config), MeshShape.parse(mesh)
    plan, ranks = make_parallel_plan(model, shape, MeshVerdict()), ThreadRanks(shape)
    options = {"gives_cache": True, "parallel": plan}
    stages = [make_stage(model, outline, (outline.count,), mesh_of_rank, **options) for mesh_of_rank in ranks.meshes]
    hidden, labels = unit_of(config, 4, 8)
    if chunk_bytes == "smallest part":
        # Rows of the block, as equal as they can be on three ranks; of each row on this rank, half of the positions.
        smallest = math.ceil(97 / (shape.sequence * shape.batch)) * shape.batch // 3
        chunk_bytes = 4 * (4 // shape.batch) * shape.sequence * (4 // shape.sequence) * smallest // shape.hidden

    def on_rank(mesh_of_rank):
        stage = stages[mesh_of_rank.rank]
        stage.cuboid.state.chunk_bytes = chunk_bytes
        local = hidden.detach()
        for dim, axis in enumerate(("batch", "sequence", "hidden")):
            local = own_slice(local, dim, mesh_of_rank.along(axis))
        with KeepFloat64():
            return steps_of_shares(stage, local.contiguous(), own_slice(labels, 0, mesh_of_rank.along("batch")), 3)

    results = ranks.run(on_rank)
    with KeepFloat64():
        expected = whole_step(model, outline, hidden, labels)
    sums = {key: {} for key in expected[2]}
    for mesh_of_rank, (loss, gradient, blocks) in zip(ranks.meshes, results, strict=True):
        close(loss, expected[0])
        local = expected[1]
        for dim, axis in enumerate(("batch", "sequence", "hidden")):
            local = own_slice(local, dim, mesh_of_rank.along(axis))
        close(gradient, local)
        for key, block in blocks.items():
            # Each row of the batch axis has a part of the block's gradient, and for a bias each rank of `hidden`.
            place = mesh_of_rank.index("sequence"), mesh_of_rank.index("hidden") if key == "weight" else 0
            sums[key][place] = sums[key].get(place, 0) + block
    for key, parameter in expected[2].items():
        features = [
            torch.cat([sums[key][s, h] for s in range(shape.sequence)])
            for h in (range(shape.hidden) if key == "weight" else (0,))
        ]
        close(torch.cat(features, -1)[: config.vocab_size], parameter.grad)


# Checkpoints


def saved_by(path, config, root):
    engine = make_engine(path, config)
    losses = train(engine, 2)
    engine.save_checkpoint(root)
    return losses + train(engine, 2, skip=2)


def resumed_by(path, config, root):
    engine = make_engine(path, config)
    engine.load_checkpoint(root)
    return train(engine, 2, skip=2)


@pytest.mark.sample(0, ci=1)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "other",
    [
        settings("1x2x1", 2, pipeline={**SPREAD, "segments": 3}),
        settings("1x1x1", 4, pipeline={**SPREAD, "segments": 3}),
        settings("1x2x1", 2),
    ],
    ids=["mesh", "more stages", "not spread"],
)
def test_training_resumes_on_another_layout_spread_or_not(pool, checkpoint, tmp_path, tied, other):
    path = checkpoint(SmallModel("llama", heads=4, kv_heads=2, layers=4, tied=tied))
    losses = pool.run(2, saved_by, path, settings("1x1x1", 2, pipeline=SPREAD), str(tmp_path))[0]
    assert pool.run(4, resumed_by, path, other, str(tmp_path))[0] == pytest.approx(losses[2:], rel=2e-6)


# What is refused


def test_configs_that_are_refused():
    spread = {"engine": "seq1f1b", "stages": 2, "segments": 2, "head": "spread"}
    refused = {
        "seq1f1b": {},
        "seq1f1b-interleaved": {"schedule": "seq1f1b-interleaved", "chunks": 2},
    }
    for message, changes in refused.items():
        with pytest.raises(ConfigError, match=message):
            parse_config({"pipeline": spread | changes})
    # On one rank there is nothing to spread.
    assert not parse_config({"pipeline": spread | {"stages": 1}}).pipeline.spreads_head


def outlined(auto, config):
    model = auto.from_config(config)
    return model, draw_outline(type(model), config)


def test_heads_that_are_refused_by_name():
    model, outline = outlined(AutoModelForCausalLM, SmallModel("llama").config())
    check_spread_head(model, outline, 2, 1)
    check_spread_head(model, outline, 2, 2)
    with pytest.raises(UnsupportedModelError, match="outputs for 2 stages × 1024 parts"):
        check_spread_head(model, outline, 2, 1024)
    bert = BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, vocab_size=40)
    with pytest.raises(UnsupportedModelError, match="its head isn't one"):
        check_spread_head(*outlined(AutoModelForMaskedLM, bert), 2, 1)
    with pytest.raises(UnsupportedModelError, match="its own forward computes the loss"):
        check_spread_head(*outlined(AutoModelForSequenceClassification, bert), 2, 1)


def test_a_head_whose_logits_depend_on_one_another_is_refused():
    model, outline = outlined(AutoModelForCausalLM, SmallModel("llama").config())
    plain = type(model).forward

    class Normed(type(model)):
        def forward(self, *args, **options):
            output = plain(self, *args, **options)
            output.logits = output.logits - output.logits.mean(-1, keepdim=True)
            return output

    model.__class__ = Normed
    before = model.lm_head
    with pytest.raises(UnsupportedModelError, match="depend on others"):
        check_spread_head(model, outline, 2, 1)
    assert model.lm_head is before


def test_parts_are_of_almost_one_size():
    assert parts_of(10, 4) == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert parts_of(128256, 8)[-1] == (112224, 128256)


def hooked(path, config):
    model = cuboid.from_pretrained(path, config)
    engine_batches = iter([{"input_ids": torch.ones((2, 6), dtype=torch.int64)} for _ in range(2)])
    if model.cuboid.mesh.has_last_stage:
        model.lm_head.register_forward_hook(cuboid.local_hook(lambda *_: None))
    batches = ({**batch, "labels": batch["input_ids"]} for batch in engine_batches)
    try:
        cuboid.Pipeline(model).train(batches, 2)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_head_that_a_script_has_changed_is_refused_on_all_ranks(pool, checkpoint):
    path = checkpoint(SmallModel("llama", layers=2))
    config = {"pipeline": {"engine": "seq1f1b", **SPREAD}}
    messages = pool.run(2, hooked, path, config)
    assert all("lm_head of the last stage is no longer a plain nn.Linear" in message for message in messages)
