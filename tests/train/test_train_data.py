"""`cuboid prepare`, and `cuboid train` in one process: text, tokens, batches, checks of arguments, report."""

import copy
import errno
import json
import os
import socket
import time
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, BartConfig, LlamaConfig, LlamaForCausalLM, ViTConfig

from cuboid import CheckpointError, ConfigError, CuboidError
from cuboid.cli import app
from cuboid.config.schema import PipelineConfig
from cuboid.data import tokens as tokens_module
from cuboid.data.batches import IGNORED, Blocks, Share, Shuffle, heldout_batches, heldout_blocks
from cuboid.data.corpus import Corpus, python_sources, read_corpus, split_files
from cuboid.data.initial_model import check_replaceable_model, train_tokenizer, write_llama
from cuboid.data.tokens import TokenFolder, TokensMeta, check_size, fingerprint, remove_leftovers, tokenize
from cuboid.failures import launched_world, rank_agreement, startup
from cuboid.failures.launched_world import World, run_at_length
from cuboid.failures.rendezvous import MAIN_LANE
from cuboid.failures.startup import bound_device
from cuboid.integrations.run_report.curve import draw, smooth
from cuboid.integrations.run_report.figures import pipeline_figures
from cuboid.integrations.run_report.schema import HeldoutPoint, Losses, MeshSizes, RankFigures, Speed, TrainReport
from cuboid.train.job import TrainOptions, plan
from cuboid.train.prepare import prepare
from launching import free_port
from tiny_text import TEXTS

OURS = {
    "tensor_parallel": {"mode": "3d_tensor", "mesh": {}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}
SCHEDULE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 300, "warmup_num_steps": 30}}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 300)


@pytest.fixture(scope="module")
def checkpoint(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=304,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=64,
        )
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def options(checkpoint, tmp_path):
    data = tmp_path / "text.txt"
    data.write_text("".join(TEXTS))
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({**OURS, "train_micro_batch_size_per_gpu": 2, "scheduler": SCHEDULE}))

    def make(**changes):
        defaults = {"model": checkpoint, "data": data, "config": config, "out": tmp_path / "out", "sequence_length": 32}
        return TrainOptions(**{**defaults, **changes})

    return make


def write_texts(folder, texts):
    folder.mkdir(parents=True, exist_ok=True)
    for index, text in enumerate(texts):
        (folder / f"{index:02}.py").write_text(text)
    return folder


def test_a_folder_is_split_by_file_independently_of_its_path(tmp_path):
    here, there = (read_corpus(write_texts(tmp_path / name / "texts", TEXTS)) for name in ("a", "b"))
    assert here.train == there.train
    assert here.heldout == there.heldout
    assert len(here.heldout) == 1
    assert sorted(here.train + here.heldout) == sorted(TEXTS)


@given(count=st.integers(2, 200), share=st.floats(0, 1))
def test_both_sides_of_a_split_have_at_least_one_file(tmp_path_factory, count, share):
    root = tmp_path_factory.getbasetemp()
    files = [root / f"{index}.txt" for index in range(count)]
    train, heldout = split_files(files, root, share)
    assert train
    assert heldout
    assert sorted(train + heldout) == sorted(files)


def test_hidden_and_binary_files_are_left_out(tmp_path):
    write_texts(tmp_path, TEXTS[:2])
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "image").write_bytes(b"\x89PNG\xff")
    (tmp_path / "zeros").write_bytes(b"a\0b")
    corpus = read_corpus(tmp_path)
    assert sorted(corpus.train + corpus.heldout) == sorted(TEXTS[:2])


def test_a_folder_that_cannot_be_read_is_not_passed_over(tmp_path, monkeypatch):
    write_texts(tmp_path, TEXTS[:2])
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def refused(path):
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(CuboidError, match="closed can't be read: Permission denied"):
        read_corpus(tmp_path)


def test_python_sources_leave_out_tests_and_packages(tmp_path):
    for name in ("a.py", "b/c.py", "test/d.py", "b/tests/e.py", "site-packages/f.py", "g.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    assert [file.relative_to(tmp_path).as_posix() for file in python_sources(tmp_path)] == ["a.py", "b/c.py"]


def test_the_end_of_a_single_file_is_held_out(tmp_path):
    text = "".join(f"line {index}\n" for index in range(100))
    (tmp_path / "text").write_text(text)
    corpus = read_corpus(tmp_path / "text")
    assert corpus.train[0] + corpus.heldout[0] == text
    assert corpus.heldout[0].count("\n") == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [({}, "0 text files"), ({"one.txt": b"text"}, "1 text files"), ({"a": b"\xff", "b": b""}, "0 text files")],
)
def test_a_folder_with_too_little_text_is_rejected(tmp_path, content, message):
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(CuboidError, match=message):
        read_corpus(tmp_path)


def test_prepare_replaces_no_model_but_its_own(tokenizer, tmp_path):
    check_replaceable_model(tmp_path)
    write_llama(tmp_path, len(tokenizer), tokenizer, 0)
    check_replaceable_model(tmp_path)
    LlamaConfig(hidden_size=32, num_hidden_layers=3).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="has a model that no `cuboid prepare` wrote"):
        check_replaceable_model(tmp_path)


def test_tokens_decode_to_the_documents_each_with_its_end(tokenizer, tmp_path):
    corpus = Corpus("test", tuple(TEXTS[:3]), tuple(TEXTS[3:4]))
    tokens = tokenize(corpus, tokenizer, tmp_path)
    stream = tokens.stream("train")
    assert stream.dtype == np.int32
    assert tokenizer.decode(stream) == "".join(text + tokenizer.eos_token for text in TEXTS[:3])
    assert tokens.meta.train == len(stream)
    assert tokens.meta.largest_id == max(stream.max(), tokens.stream("heldout").max())
    assert TokenFolder.is_store(tmp_path)
    assert TokenFolder.open(tmp_path) == tokens
    assert {path.name for path in tmp_path.iterdir()} == {"train.npy", "heldout.npy", "tokens.json"}


def test_a_long_document_is_tokenized_in_full_lines(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(tokens_module, "_PIECE", 50)
    document = TEXTS[0] + "x" * 120
    tokens = tokenize(Corpus("test", (document,), (document,)), tokenizer, tmp_path)
    assert tokenizer.decode(tokens.stream("train")[:-1]) == document


def test_the_fingerprint_depends_on_every_token(tokenizer, tmp_path):
    corpora = [Corpus("a", (TEXTS[0],), (TEXTS[1],)), Corpus("b", (TEXTS[0],), (TEXTS[1],))]
    corpora += [Corpus("a", (TEXTS[1],), (TEXTS[0],)), Corpus("a", (TEXTS[0],), (TEXTS[1] + "x",))]
    names = [
        tokenize(corpus, tokenizer, tmp_path / str(number)).meta.data_sha256 for number, corpus in enumerate(corpora)
    ]
    assert names[0] == names[1]
    assert len(set(names)) == 3


def test_rejected_tokens_leave_the_existing_ones_unchanged(tokenizer, tmp_path):
    def refuse(meta):
        raise CuboidError(f"{meta.source} won't do")

    kept = tokenize(Corpus("kept", ("a",), ("b",)), tokenizer, tmp_path)
    with pytest.raises(CuboidError, match="other won't do"):
        tokenize(Corpus("other", ("c",), ("d",)), tokenizer, tmp_path, refuse)
    assert TokenFolder.open(tmp_path) == kept
    assert tokenizer.decode(kept.stream("train")) == "a" + tokenizer.eos_token


def test_what_killed_processes_left_is_removed_and_what_others_write_stays(tokenizer, tmp_path):
    folder = tmp_path / "tokens" / "named"
    tokenize(Corpus("test", ("a",), ("b",)), tokenizer, folder)
    (folder / ".mine.npy").touch()
    kept = sorted(folder.iterdir())
    for name in ("train.npy", "heldout.npy", "tokens.json"):
        (folder / f".{'0' * 32}.{name}").touch()
    with tokens_module._replacing(folder / "train.npy") as file:
        remove_leftovers(tmp_path / "tokens")
        (written,) = {*folder.iterdir()} - {*kept}
        file.write(b"new")
    assert written.name.endswith(".train.npy")
    assert sorted(folder.iterdir()) == kept
    assert (folder / "train.npy").read_bytes() == b"new"
    with pytest.raises(OSError, match="No space"), tokens_module._replacing(folder / "train.npy"):
        raise OSError("No space left on device")
    assert sorted(folder.iterdir()) == kept


def test_prepare_removes_what_an_earlier_one_left(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "text").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "text" / f"{number:02}.txt").write_text(text)
    leftover = tmp_path / "out" / "tokens" / f".{'0' * 32}.train.npy"
    leftover.parent.mkdir(parents=True)
    leftover.touch()
    prepare(
        tmp_path / "out",
        model=None,
        tokenizer_folder=tmp_path / "tokenizer",
        data=tmp_path / "text",
        vocabulary=300,
        seed=0,
        say=str,
    )
    assert not leftover.exists()


def test_malformed_tokens_are_rejected(tokenizer, tmp_path):
    tokenize(Corpus("test", ("a",), ("b",)), tokenizer, tmp_path)
    (tmp_path / "heldout.npy").unlink()
    with pytest.raises(CuboidError, match=r"heldout\.npy is missing"):
        TokenFolder.open(tmp_path)
    (tmp_path / "tokens.json").write_text("{}")
    with pytest.raises(CuboidError, match="run `cuboid prepare` again"):
        TokenFolder.open(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (np.arange(3, dtype=np.int32), r"int32 of shape \[3\], but tokens.json says int32 of shape \[2\]"),
        (np.arange(2), r"int64 of shape \[2\], but"),
        (b"no array", "can't be read"),
        (b"", "can't be read"),
    ],
    ids=["another length", "another type", "no array", "empty"],
)
def test_a_stream_that_is_not_what_the_description_says_is_rejected(tokenizer, tmp_path, content, message):
    tokens = tokenize(Corpus("test", ("a",), ("b",)), tokenizer, tmp_path)
    assert len(tokens.stream("train")) == 2
    if isinstance(content, bytes):
        (tmp_path / "train.npy").write_bytes(content)
    else:
        np.save(tmp_path / "train.npy", content)
    with pytest.raises(CuboidError, match=message):
        tokens.stream("train")
    assert len(tokens.stream("heldout")) == 2


def test_blocks_follow_the_stream():
    blocks = Blocks(np.arange(10, dtype=np.int32), 3)
    assert len(blocks) == 3
    taken = blocks.take([2, 0])
    assert taken.dtype == torch.int64
    assert taken.tolist() == [[6, 7, 8], [0, 1, 2]]


@given(blocks=st.integers(1, 40), replicas=st.integers(1, 4), micro_batch=st.integers(1, 4), seed=st.integers(0, 9))
def test_the_replicas_together_visit_every_block_once_an_epoch(blocks, replicas, micro_batch, seed):
    shuffle = Shuffle(blocks, seed)
    shares = [Share(replica, replicas, micro_batch) for replica in range(replicas)]
    steps = 2 * blocks  # two epochs at least
    visited = list(chain.from_iterable(shuffle.indices(n, share) for n in range(steps) for share in shares))
    assert sorted(visited[:blocks]) == sorted(visited[blocks : 2 * blocks]) == list(range(blocks))
    assert visited == [
        i for n in range(steps) for i in Shuffle(blocks, seed).indices(n, Share(0, 1, replicas * micro_batch))
    ]


def test_the_order_depends_on_seed_and_epoch():
    def order(seed, epoch):
        return Shuffle(50, seed).indices(epoch, Share(0, 1, 50))

    assert order(0, 0) != order(1, 0)
    assert order(0, 0) != order(0, 1)


@given(blocks=st.integers(1, 60), step=st.integers(0, 99), seed=st.integers(0, 9))
def test_a_step_has_the_same_blocks_with_any_number_of_replicas(blocks, step, seed):
    def seen(replicas, micro_batch, accumulation):
        shares = [Share(replica, replicas, micro_batch) for replica in range(replicas)]
        steps = range(step * accumulation, (step + 1) * accumulation)
        return sorted(block for n in steps for share in shares for block in Shuffle(blocks, seed).indices(n, share))

    assert seen(1, 12, 1) == seen(3, 2, 2) == seen(2, 1, 6) == seen(1, 1, 12)


@given(blocks=st.integers(1, 20), replicas=st.integers(1, 4), micro_batch=st.integers(1, 4))
def test_every_heldout_block_counts_once(blocks, replicas, micro_batch):
    data = torch.arange(blocks * 5).view(blocks, 5)
    seen, tokens = [], 0
    shares = [list(heldout_batches(data, Share(replica, replicas, micro_batch))) for replica in range(replicas)]
    assert len(set(map(len, shares))) == 1
    for batches in shares:
        for batch in batches:
            assert batch.input_ids.shape == batch.labels.shape == (micro_batch, 5)
            counted = batch.labels[:, 0] != IGNORED
            assert torch.equal(batch.labels[counted], batch.input_ids[counted])
            assert batch.tokens == (batch.labels[:, 1:] != IGNORED).sum()
            seen += batch.labels[counted, 0].tolist()
            tokens += batch.tokens
    assert sorted(seen) == data[:, 0].tolist()
    assert tokens == blocks * 4


def test_heldout_blocks_are_evenly_spaced():
    blocks = Blocks(np.arange(100, dtype=np.int32), 10)
    assert heldout_blocks(blocks, 4)[:, 0].tolist() == [0, 20, 50, 70]
    assert len(heldout_blocks(blocks, 32)) == 10


@pytest.mark.parametrize(
    ("asked", "steps", "folder", "step"),
    [({"trace": True}, 10, "out/trace", 3), ({"trace": "elsewhere", "trace_step": 7}, 5, "elsewhere", 5)],
)
def test_a_trace_goes_to_the_folder_of_the_run_before_it_ends(options, tmp_path, asked, steps, folder, step):
    config = tmp_path / "pipeline.json"
    pipeline = {"engine": "seq1f1b", "stages": 1, **asked}
    config.write_text(json.dumps({**OURS, "train_micro_batch_size_per_gpu": 2, "pipeline": pipeline}))
    job = plan(options(config=config, steps=steps))
    placed = job.config["pipeline"]
    assert Path(placed["trace"]) == (tmp_path / folder if asked["trace"] is True else Path(folder))
    assert placed["trace_step"] == step


def test_the_schedule_is_stretched_to_the_steps(options):
    assert plan(options()).steps == 300
    job = plan(options(steps=100))
    assert job.config["scheduler"]["params"] == {"total_num_steps": 100, "warmup_num_steps": 10}
    assert (job.micro_batch, job.accumulation, job.global_batch(3), job.dtype) == (2, 1, 6, torch.float32)


@pytest.mark.parametrize(("section", "dtype"), [({"bf16": {"enabled": True}}, torch.bfloat16), ({}, torch.float32)])
def test_the_dtype_is_the_configs(options, tmp_path, section, dtype):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**OURS, "train_micro_batch_size_per_gpu": 1, **section}))
    assert plan(options(config=config, steps=1)).dtype == dtype


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"steps": 0}, CuboidError, "--steps is 0"),
        ({"sequence_length": 1}, CuboidError, "--sequence-length is 1"),
        ({"sequence_length": 65}, CuboidError, "beyond the model's 64 positions"),
        ({"heldout_blocks": 0}, CuboidError, "--heldout-blocks is 0"),
        ({"evaluations": 0}, CuboidError, "--evaluations is 0"),
        ({"data": "nowhere"}, CuboidError, "does not exist"),
        ({"model": "nowhere"}, CheckpointError, "nowhere: does not exist"),
        ({"config": "nowhere.json"}, ConfigError, "does not exist"),
    ],
)
def test_errors_are_raised_before_the_process_group_exists(options, tmp_path, changes, error, message):
    changes = {key: tmp_path / value if isinstance(value, str) else value for key, value in changes.items()}
    with pytest.raises(error, match=message):
        plan(options(**changes))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "--steps is missing"),
        ({"scheduler": SCHEDULE}, "train_micro_batch_size_per_gpu is missing"),
        ({"scheduler": SCHEDULE, "train_batch_size": 4}, "train_micro_batch_size_per_gpu is None"),
        ({"scheduler": SCHEDULE, "train_micro_batch_size_per_gpu": "auto"}, 'is "auto", which only'),
        ({"scheduler": SCHEDULE, "gradient_accumulation_steps": 0}, "gradient_accumulation_steps: .* equal to 1"),
        ({"scheduler": SCHEDULE, "optimizer": None}, "optimizer: it is a section of keys"),
        ({"scheduler": SCHEDULE, "optimizer": {"type": "AdamV"}}, 'AdamV.*did you mean "Adam'),
        ({"scheduler": SCHEDULE, "tensor_parallel": None}, "no key of Cuboid's"),
        ({"scheduler": {"type": "WarmupLR", "params": {"total": 3}}}, "scheduler.params.total is not a parameter"),
    ],
)
def test_a_config_without_the_keys_of_the_job_is_rejected(options, tmp_path, config, message):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({**OURS, **config}))
    with pytest.raises(ConfigError, match=message):
        plan(options(config=path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_steps": 3}, "has max_steps, which it doesn't decide; give --steps"),
        ({"max_grad_norm": 3}, "has max_grad_norm, .*; write gradient_clipping into the config"),
        ({"dataloader_num_workers": 3}, "dataloader_num_workers, which has no meaning .* cuboid.CuboidTrainer in a"),
        ({"lr_scheduler_type": "cosine"}, "has lr_scheduler_type, but the config has a section scheduler"),
        ({"learning_rate": 1e-3}, "has learning_rate, but the config has a section optimizer"),
        ({"report_to": "tensorbored"}, "--report-to tensorbored: tensorbored is not supported"),
    ],
)
def test_arguments_of_the_trainer_that_something_else_decides_are_refused(options, tmp_path, arguments, message):
    path = tmp_path / "arguments.json"
    path.write_text(json.dumps(arguments))
    with pytest.raises(CuboidError, match=message):
        plan(options(trainer_args=path))


def test_arguments_of_the_trainer_replace_sections_of_the_config(options, tmp_path):
    config, path = tmp_path / "config.json", tmp_path / "arguments.json"
    config.write_text(json.dumps({"tensor_parallel": OURS["tensor_parallel"], "train_micro_batch_size_per_gpu": 2}))
    arguments = {"optim": "adamw_torch", "learning_rate": 1e-3, "lr_scheduler_type": "cosine", "warmup_steps": 2}
    path.write_text(json.dumps(arguments))
    assert plan(options(config=config, trainer_args=path, steps=4)).trainer_args == arguments
    path.write_text(json.dumps({**arguments, "lr_scheduler_type": "greedy"}))
    with pytest.raises(CuboidError, match="lr_scheduler_type is 'greedy'; it is one of linear, cosine"):
        plan(options(config=config, trainer_args=path, steps=4))
    path.write_text(json.dumps({"lr_scheduler_type": "cosine"}))
    with pytest.raises(ConfigError, match="optimizer is missing"):
        plan(options(config=config, trainer_args=path, steps=4))


def test_a_tokenizer_larger_than_the_model_is_rejected(options, checkpoint, tmp_path):
    LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    ).save_pretrained(tmp_path / "small")
    train_tokenizer(TEXTS, 300).save_pretrained(tmp_path / "small")
    with pytest.raises(CuboidError, match="vocabulary only 64"):
        plan(options(model=tmp_path / "small"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BartConfig(vocab_size=304, d_model=16), "BartForCausalLM.s own loss compares each position with its own"),
        (ViTConfig(), r"cuboid train runs causal language models, and 'vit' has none"),
    ],
    ids=["bart", "vit"],
)
def test_a_model_that_would_not_learn_to_predict_text_is_rejected(options, tokenizer, tmp_path, config, message):
    config.save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(CuboidError, match=message):
        plan(options(model=None, arch_config=tmp_path / "other", tokenizer=tmp_path / "other", steps=1))


def test_a_causal_model_is_told_without_the_code_of_all_others(options, monkeypatch):
    """Of two hundred, whose import takes each rank seconds."""

    def go_through_all(mapping):
        raise AssertionError("the configs of all models were imported")

    monkeypatch.setattr(type(MODEL_FOR_CAUSAL_LM_MAPPING), "keys", go_through_all)
    assert plan(options()).vocabulary > 0


def test_tokens_of_another_tokenizer_are_rejected(options, tokenizer, tmp_path):
    corpus = Corpus("test", tuple(TEXTS[:20]), tuple(TEXTS[20:]))
    assert plan(options(data=tokenize(corpus, tokenizer, tmp_path / "same").folder)).tokens is not None
    other = train_tokenizer(["something else entirely " * 50], 270)
    assert fingerprint(other) != fingerprint(tokenizer)
    with pytest.raises(CuboidError, match="another tokenizer"):
        plan(options(data=tokenize(corpus, other, tmp_path / "other").folder))


def test_tokens_of_the_same_vocabulary_but_other_rules_are_rejected(options, tokenizer, tmp_path):
    corpus = Corpus("test", tuple(TEXTS[:20]), tuple(TEXTS[20:]))
    other = copy.deepcopy(tokenizer)
    # What calls set doesn't count.
    other(TEXTS[:2], truncation=True, max_length=4, padding=False)
    other.backend_tokenizer.enable_padding()
    assert fingerprint(other) == fingerprint(tokenizer)
    other.backend_tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=True)
    assert other.get_vocab() == tokenizer.get_vocab()
    assert other(TEXTS[0])["input_ids"] != tokenizer(TEXTS[0])["input_ids"]
    with pytest.raises(CuboidError, match=r"pre-tokenizer differs\), or by an older version of Cuboid"):
        plan(options(data=tokenize(corpus, other, tmp_path / "other").folder))


def test_too_little_data_is_rejected_with_the_number_of_tokens_needed():
    meta = TokensMeta(source="test", tokenizer_sha256="", data_sha256="", largest_id=0, train=100, heldout=9)
    with pytest.raises(CuboidError, match="12 blocks of 10 tokens need 120"):
        check_size(meta, 10, global_batch=12)
    with pytest.raises(CuboidError, match="held-out part of the data has 9 tokens"):
        check_size(meta, 10, global_batch=1)


@pytest.mark.parametrize("address", [None, "127.0.0.1"], ids=["nowhere", "rank 0 absent"])
def test_the_command_prints_an_error_on_a_rank_whose_others_cannot_know_it(options, monkeypatch, capsys, address):
    asked = options()
    arguments = [f"--{name}={getattr(asked, name)}" for name in ("model", "data", "config", "out")]
    monkeypatch.setattr("cuboid.library_warnings.quiet", lambda **_: None)  # it is for a process of its own
    monkeypatch.setattr(startup, "_LINGER_S", 0.2)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    if address is not None:
        monkeypatch.setenv("MASTER_ADDR", address)
        monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "0")
    for rank in (0, 1, 7):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setattr("sys.argv", ["cuboid", f"--local_rank={rank}", "train", *arguments, "--steps=0"])
        with pytest.raises(SystemExit) as exit_:
            app()
        assert exit_.value.code == 1
        message = capsys.readouterr().err
        assert message == "cuboid: --steps is 0; it must be at least 1\n"


def _write_at_length(failing):
    launched_world._MEETING_S = 0.1
    rank, numbers = dist.get_rank(), rank_agreement._peers(None)._numbers
    met, written = numbers.get(MAIN_LANE, 0), []

    def write():
        # Each meeting has the whole timeout; the third is over.
        while numbers.get(MAIN_LANE, 0) < met + 4:
            time.sleep(0.01)
        if failing:
            raise CuboidError("nothing to write")
        written.append(rank)

    try:
        run_at_length(write if rank == 0 else None, World(rank, 2, rank), what="writing")
    except CuboidError as error:
        return str(error), error.rank
    return written


@pytest.mark.ci
def test_ranks_meet_again_and_again_while_one_still_works(pool):
    assert pool.run(2, _write_at_length, False) == [[0], []]
    assert pool.run(2, _write_at_length, True) == [("nothing to write", 0)] * 2


def test_a_trace_of_an_earlier_process_is_not_reported(tmp_path):
    (tmp_path / "step_1.json").write_text(json.dumps({"otherData": {"bubble": 0.5, "simulated_bubble": 0.4}}))
    asked = PipelineConfig(engine="seq1f1b", stages=1, trace=str(tmp_path), trace_step=1)
    pipeline = SimpleNamespace(layers=[1], segment_lengths=lambda length, accumulation: (length,))
    staging = SimpleNamespace(plan=SimpleNamespace(config=SimpleNamespace(pipeline=asked)))
    stage = SimpleNamespace(staging=staging)
    engine = SimpleNamespace(pipeline=pipeline, gradient_accumulation_steps=lambda: 1)
    assert pipeline_figures(stage, engine, 32, 1).trace.measured_bubble == 0.5
    assert pipeline_figures(stage, engine, 32, 0).trace is None


def test_without_a_launcher_the_world_is_one(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert World.from_environment() == World(rank=0, size=1, local_rank=0)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(CuboidError, match="WORLD_SIZE is ''"):
        World.from_environment()


def test_a_port_in_use_is_named(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(CuboidError, match=r"can't meet at 127\.0\.0\.1:\d+ .*--master_port"):
            World(rank=0, size=2, local_rank=0).connect()


class _Accelerator:
    """One of CUDA's, as far as it is asked before there is a process group."""

    def __init__(self, kind):
        self.kind = kind

    def device_name(self):
        return self.kind

    def current_device_name(self):
        return self.kind if self.kind == "cpu" else f"{self.kind}:1"

    def communication_backend_name(self):
        return "gloo" if self.kind == "cpu" else "nccl"

    def set_device(self, index):
        assert index == 1


@pytest.mark.parametrize(("kind", "bound"), [("cuda", torch.device("cuda", 1)), ("cpu", None)])
def test_the_process_group_is_bound_to_the_ranks_device_as_deepspeed_binds_it(monkeypatch, kind, bound):
    made = {}
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(launched_world, "get_accelerator", lambda: _Accelerator(kind))
    monkeypatch.setattr(launched_world, "await_all_ranks", lambda _: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: made.update(options, backend=backend))
    assert World(rank=3, size=4, local_rank=1).connect() == (bound or torch.device("cpu"))
    assert (made["device_id"], made["backend"]) == (bound, "nccl" if bound else "gloo")
    assert bound_device(torch.device("cuda", 0), 1) is None


def test_cuda_is_told_to_load_kernels_at_once_and_to_let_segments_grow_unless_the_user_has_said():
    environment = {}
    launched_world.set_cuda_defaults(environment)
    assert environment == {"CUDA_MODULE_LOADING": "EAGER", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    chosen = {"CUDA_MODULE_LOADING": "LAZY", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    environment = dict(chosen)
    launched_world.set_cuda_defaults(environment)
    assert environment == chosen


def test_the_report_round_trips_and_its_curve_is_a_picture(tmp_path):
    report = TrainReport(
        model="model",
        data="data",
        device="cpu",
        dtype="float32",
        world_size=2,
        mesh=MeshSizes(batch=1, sequence=2, hidden=1, data_parallel=1),
        steps=3,
        resumed_after=[1, 2],
        seed=0,
        sequence_length=8,
        micro_batch=1,
        gradient_accumulation=1,
        losses=Losses(first=3.0, last=1.0, heldout_first=3.0, heldout_last=1.5),
        speed=Speed(tokens=24, tokens_per_s=5.3, step_s=1.5, wall_s=20.0),
        parameters=20,
        memory_kind="resident set of the process",
        ranks=[
            RankFigures(stage=0, parameters=10, peak_memory_bytes=peak, sent_bytes_per_step={"sequence": 7})
            for peak in (100, 90)
        ],
        train_losses=[3.0, 2.0, 1.0],
        heldout_losses=[HeldoutPoint(step=0, loss=3.0), HeldoutPoint(step=3, loss=1.5)],
        config={},
        versions={},
    )
    assert TrainReport.model_validate_json(report.write(tmp_path).read_text()) == report
    draw(report, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_smoothing_averages_each_value_with_those_before():
    assert smooth(np.array([4.0, 2.0, 0.0, 6.0]), 2).tolist() == [4.0, 3.0, 1.0, 3.0]
