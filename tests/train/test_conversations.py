"""Rows of texts and conversations: what `cuboid prepare` makes of them, and how they are trained on."""

import json
from fractions import Fraction

import numpy as np
import pytest
import torch
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, LlamaForCausalLM

from cuboid import CuboidError
from cuboid.cli.limits import mixed_path
from cuboid.data.batches import Blocks, Mixture, Share, Shuffle, micro_batch
from cuboid.data.conversations import encode_conversation
from cuboid.data.corpus import check_corpus, read_corpus
from cuboid.data.initial_model import train_tokenizer
from cuboid.data.rows import Conversation, read_rows
from cuboid.data.tokens import TokenFolder, tokenize
from cuboid.integrations.run_report.schema import TrainReport
from cuboid.train.job import TrainOptions, check_options
from cuboid.train.prepare import prepare
from launching import BIN, as_ranks
from tiny_text import TEXTS, write_model_and_text

MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A:\n{% generation %}{{ m.content }}.{% endgeneration %}\n"
    "{% else %}U: {{ m.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}A:\n{% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
#: Leaves out what the assistant said before its last message.
FORGETFUL = (
    "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}{{ m.role }}: {{ m.content }}\n{% endif %}"
    "{% endfor %}"
)


def chat(*contents):
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": content} for number, content in enumerate(contents)]


def conversation(*contents):
    return Conversation(chat(*contents), None, "chats.jsonl, row 1")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 300)


def learned(tokenizer, template, *contents):
    tokenizer.chat_template = template
    ids, mask = encode_conversation(conversation(*contents), tokenizer)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(chat(*contents), tokenize=False)
    runs = np.split(ids, np.flatnonzero(np.diff(mask)) + 1)
    return [tokenizer.decode(run) for run in runs[0 if mask[0] else 1 :: 2]]


def test_of_a_conversation_only_what_the_assistant_says_is_learned(tokenizer):
    turns = ("return x", "def f(x)", "x * 3", "return 7")
    assert learned(tokenizer, MARKED, *turns) == ["def f(x).", "return 7."]
    # Without marks, the end of a turn belongs to it.
    assert learned(tokenizer, PLAIN, *turns) == ["def f(x).\n", "return 7.\n"]
    assert learned(tokenizer, PLAIN, *turns[:3]) == ["def f(x).\n"]


def test_a_template_that_rewrites_what_was_said_is_refused(tokenizer):
    tokenizer.chat_template = FORGETFUL
    assert encode_conversation(conversation("a", "b"), tokenizer)[1].any()
    with pytest.raises(CuboidError, match=r"chats.jsonl, row 1: the chat template writes .* before number 2 otherwise"):
        encode_conversation(conversation("a", "b", "c", "d"), tokenizer)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(CuboidError, match="row 1: the chat template refuses it: roles must alternate"):
        encode_conversation(conversation("a", "b"), tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(CuboidError, match="row 1 is a conversation, and the tokenizer has no chat template"):
        encode_conversation(conversation("a", "b"), tokenizer)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 isn't JSON"),
        ("[1]", "row 2 is no object; a row has either"),
        ('{"prompt": "a", "n": 1}', "row 2 has 'prompt', 'n'; a row has either"),
        ('{"text": "a", "messages": []}', "row 2 has 'text', 'messages'; a row has either"),
        ('{"text": null}', '"text" is NoneType, not a string'),
        ('{"messages": [{"content": "a"}]}', '"messages" has to be a list of'),
        ('{"messages": [], "tools": "none"}', '"tools", if there are some, a list'),
    ],
)
def test_a_row_that_is_no_document_is_named(tmp_path, line, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "one"}) + "\n" + line + "\n")
    with pytest.raises(CuboidError, match=message):
        list(read_rows(path))


def write_rows(path, rows):
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return path


def test_rows_are_documents_of_which_the_last_of_each_file_are_held_out(tokenizer, tmp_path):
    tokenizer.chat_template = MARKED
    write_rows(tmp_path / "rows" / "a.jsonl", [{"text": text} for text in TEXTS])
    write_rows(tmp_path / "rows" / "b.jsonl", [{"messages": chat("x", "y")}, {"messages": chat("z", "x * 2")}])
    check_corpus(tmp_path / "rows")
    corpus = read_corpus(tmp_path / "rows")
    assert corpus.heldout[0] == TEXTS[-1]
    assert corpus.heldout[1].messages == chat("z", "x * 2")
    assert (len(corpus.train), len(corpus.heldout)) == (30, 2)
    tokens = tokenize(corpus, tokenizer, tmp_path / "tokens")
    assert tokens.meta.has_unlearned
    assert TokenFolder.open(tmp_path / "tokens").meta == tokens.meta
    batch = micro_batch(torch.from_numpy(tokens.stream("heldout").astype(np.int64)).view(1, -1))
    text = TEXTS[-1] + tokenizer.eos_token + "U: z\nA:\nx * 2."
    assert tokenizer.decode(batch["input_ids"][0]) == text
    ignored = batch["labels"] == -100
    assert torch.equal(batch["labels"][~ignored], batch["input_ids"][~ignored])
    assert tokenizer.decode(batch["input_ids"][ignored]) == "U: z\nA:\n"
    # Without conversations the description is that of earlier versions.
    plain = tokenize(read_corpus(tmp_path / "rows" / "a.jsonl"), tokenizer, tmp_path / "plain")
    assert "has_unlearned" not in (plain.folder / "tokens.json").read_text()
    # Among other files, they are text as these are.
    (tmp_path / "rows" / "c.txt").write_text("words")
    assert any(document.startswith('{"text"') for document in read_corpus(tmp_path / "rows").train)
    one = write_rows(tmp_path / "one.jsonl", [{"text": "a"}])
    with pytest.raises(CuboidError, match=r"one.jsonl' has 1 rows; at least 2 are needed"):
        read_corpus(one)


def test_conversations_need_a_tokenizer_and_someone_to_learn_from(tokenizer, tmp_path):
    path = write_rows(tmp_path / "chats.jsonl", [{"messages": chat("x")}] * 3)
    with pytest.raises(CuboidError, match="has conversations, which a new tokenizer has no chat template for"):
        prepare(tmp_path / "out", model=None, data=path, vocabulary=300, seed=0, say=lambda _: None)
    tokenizer.chat_template = MARKED
    with pytest.raises(CuboidError, match="the train part has nothing to learn: no message of its conversations is"):
        tokenize(read_corpus(path), tokenizer, tmp_path / "tokens")


# --- several texts ---------------------------------------------------------------------------------------------------


def mixture_of(lengths, shares, seed):
    # A block of text n has the number n, and then its own.
    streams = [
        np.stack([np.full(length, text), np.arange(length)], axis=1).astype(np.int32).ravel()
        for text, length in enumerate(lengths)
    ]
    return Mixture(tuple(Blocks(stream, 2) for stream in streams), shares, seed)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    shares=st.lists(st.integers(1, 300), max_size=3),
    first=st.integers(0, 1500),
    blocks=st.integers(1, 20),
)
def test_each_text_has_its_share_and_epochs_of_its_own(seed, shares, first, blocks):
    shares = tuple(Fraction(share, 1000) for share in shares)
    mixture = mixture_of([blocks + text for text in range(len(shares) + 1)], shares, seed)
    seen = [mixture.block(position) for position in range(first + 1024)]
    for text, share in enumerate(shares, start=1):
        numbers = [number for other, number in seen if other == text]
        # To within a block of each side of the periods that the end is in.
        assert abs(len(numbers) - share * len(seen)) <= 1024 * share + 2
        epochs = [numbers[at : at + blocks + text] for at in range(0, len(numbers), blocks + text)]
        for epoch in epochs:
            assert len(set(epoch)) == len(epoch)
    # Any rank reads its part of any micro-batch, without what came before.
    shares_of = [Share(replica, 2, 2) for replica in range(2)]
    rows = [mixture.rows(first, share) for share in shares_of]
    expected = seen[4 * first : 4 * first + 4] if 4 * first + 4 <= len(seen) else None
    if expected is not None:
        assert [tuple(row) for part in rows for row in part.tolist()] == expected


def test_one_text_alone_has_the_order_that_it_had_before():
    mixture, share = mixture_of([7], (), 3), Share(1, 2, 3)
    for step in range(9):
        assert mixture.rows(step, share)[:, 1].tolist() == Shuffle(7, 3).indices(step, share)


@pytest.mark.parametrize("text", ["code", "a=path", "a=path:", "a=path:0", "a=path:1", "a=path:1e1", "path:0.5"])
def test_what_is_no_share_is_refused(text):
    with pytest.raises(typer.BadParameter):
        mixed_path(text, "--mix")


def test_shares_leave_something_to_the_first_text(tmp_path):
    name, path, share = mixed_path(f"code={tmp_path}/a:b:0.25", "--mix")
    assert (name, str(path), share) == ("code", f"{tmp_path}/a:b", Fraction(1, 4))
    write_model_and_text(tmp_path, layers=1)
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
    config |= {"tensor_parallel": {"mode": "3d_tensor", "mesh": {}}, "train_micro_batch_size_per_gpu": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = {name: tmp_path / name for name in ("model", "out")} | {"data": tmp_path / "text"}
    options = lambda **more: TrainOptions(config=tmp_path / "config.json", **names, **more)  # noqa: E731
    text = tmp_path / "text"
    for wrong, message in (
        (
            {"mixed": (("a", text, Fraction(1, 2)), ("b", text, Fraction(1, 2)))},
            "have 1 of all blocks; --data has",
        ),
        ({"mixed": (("a", text, Fraction(1, 2)),), "eval_data": (("a", text),)}, "--mix names a twice"),
        ({"mixed": (("train", text, Fraction(1, 2)),)}, "is neither heldout nor train"),
        ({"mixed": (("a", tmp_path / "none", Fraction(1, 2)),)}, r"--mix a=.*none does not exist"),
    ):
        with pytest.raises(CuboidError, match=message):
            check_options(options(**wrong))


# --- training --------------------------------------------------------------------------------------------------------

MESH = {"tensor_parallel": {"mode": "3d_tensor", "mesh": {}}}
STAGED = {"pipeline": {"engine": "seq1f1b", "stages": 2, "segments": 2}}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A model whose tokenizer has a chat template, conversations with answers of very different lengths, and text."""
    folder = tmp_path_factory.mktemp("job")
    write_model_and_text(folder, layers=2)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.chat_template = PLAIN
    tokenizer.save_pretrained(folder / "model")
    says = lambda number, length: f"x * {number} + " * length  # noqa: E731
    rows = [{"messages": chat(says(n, 1 + 7 * (n % 2)), says(n + 1, 1 + n % 9))} for n in range(60)]
    write_rows(folder / "chats.jsonl", rows)
    return folder


def train(job, out, ranks, sections, accumulation, *more):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        **sections,
    }
    config |= {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_allow_untested_optimizer": True}
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config))
    names = {"model": job / "model", "data": job / "chats.jsonl", "config": out / "config.json", "out": out}
    options = [f"--{name}={value}" for name, value in names.items()]
    more = ("--sequence-length=32", "--heldout-blocks=5", "--steps=4", *more)
    endings = as_ranks(ranks, BIN / "cuboid", "train", *options, *more)
    assert all(status == 0 for status, _ in endings), endings
    return TrainReport.model_validate_json((out / "report.json").read_text())


@pytest.mark.ci
def test_each_label_counts_alike_on_replicas_in_pipelines_and_in_plain_transformers(job, tmp_path):
    alone = train(job, tmp_path / "alone", 1, MESH, 4)
    replicas = train(job, tmp_path / "replicas", 2, MESH, 2)
    staged = train(job, tmp_path / "staged", 2, STAGED, 4)
    for other in (replicas, staged):
        assert other.train_losses == pytest.approx(alone.train_losses, rel=1e-5)
        assert other.losses.heldout_last == pytest.approx(alone.losses.heldout_last, rel=1e-5)
    model = LlamaForCausalLM.from_pretrained(job / "model")
    tokens = TokenFolder.open(tmp_path / "alone" / "tokens")
    mixture = Mixture((Blocks(tokens.stream("train"), 32),), (), 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, loss in enumerate(alone.train_losses):
        batch = micro_batch(mixture.rows(step, Share(0, 1, 4)))
        counts = (batch["labels"][:, 1:] != -100).sum(1)
        assert len(set(counts.tolist())) > 1
        expected = model(**batch).loss
        assert loss == pytest.approx(expected.item(), rel=1e-5), step
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()


@pytest.mark.slow
def test_a_run_of_several_texts_resumes_by_its_position(job, tmp_path):
    mix = (f"--mix=code={job / 'text'}:0.3", "--eval", f"more={job / 'text'}", "--evaluations=1")
    uninterrupted = train(job, tmp_path / "whole", 2, MESH, 2, *mix)
    assert uninterrupted.heldout_losses[-1].others.keys() == {"code", "more"}
    out = tmp_path / "stopped"
    out.mkdir()
    (out / "config.json").write_text((tmp_path / "whole" / "config.json").read_text())
    names = {"model": job / "model", "data": job / "chats.jsonl", "config": out / "config.json", "out": out}
    options = [f"--{name}={value}" for name, value in names.items()]
    options += ["--sequence-length=32", "--heldout-blocks=5", "--steps=4", *mix, "--resume", "auto"]
    for status in (124, 124, 124, 124, 0):  # each makes a step, and the last one evaluates
        endings = as_ranks(2, BIN / "cuboid", "train", *options, "--max-time=0.1")
        assert all(code == status for code, _ in endings), endings
    report = TrainReport.model_validate_json((out / "report.json").read_text())
    assert report.resumed_after == [1, 2, 3, 4]
    assert report.train_losses == uninterrupted.train_losses
    # Other shares are another run.
    (out / "report.json").unlink()
    options = [option.replace(":0.3", ":0.4") for option in options]
    endings = as_ranks(2, BIN / "cuboid", "train", *options, "--steps=5")
    assert "other data (other tokens)" in endings[0][1] + endings[1][1]
