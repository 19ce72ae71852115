"""The commands' errors for invalid values: one line, no traceback, and an exit status other than 0."""

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import typer.main
import yaml
from transformers import AutoConfig

from cuboid import CheckpointError
from cuboid.checkpoint.format.bounded_files import write_text
from cuboid.cli import app, commands
from cuboid.data.initial_model import train_tokenizer
from cuboid.verify import SmallModel
from launching import ROOT, finish, start
from warm_python import warm_python

SECTIONS = {
    "tensor_parallel": {"mode": "3d_tensor", "mesh": {}},
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}


#: typer builds all commands anew for each command line, which takes it longer than most of what is run here.
built_once = functools.cache(typer.main.get_command)


@pytest.fixture
def run_command(monkeypatch, capfd):
    """Runs a command line that must print nothing but errors; returns (exit status, stderr)."""
    monkeypatch.setattr("cuboid.library_warnings.quiet", lambda **_: None)  # it is for a process of its own
    monkeypatch.setattr("typer.main.get_command", built_once)
    monkeypatch.setattr("cuboid.requirements.check_installed", lambda: None)  # it has been called, and reads files
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["cuboid", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            app()
        printed = capfd.readouterr()
        assert printed.out == ""
        lines = [line for line in printed.err.splitlines(keepends=True) if "it/s]" not in line]
        return exit_.value.code, "".join(lines)

    return run


@pytest.mark.parametrize("name", ["train", "prepare"])
def test_each_option_is_on_its_page(name):
    page = (ROOT / "docs" / "train.md").read_text()
    parameters = built_once(commands).commands[name].params
    options = [parameter.opts[0] for parameter in parameters if not parameter.hidden]
    assert "--data" in options
    assert [option for option in options if option not in page] == []


#: Options of commands that have to be given, where a test has files by these names.
REQUIRED = {
    "train": ["--model", "model", "--data", "text.txt", "--config", "good.json", "--out", "out"],
    "plan": ["--model", "model", "--cluster", "8xH100", "--seq-len", 64, "--global-batch", 8],
    "estimate": ["--model", "model", "--config", "bf16.json", "--cluster", "8xH100", "--seq-len", 64],
}


def required(arguments):
    """The options of :data:`REQUIRED` without those that are given anyway."""
    options = REQUIRED.get(arguments[0], [])
    pairs = zip(options[::2], options[1::2], strict=True)
    return [part for name, value in pairs if name not in arguments for part in (name, value)]


@pytest.fixture
def files(tmp_path):
    """Paths by name: a config, malformed ones, a model's folder and a text."""
    SmallModel("llama").config().save_pretrained(tmp_path / "model")
    contents = {
        "good.json": json.dumps(SECTIONS),
        "bf16.json": json.dumps({**SECTIONS, "bf16": {"enabled": True}}),
        "pipeline.json": json.dumps({**SECTIONS, "pipeline": {"engine": "seq1f1b", "stages": 2}}),
        "list.json": "[]",
        "theirs.json": json.dumps({"train_batch_size": 2}),
        "null.yaml": yaml.safe_dump({**SECTIONS, "tensor_parallel": None}),
        "no_optimizer.json": json.dumps({key: SECTIONS[key] for key in SECTIONS if key != "optimizer"}),
        "misspelt.json": json.dumps({**SECTIONS, "optimiser": {}}),
        "text.txt": "a line\n" * 100,
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "bytes.json").write_bytes(b'{"a": "\xff"}')
    assert AutoConfig.from_pretrained(tmp_path / "model").model_type == "llama"
    return tmp_path


USAGE = [
    (["train", "--seed", "-1"], "--seed"),
    (["train", "--seed", "99999999999999999999"], "--seed"),
    (["train", "--steps", "many"], "--steps"),
    (["prepare", "--out", "o", "--seed", "-1"], "--seed"),
    (["prepare", "--out", "o", "--vocabulary", "1000000000"], "--vocabulary"),
    (["timeline", "--segments", "1000000"], "too many units"),
    (["timeline", "--stages", "0"], "--stages"),
    (["timeline", "--backward-ratio", "nan"], "--backward-ratio"),
    (["timeline", "--backward-ratio", "inf"], "--backward-ratio"),
    (["timeline", "--transfer", "1e308"], "--transfer"),
    (["timeline", "--durations", "1e-300,1,1"], "--durations"),
    (["profile", "--out", "profile.json", "--seconds", "inf"], "finite"),
    (["profile", "--out", "profile.json", "--seconds", "nan"], "--seconds"),
    (["convert", "a", "b", "--max-shard-size", "infGB"], "--max-shard-size"),
    (["convert", "a", "b", "--max-shard-size", "nanGB"], "--max-shard-size"),
    (["timeline", "--partition", "1,x"], "--partition"),
    (["timeline", "--seq-len", "8"], "--model"),
    (["verify", "--arch", "llama", "--mesh", "100x100x100"], "processes"),
    (["verify", "--arch", "llama", "--mesh", "1x1x1", "--data-parallel", "1000000"], "processes"),
    (["verify", "--arch", "llama", "--mesh", "1x1x1", "--tolerance", "nan"], "--tolerance"),
    (["verify", "--arch", "llama", "--mesh", "1x1x1", "--tolerance", "inf"], "finite"),
    (["verify", "--arch", "llama", "--mesh", "1x1x1", "--tolerance", "-1"], "--tolerance"),
    (["verify", "--arch", "llama", "--mesh", "1x1x1", "--timeout", "inf"], "finite"),
    (["verify", "--arch", "llama", "--mesh", "1x1x1", "--heads", "0"], "--heads"),
    (["verify", "--arch", "llama", "--mesh", "1x1x1", "--layers", "1000000"], "--layers"),
    (["verify", "--arch", "llama", "--mesh", "1x1x1", "--vocabulary", "0"], "--vocabulary"),
    (["verify", "--arch", "lama", "--mesh", "1x1x1"], "'--arch': 'lama' is no model type"),
    (["verify", "--arch", "llama", "--stages", "0"], "--stages"),
    (["convert", "a", "b", "--max-shard-size", "many"], "--max-shard-size"),
    (["convert", "a", "b", "--world-size", "2"], "--config"),
    (["convert", "a", "b", "--world-size", "-2", "--config", "c"], "--world-size"),
    (["plan", "--explain", "8x1x1", "1x8x1", "--out", "o"], "--explain"),
    (["inspect"], "DIR"),
    (["nonsense"], "nonsense"),
    (["train", "--nonsense"], "--nonsense"),
]


@pytest.mark.parametrize(("arguments", "word"), USAGE, ids=[" ".join(arguments) for arguments, _ in USAGE])
def test_values_out_of_range_are_usage_errors(run_command, tmp_path, monkeypatch, arguments, word):
    monkeypatch.chdir(tmp_path)
    status, message = run_command(arguments[0], *required(arguments), *arguments[1:])
    assert (status, message.count("\n")) == (2, 1), message
    assert word in message
    assert "Value error" not in message
    assert f"(see cuboid {'' if arguments[0] == 'nonsense' else f'{arguments[0]} '}--help)" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["chunks", "partition", "memory-limit", "durations", "stages"])
def test_a_number_of_thousands_of_digits_is_a_usage_error(run_command, tmp_path, monkeypatch, option):
    monkeypatch.chdir(tmp_path)
    status, message = run_command("timeline", f"--{option}", "1" * 5000)
    assert (status, message.count("\n")) == (2, 1), message
    assert f"--{option}" in message


MISTAKES = [
    (["train", "--config", "list.json"], "holds a list"),
    (["train", "--config", "bytes.json"], "isn't UTF-8"),
    (["train", "--config", "theirs.json"], "no key of Cuboid's"),
    (["train", "--config", "null.yaml"], "no key of Cuboid's"),
    (["train", "--config", "no_optimizer.json"], "optimizer is missing"),
    (["train", "--config", "misspelt.json"], 'did you mean "optimizer"'),
    (["train", "--config", "pipeline.json"], "doesn't divide the world of 1"),
    (["train", "--config", "nowhere.json"], "does not exist"),
    (["train", "--config", "good.json"], "--steps is missing"),
    (["train", "--config", "good.json", "--steps", "0"], "--steps is 0"),
    (["train", "--config", "good.json", "--steps", "1", "--keep-last", "0"], "--keep-last is 0"),
    (["train", "--config", "good.json", "--steps", "1", "--sequence-length", "1"], "--sequence-length is 1"),
    (["train", "--config", "good.json", "--steps", "1", "--save-every", "-1"], "--save-every is -1"),
    (["train", "--config", "good.json", "--steps", "1", "--evaluations", "-1"], "--evaluations is -1"),
    (["verify", "--model", "model", "--config", "list.json"], "holds a list"),
    (["verify", "--model", "model", "--config", "misspelt.json"], 'did you mean "optimizer"'),
    (["verify", "--arch", "llama", "--mesh", "1x0x1"], "mesh.sequence is 0"),
    (["verify", "--arch", "llama", "--mesh", "x"], "x"),
    (["verify", "--arch", "llama", "--mesh", "1x1x1", "--steps", "0"], "steps is 0"),
    (["verify", "--arch", "llama", "--mesh", "1x1x1", "--seq-len", "1"], "--seq-len is 1"),
    (["verify", "--arch", "llama", "--mesh", "1x1x1", "--heads", "3", "--kv-heads", "2"], "--kv-heads is 2"),
    (["verify", "--arch", "mamba", "--mesh", "1x1x1", "--heads", "8"], "--heads is 8; the config of mamba has no such"),
    (["verify", "--arch", "bert", "--mesh", "1x1x1", "--rope", "yarn"], "--rope: rope is 'yarn'; the config of bert"),
    (["verify", "--arch", "mistral", "--mesh", "1x1x1", "--bias"], "--bias is True; the config of mistral has no such"),
    (["verify", "--arch", "rag", "--mesh", "1x1x1"], "--arch: transformers has no model of 'rag'"),
    (["verify", "--arch", "llama", "--stages", "1", "--segments", "1000000"], "pipeline.segments"),
    (["verify", "--arch", "llama", "--segments", "2"], "--stages: pipeline.stages is missing"),
    (["verify", "--arch", "llama", "--stages", "2147483648"], "--stages: pipeline.stages: Input should be less"),
    (["timeline", "--partition", "0"], "--partition: pipeline.partition [0]"),
    (["plan", "--cluster", "2xZ80"], "--cluster: cluster '2xZ80': no profile of a GPU 'Z80'"),
    (["train", "--config", "no_optimizer.json", "--steps", "1"], "--config no_optimizer.json: optimizer is missing"),
    (["bench", "--model", "model", "--config", "no_optimizer.json"], "optimizer is missing"),
    (["bench", "--model", "model", "--config", "good.json", "--steps", "0"], "--steps is 0"),
    (["convert", "nowhere", "new"], "nowhere"),
    (["convert", "model", "new", "--model", "nowhere"], "nowhere: does not exist"),
    (["plan", "--model", "org/model"], "hf download org/model --local-dir model"),
    (["estimate", "--model", "nowhere/config.json"], "nowhere/config.json: does not exist"),
    (["estimate", "--config", "nowhere.json"], "does not exist"),
    (["estimate", "--cluster", "0xH100-80GB"], "has 0 GPUs"),
    (["estimate", "--config", "good.json"], "the config trains in float32"),
    (["timeline", "--model", "org/model", "--seq-len", "8"], "hf download org/model"),
    (["verify", "--model", "org/model", "--mesh", "1x1x1"], "hf download org/model"),
    (["bench", "--model", "org/model", "--config", "good.json"], "hf download org/model"),
    (["train", "--model", "org/model", "--steps", "1"], "hf download org/model"),
    (["prepare", "--out", "o", "--model", "org/model"], "hf download org/model"),
    (["prepare", "--out", "o", "--model", "model"], "no tokenizer that transformers can load; copy its files there"),
    (["prepare", "--out", "o", "--tokenizer", "nowhere"], "nowhere: does not exist"),
    (["train", "--steps", "1"], "copy its files there"),
    (["convert", "model", "new", "--config", "bytes.json"], "isn't UTF-8"),
    (["inspect", "nowhere"], "nowhere"),
    (["timeline", "--partition", "0,4"], "partition"),
    (["timeline", "--model", "model", "--seq-len", "4096"], "--seq-len is 4096, beyond the model's 256 positions"),
    (["plan", "--seq-len", "4096"], "4096, beyond the model's 256 positions"),
    (["plan", "--seq-len", "4096", "--goal", "fewest"], "4096, beyond the model's 256 positions"),
    (["estimate", "--seq-len", "4096"], "4096, beyond the model's 256 positions"),
    (["verify", "--model", "model", "--mesh", "1x1x1", "--seq-len", "4096"], "4096, beyond the model's 256 positions"),
    (["bench", "--model", "model", "--config", "good.json", "--seq-len", "4096"], "4096, beyond the model's 256 pos"),
    (["prepare", "--out", "o", "--vocabulary", "1"], "--vocabulary is 1"),
    (["prepare", "--out", "o", "--data", "nowhere"], "nowhere"),
]


@pytest.mark.parametrize(("arguments", "word"), MISTAKES, ids=[" ".join(arguments) for arguments, _ in MISTAKES])
def test_errors_are_one_line_without_a_traceback(run_command, files, monkeypatch, arguments, word):
    monkeypatch.chdir(files)
    status, message = run_command(arguments[0], *required(arguments), *arguments[1:])
    assert (status, message.count("\n")) == (1, 1), message
    assert word in message
    assert not (files / "out").exists()


def test_an_interrupted_command_says_so_in_one_line(run_command, files, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.chdir(files)
    monkeypatch.setattr("cuboid.planner.description.cluster.Cluster.parse", interrupt)
    assert run_command("plan", *required(["plan"])) == (130, "cuboid: interrupted\n")
    monkeypatch.setenv("RANK", "1")
    assert run_command("plan", *required(["plan"]))[1] == "", "rank 0 has said so"


def test_a_command_that_is_interrupted_while_it_imports_says_so_in_one_line():
    process = start(sys.executable, "-v", "-m", "cuboid.cli", *map(str, ["plan", *required(["plan"])]))
    assert any("'torch'" in line for line in process.stdout)
    process.send_signal(signal.SIGINT)
    status, output = finish(process, timeout_s=60)
    assert status == 130
    assert "cuboid: interrupted\n" in output
    assert "Traceback" not in output


OUTPUTS = [
    ["plan", "--out"],
    ["plan", "--json"],
    ["estimate", "--json"],
    ["estimate", "--picture"],
    ["estimate", "--timeline"],
    ["timeline", "--output"],
    ["timeline", "--json"],
    ["verify", "--arch", "llama", "--mesh", "1x1x1", "--json"],
    ["bench", "--model", "model", "--config", "good.json", "--json"],
    ["profile", "--out"],
]


@pytest.mark.parametrize("arguments", OUTPUTS, ids=" ".join)
def test_outputs_are_checked_before_anything_is_computed(run_command, files, monkeypatch, arguments):
    monkeypatch.chdir(files)
    suffix = ".png" if arguments[-1] in ("--picture", "--timeline", "--output") else ".json"
    (files / f"folder{suffix}").mkdir()
    for path, word in ((f"text.txt/a{suffix}", "text.txt is a file"), (f"folder{suffix}", "it is a folder")):
        status, message = run_command(arguments[0], *required(arguments), *arguments[1:], path)
        assert (status, message.count("\n")) == (1, 1), message
        assert word in message


@pytest.mark.parametrize(
    ("command", "options", "word"),
    [
        ("plan", ["--out", "a.json", "--json", "./a.json"], "another result goes there"),
        ("estimate", ["--json", "bf16.json"], "it is what this command reads"),
        ("timeline", ["--model", "model", "--seq-len", 64, "--json", "model/config.json"], "what this command reads"),
    ],
)
def test_a_result_replaces_neither_another_one_nor_what_is_read(
    run_command, files, monkeypatch, command, options, word
):
    monkeypatch.chdir(files)
    before = contents_of(files)
    status, message = run_command(command, *required([command]), *options)
    assert (status, message.count("\n")) == (1, 1), message
    assert word in message
    assert contents_of(files) == before


@pytest.mark.parametrize("options", [["--mesh", "²x1x1"], ["--stages", 2, "--partition", "²,2"]], ids=str)
def test_digits_that_are_no_numbers_are_refused(run_command, options):
    status, message = run_command("verify", "--arch", "llama", *options)
    assert (status, message.count("\n")) == (1, 1), message


def test_what_an_encoding_lacks_is_escaped(tmp_path):
    SmallModel("llama").write(tmp_path / "model")
    folder = (tmp_path / "model").rename(tmp_path / os.fsdecode(b"m\xffodel \xc3\xa9"))
    for options in ([], ["--json"]):
        process = start(warm_python(), "-m", "cuboid.cli", "inspect", folder, *options, PYTHONIOENCODING="ascii")
        status, output = finish(process, timeout_s=60)
        assert status == 0, output
        assert "Traceback" not in output
        assert r"m\udcffodel" in output
    assert json.loads(output)["path"] == str(folder)


# --- paths that can't be used ---------------------------------------------------------------------------------------

#: Command lines that would work.
WORKING = {
    "train": "--model model --data text --config good.json --out out --steps 1",
    "train new": "--arch-config model/config.json --tokenizer model --data text --config good.json --out out --steps 1",
    "prepare": "--model model --data text --out out",
    "prepare new": "--tokenizer model --data text --out out",
    "convert": "model new --max-shard-size 1GB",
    "convert ranks": "--input_folder model --output_folder new --config good.json --model model",
    "verify": "--model model --config good.json --json out.json",
    "estimate": "--model model --config bf16.json --cluster 8xH100 --seq-len 64 --json a.json --picture a.png",
    "plan": "--model model --cluster 8xH100 --seq-len 64 --global-batch 8 --out a.json --json b.json",
    "timeline": "--output a.png --json a.json",
    "timeline of": "--output a.png --model model --seq-len 64",
    "profile": "--out a.json",
    "bench": "--model model --config good.json --json a.json",
    "inspect": "model",
}
#: Options, or words for arguments, that take a path: of a file or folder that is read or written.
TAKES = {
    "reads a folder": ("train --model", "train new --tokenizer", "prepare --model", "prepare new --tokenizer",
                       "convert SRC", "convert ranks --input_folder", "verify --model", "bench --model", "inspect DIR"),
    "reads a file": ("train --config", "convert ranks --config", "verify --config", "estimate --config",
                     "estimate --cluster", "plan --cluster", "bench --config"),
    "reads either": ("train --data", "train new --arch-config", "prepare --data", "convert ranks --model",
                     "estimate --model", "plan --model", "timeline of --model"),
    "writes a folder": ("train --out", "prepare --out", "convert DST", "convert ranks --output_folder"),
    "writes a file": ("verify --json", "estimate --json", "estimate --picture", "estimate --timeline", "plan --out",
                      "plan --json", "timeline --output", "timeline --json", "profile --out", "bench --json"),
}  # fmt: skip
#: What can be wrong with such a path.
WRONG = {
    "reads a folder": ("missing", "file", "empty folder", "pipe", "loop", "long", "device", "below a file"),
    "reads a file": ("missing", "full folder", "empty file", "pipe", "loop", "long", "device", "below a file"),
    "reads either": ("missing", "empty file", "empty folder", "pipe", "loop", "long", "device", "below a file"),
    "writes a folder": (
        "file",
        "pipe",
        "loop",
        "dangling",
        "long",
        "device",
        "below a file",
        "no file system",
        "read-only",
    ),
    "writes a file": ("full folder", "socket", "loop", "long", "below a file", "no file system", "read-only"),
}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A folder in which :data:`WORKING` would work."""
    folder = tmp_path_factory.mktemp("job")
    SmallModel("llama", vocabulary=300).write(folder / "model")
    texts = [f"def function_{n}(x):\n    return x * {n}\n" for n in range(20)]
    train_tokenizer(texts, 300).save_pretrained(folder / "model")
    (folder / "text").write_text("".join(texts))
    (folder / "good.json").write_text(json.dumps(SECTIONS))
    (folder / "bf16.json").write_text(json.dumps({**SECTIONS, "bf16": {"enabled": True}}))
    return folder


def make_wrong(folder, name, kind):
    """Put something at a path, or choose one; returns the path for the command line."""
    path = folder / name
    if kind in ("file", "empty file"):
        path.write_text("mine" if kind == "file" else "")
    elif kind in ("full folder", "empty folder"):
        path.mkdir()
        if kind == "full folder":
            (path / "mine").touch()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as opened, contextlib.chdir(folder):
            opened.bind(name)
    elif kind in ("loop", "dangling"):
        path.symlink_to(name if kind == "loop" else "nowhere")
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "long":
        return "x" * 300 + path.suffix
    elif kind == "below a file":
        return f"text/{name}"
    elif kind in ("no file system", "read-only"):
        return f"/{'proc' if kind == 'no file system' else 'sys'}/{name}"
    return name


PLACES = [(place, takes) for takes, places in TAKES.items() for place in places]


@pytest.mark.parametrize(("place", "takes"), PLACES, ids=[place for place, _ in PLACES])
def test_a_path_that_cannot_be_used_is_blamed_on_its_option(run_command, job, tmp_path, monkeypatch, place, takes):
    line, _, option = place.rpartition(" ")
    suffix = {"--picture": ".png", "--output": ".png", "--timeline": ".png"}.get(option, ".json")
    for kind in WRONG[takes]:
        folder = tmp_path / kind
        shutil.copytree(job, folder)
        monkeypatch.chdir(folder)
        path = make_wrong(folder, "bad" if "folder" in takes else f"bad{suffix}", kind)
        options = WORKING[line].split()
        if not option.startswith("-"):
            options[option == "DST"] = path
        elif option in options:
            options[options.index(option) + 1] = path
        else:
            options += [option, path]
        before = contents_of(folder)
        status, message = run_command(line.split()[0], *options)
        assert (status, message.count("\n")) == (1, 1), (kind, message)
        assert re.match(rf"cuboid: {option}\b|cuboid: .* {option} takes", message), (kind, message)
        assert path[:80] in message, (kind, message)
        assert contents_of(folder) == before, kind


def contents_of(folder):
    """The bytes of each file in a folder; what isn't a file as its kind."""
    paths = [*folder.rglob("*")]
    return {
        path: path.lstat().st_mode if path.is_symlink() or not path.is_file() else path.read_bytes() for path in paths
    }


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("prepare", "--out", ""), "--out"),
        (("prepare", "--data", "text.txt", "--out="), "--out"),
        (("train", "--steps=", "--out", "o"), "--steps"),
        (("convert", "model", ""), "DST"),
        (("convert", "--input-folder", "", "new"), "--input_folder"),
    ],
)
def test_an_empty_value_is_not_the_current_folder(run_command, files, monkeypatch, arguments, name):
    monkeypatch.chdir(files)
    before = contents_of(files)
    expected = f"cuboid: Invalid value for {name}: is empty (see cuboid {arguments[0]} --help)\n"
    assert run_command(*arguments) == (2, expected)
    assert contents_of(files) == before


def test_results_go_into_a_pipe_only_if_somebody_reads_them(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    write = functools.partial(write_text, pipe)
    with pytest.raises(CheckpointError, match="pipe: can't be written: nobody reads from this pipe"):
        write("a")
    text = "words " * 50_000
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    # With another writer, the reader waits for what comes.
    with ThreadPoolExecutor() as threads, open(reader) as file, open(pipe, "w"):
        read = threads.submit(file.read, len(text))
        write(text)
        assert read.result() == text
