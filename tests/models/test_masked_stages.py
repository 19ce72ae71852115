"""Encoders with the head of a masked language model, in a pipeline of whole sequences."""

import pytest
import torch
from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM, set_seed

import cuboid
from cuboid.models.batch.batch import IGNORE_INDEX
from cuboid.verify.workers.pool import WorkerError
from training import ROWS, VOCABULARY, make_engine, settings

TIMEOUT_S = 120.0
LENGTH, STEPS = 10, 3


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    set_seed(0)
    BertForMaskedLM(
        BertConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **sizes, **no_dropout)
    ).save_pretrained(folder)
    return str(folder)


def _batches():
    """With padding on the right, which an encoder's tokens would see, and as many labels in each."""
    generator = torch.Generator().manual_seed(3)
    while True:
        ids = torch.randint(4, VOCABULARY, (ROWS, LENGTH), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, 6:] = 0
        labels = ids.clone()
        labels[:, ::2] = IGNORE_INDEX
        labels[mask == 0] = IGNORE_INDEX
        yield {"input_ids": ids, "attention_mask": mask, "labels": labels}


def in_stages(path, config, out):
    """Losses, and the weights of all stages."""
    engine = make_engine(path, config)
    batches = _batches()
    losses = [float(engine.train_batch(batches)) for _ in range(STEPS)]
    engine.save_checkpoint(out)
    return losses, {name: x.clone() for name, x in cuboid.full_state_dict(engine).items()}


def alone(path):
    """The same with plain transformers and torch."""
    model = AutoModelForMaskedLM.from_pretrained(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    batches, losses = _batches(), []
    for _ in range(STEPS):
        found = [model(**next(batches)).loss for _ in range(2)]
        loss = torch.stack(found).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def _config(segments):
    config = settings(stages=2, pipeline={"segments": segments})
    del config["scheduler"]
    return config


def test_two_stages_train_as_one_process(pool, path, tmp_path):
    expected, weights = alone(path)
    (found, ours), _ = pool.run(2, in_stages, path, _config(1), str(tmp_path), timeout_s=TIMEOUT_S)
    assert found == pytest.approx(expected, rel=1e-5)
    assert ours.keys() == weights.keys()
    for name, x in ours.items():
        torch.testing.assert_close(x, weights[name], rtol=1e-4, atol=1e-5, msg=name)
    saved = AutoModelForMaskedLM.from_pretrained(tmp_path / f"global_step{STEPS}").state_dict()
    assert all(torch.equal(saved[name], x) for name, x in ours.items())


def test_segments_are_refused_since_positions_see_later_ones(pool, path, tmp_path):
    with pytest.raises(WorkerError, match="positions see later ones"):
        pool.run(2, in_stages, path, _config(2), str(tmp_path), timeout_s=TIMEOUT_S)
