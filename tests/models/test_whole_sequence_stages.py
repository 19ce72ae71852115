"""Models whose tokens see later ones, and heads that need whole sequences, in a pipeline of one segment: masked
language models, classifiers, rewards and question answering, trained as by one process."""

import pytest
import torch
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import cuboid
from cuboid.models.batch.local_batch import IGNORE_INDEX
from cuboid.models.kinds.registry import kind_of
from cuboid.verify.workers.pool import WorkerError
from training import ROWS, VOCABULARY, make_engine, settings, small_checkpoint
from training import ranks_of as ranks

TIMEOUT_S = 120.0
LENGTH, STEPS = 11, 3
MICRO_BATCHES = 2

#: By case: the auto class, the architecture, what its config says, and the layout.
CASES = {
    "bert-masked": (AutoModelForMaskedLM, "bert", {}, {}),
    # It has its head in front of its embeddings, so that what both share goes by another name on its last stage.
    "camembert-masked": (AutoModelForMaskedLM, "camembert", {}, {}),
    "bert-classes": (AutoModelForSequenceClassification, "bert", {"num_labels": 3}, {"data": 2}),
    "roberta-number": (AutoModelForSequenceClassification, "roberta", {"num_labels": 1}, {}),
    "distilbert-several": (AutoModelForSequenceClassification, "distilbert",
                           {"num_labels": 3, "problem_type": "multi_label_classification"}, {}),
    "electra-tokens": (AutoModelForTokenClassification, "electra", {"num_labels": 3},
                       {"pipeline": {"segments": 1, "schedule": "zero_bubble"}}),
    "modernbert-answers": (AutoModelForQuestionAnswering, "modernbert", {}, {}),
    "llama-reward": (AutoModelForSequenceClassification, "llama", {"num_labels": 1, "pad_token_id": 0},
                     {"pipeline": {"segments": 1, "schedule": "auto"}}),
}  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path):
    def write(case):
        auto, architecture, options, _ = CASES[case]
        return small_checkpoint(auto, architecture, tmp_path / "model", **options)

    return write


def _batches(case, replica=0, replicas=1):
    """Micro-batches with padding on the right, of whose labels some are missing, in the first of a step the most."""
    auto, architecture, options, _ = CASES[case]
    generator = torch.Generator().manual_seed(3)
    number = 0
    while True:
        ids = torch.randint(4, VOCABULARY, (ROWS, LENGTH), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, 6:] = 0
        ids[mask == 0] = 1 if architecture == "roberta" else 0
        batch = {"input_ids": ids, "attention_mask": mask}
        if architecture == "bert":
            batch["token_type_ids"] = (torch.arange(LENGTH) > 4).long().expand(ROWS, -1)
        dropped = torch.rand((ROWS, LENGTH), generator=generator) < (0.2 if number % MICRO_BATCHES else 0.7)
        outputs = options.get("num_labels", 1)
        if auto is AutoModelForMaskedLM:
            batch["labels"] = ids.masked_fill(dropped | (mask == 0), IGNORE_INDEX)
        elif auto is AutoModelForTokenClassification:
            batch["labels"] = (ids % outputs).masked_fill(dropped | (mask == 0), IGNORE_INDEX)
        elif auto is AutoModelForQuestionAnswering:
            batch |= {"start_positions": ids[:, 0] % 5, "end_positions": 4 + ids[:, 1] % 2}
        elif "problem_type" in options:
            batch["labels"] = torch.rand((ROWS, outputs), generator=generator).round()
        elif outputs == 1:
            batch["labels"] = torch.rand((ROWS,), generator=generator)
        else:
            batch["labels"] = (ids[:, 0] % outputs).masked_fill(dropped[:, 0], IGNORE_INDEX)
        rows = slice(replica * ROWS // replicas, (replica + 1) * ROWS // replicas)
        yield {name: x[rows] for name, x in batch.items()}
        number += 1


def in_stages(path, case, config, out):
    """Losses of steps and of an evaluation, and the weights of all stages."""
    engine = make_engine(path, config, auto_class=CASES[case][0])
    mesh = cuboid.mesh_of(engine)
    batches = _batches(case, mesh.coordinate.data, mesh.topology.data)
    losses = [float(engine.train_batch(batches)) for _ in range(STEPS)]
    losses.append(float(engine.eval_batch(batches)))
    engine.save_checkpoint(out)
    return losses, {name: x.clone() for name, x in cuboid.full_state_dict(engine).items()}


def alone(path, case):
    """The same with plain transformers and torch: a step's loss is the mean over all its labels."""
    model = CASES[case][0].from_pretrained(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    batches, losses = _batches(case), []
    kind = kind_of(type(model), model.config)
    for step in range(STEPS + 1):
        micro_batches = [next(batches) for _ in range(MICRO_BATCHES)]
        counts = [int((b["labels"] != IGNORE_INDEX).sum()) if kind.classes and not b["labels"].is_floating_point()
                  else ROWS for b in micro_batches]  # fmt: skip
        parts = [model(**b).loss * count for b, count in zip(micro_batches, counts, strict=True) if count]
        loss = torch.stack(parts).sum() / sum(counts)
        losses.append(loss.item())
        if step < STEPS:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return losses, model.state_dict()


def _config(case, segments=1, mesh="1x1x1"):
    options = CASES[case][3]
    config = settings(
        mesh, stages=2, data=options.get("data", 1), pipeline=options.get("pipeline", {"segments": segments})
    )
    del config["scheduler"]
    return config


#: Sequences, heads, rows and classes aren't divided by all of them.
MESHES = [
    *((case, "1x1x1") for case in CASES),
    ("bert-masked", "1x2x1"),
    ("bert-classes", "1x2x1"),
    ("camembert-masked", "1x2x1"),
    ("roberta-number", "2x1x1"),
    ("distilbert-several", "1x1x2"),
    ("electra-tokens", "1x2x1"),
    ("modernbert-answers", "1x2x2"),
    ("llama-reward", "1x2x1"),
]


@pytest.mark.sample(1, ci=2)
@pytest.mark.parametrize(("case", "mesh"), MESHES)
def test_stages_train_as_one_process(pool, checkpoint, tmp_path, case, mesh):
    path, config = checkpoint(case), _config(case, mesh=mesh)
    expected, weights = alone(path, case)
    out, size = tmp_path / "out", ranks(config, CASES[case][3].get("data", 1))
    (losses, ours), *_ = pool.run(size, in_stages, path, case, config, str(out), timeout_s=TIMEOUT_S)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert ours.keys() == weights.keys()
    for name, x in ours.items():
        # Softmax over positions doesn't see an answers' bias: Adam divides rounding by rounding.
        slack = STEPS * 1e-3 if "answers" in case and name == "classifier.bias" else 1e-5
        torch.testing.assert_close(
            x, weights[name], rtol=1e-4, atol=slack, msg=lambda text, name=name: f"{name}: {text}"
        )
    saved = CASES[case][0].from_pretrained(out / f"global_step{STEPS}").state_dict()
    assert all(torch.equal(saved[name], x) for name, x in ours.items())


@pytest.mark.parametrize(
    ("case", "reason"),
    [("bert-masked", "positions see later ones"), ("bert-classes", "whose loss is one of whole sequences")],
)
def test_segments_are_refused(pool, checkpoint, tmp_path, case, reason):
    config = _config(case, segments=2)
    with pytest.raises(WorkerError, match=f'(?s){reason}.*"segments": 1 is right'):
        pool.run(2, in_stages, checkpoint(case), case, config, str(tmp_path / "out"), timeout_s=TIMEOUT_S)
