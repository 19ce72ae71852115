"""Damage checkpoints and models in many ways, and see how every reader reacts."""

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import struct
import tempfile
from collections import Counter
from pathlib import Path

import torch

import cuboid
from converting import layout_section, run
from cuboid.checkpoint.format.manifest import MANIFEST, Manifest, record_of, with_checksum
from cuboid.config.schema import parse_config
from cuboid.convert.inspection import inspect_checkpoint
from cuboid.convert.sources import find_checkpoint
from cuboid.data.initial_model import train_tokenizer
from cuboid.data.tokenizer_files import load_tokenizer
from cuboid.errors import CuboidError
from training import make_engine, settings, train

#: Time limit of a reader, which takes a fraction of a second on an idle machine.
LIMIT_S = 60
STATE, INDEX, CONFIG = "state.json", "model.safetensors.index.json", "config.json"


@dataclasses.dataclass(frozen=True)
class Damage:
    """What is done to a file.

    ``sealed`` damages come with a manifest that says the same, as a forger would make it.
    """

    name: str
    kind: str
    apply: object
    sealed: bool = False


# --- kinds of damages ----------------------------------------------------------------------------------------------


def flip(chance):
    place, bit = chance.random(), 1 << chance.randrange(8)

    def apply(path):
        content = bytearray(path.read_bytes())
        content[int(place * len(content))] ^= bit
        path.write_bytes(content)

    return apply


def cut(share):
    return lambda path: os.truncate(path, int(path.stat().st_size * share))


def lengthen(path):
    with open(path, "ab") as file:
        file.write(b" ")


def replace_by(make):
    def apply(path):
        path.unlink()
        make(path)

    return apply


def text(change):
    return lambda path: path.write_bytes(change(path.read_bytes()))


def document(change):
    """Change a JSON document by its values."""

    def apply(path):
        content = json.loads(path.read_bytes())
        change(content)
        path.write_text(json.dumps(content))

    return apply


def header(change):
    """Change the header of a safetensors file."""

    def apply(path):
        content = path.read_bytes()
        length = struct.unpack("<Q", content[:8])[0]
        entries = json.loads(content[8 : 8 + length])
        new = change(entries)
        new = (json.dumps(entries) if new is None else new).encode()
        path.write_bytes(struct.pack("<Q", len(new)) + new + content[8 + length :])

    return apply


def first(entries):
    return next(entry for name, entry in entries.items() if name != "__metadata__")


KINDS = {
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "loop": lambda path: path.symlink_to(path.name),
    "nowhere": lambda path: path.symlink_to("nowhere"),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "missing": lambda path: None,
}
JSON = {
    "no UTF-8": text(lambda content: content[:30] + b"\xff\xfe" + content[30:]),
    "deep": text(lambda content: b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "deeper than is read": text(lambda content: b'{"a": ' + b"[" * 400 + b"]" * 400 + b"}"),
    "huge": text(lambda content: b"[" + b"0," * 9_000_000 + b"0]"),
    "list": text(lambda content: b"[" + content + b"]"),
    "null": text(lambda content: b"null"),
    "no JSON": text(lambda content: b"{"),
    "key twice": text(lambda content: content.rstrip().removesuffix(b"}") + b', "config": 1, "config": 1}'),
}
HEADERS = {
    "negative shape": header(lambda x: first(x).update(shape=[-1])),
    "NaN shape": header(lambda x: first(x).update(shape=[float("nan")])),
    "huge shape": header(lambda x: first(x).update(shape=[2**40, 2**40])),
    "huge and none": header(lambda x: first(x).update(shape=[0, 2**70], data_offsets=[0, 0])),
    "many dims": header(lambda x: first(x).update(shape=[1] * 100_000)),
    "true": header(lambda x: first(x).update(shape=[True])),
    "dtype": header(lambda x: first(x).update(dtype="|O")),
    "offsets": header(lambda x: first(x).update(data_offsets=[-8, 2**63])),
    "offsets of three": header(lambda x: first(x).update(data_offsets=[0, 1, 2])),
    "offsets overlap": header(lambda x: first(x).update(data_offsets=[0, 4])),
    "metadata": header(lambda x: x.update(__metadata__={"format": 7})),
    "list": header(lambda x: "[" * 50_000),
    "twice": header(lambda x: json.dumps(x)[:-1] + ', "x": {}, "x": {}}'),
    "length": text(lambda content: b"\xff" * 8 + content[8:]),
}


def mark(name, inner):
    return document(lambda x: x["client"].update(forged={f"${name}": inner}))


ARRAY = {"bytes": "client.array", "dtype": "<i8", "shape": [4]}
STATES = {
    "objects": mark("array", {**ARRAY, "dtype": "|O"}),
    "fields of objects": mark("array", {**ARRAY, "dtype": "O,i8"}),
    "pointers": mark("array", {**ARRAY, "dtype": "|V8"}),
    "sub-array": mark("array", {**ARRAY, "dtype": "(1000000000,)i8"}),
    "negative shape": mark("array", {**ARRAY, "shape": [-4]}),
    "NaN shape": mark("array", {**ARRAY, "shape": [float("nan")]}),
    "huge shape": mark("array", {**ARRAY, "shape": [2**62, 2**62]}),
    "too long": mark("array", {**ARRAY, "shape": [400]}),
    "empty texts": mark("array", {**ARRAY, "dtype": "<U0", "shape": [10**15]}),
    "twice": mark("tuple", [{"$array": ARRAY}, {"$array": ARRAY}]),
    "unknown": mark("object", 1),
    "quantized": mark("raw", {**ARRAY, "dtype": "qint8"}),
    "function": mark("dtype", "load"),
    "text for a tuple": mark("tuple", "abc"),
    "lists for keys": mark("dict", [[[], 1]]),
    "no such tensor": mark("tensor", "../model.safetensors"),
    "quantity elsewhere": document(lambda x: x["optimizer"].update(quantities=["../../b/exp_avg"])),
    "quantity NUL": document(lambda x: x["optimizer"].update(quantities=["exp_avg\0"])),
    "numbers": document(lambda x: x["optimizer"].update(numbers={"a": {"exp_avg": [1]}})),
    "steps": document(lambda x: x["steps"].update(optimizer="many")),
    "no steps": document(lambda x: x.pop("steps")),
    "no random": document(lambda x: x.update(random=[])),
    "place of NumPy": document(lambda x: x["random"][0]["state"]["numpy"]["$tuple"].__setitem__(2, 10**6)),
    "place in the mesh": document(lambda x: x["random"][0].update(mesh=10**12)),
}
CONFIGS = {
    "layers": document(lambda x: x.update(num_hidden_layers=10**9)),
    "fewer layers": document(lambda x: x.update(num_hidden_layers=1)),
    "no layers": document(lambda x: x.update(num_hidden_layers=-1)),
    "layers in words": document(lambda x: x.update(num_hidden_layers="two")),
    "width": document(lambda x: x.update(hidden_size=10**15)),
    "NaN": document(lambda x: x.update(vocab_size=float("nan"))),
    "type": document(lambda x: x.update(model_type={"a": 1})),
    "other type": document(lambda x: x.update(model_type="llamma")),
    "activation": document(lambda x: x.update(hidden_act="sihu")),
    "heads": document(lambda x: x.update(num_attention_heads=0)),
}


def forged(change):
    """Change a manifest, and its checksum of itself accordingly."""

    def apply(path):
        content = json.loads(path.read_bytes())
        del content["sha256"]
        change(content)
        path.write_bytes(with_checksum(content))

    return apply


MANIFESTS = {
    "outside": forged(lambda x: x["files"].update({"../a": x["files"][STATE]})),
    "absolute": forged(lambda x: x["files"].update({"/etc/passwd": x["files"][STATE]})),
    "NUL": forged(lambda x: x["files"].update({"a\0b": x["files"][STATE]})),
    "surrogate": forged(lambda x: x["files"].update({"\ud800": x["files"][STATE]})),
    "of another format": forged(lambda x: x.update(format=2)),
    "bytes": forged(lambda x: x["files"][STATE].update(bytes=float("nan"))),
    "bytes in words": forged(lambda x: x["files"][STATE].update(bytes=str(x["files"][STATE]["bytes"]))),
    "step": document(lambda x: x.update(step=99)),
    "a file less": document(lambda x: x["files"].pop(CONFIG)),
}


def first_file(index):
    return min(index["weight_map"].values())


INDICES = {
    "outside": document(lambda x: x["weight_map"].update(a="../a.safetensors")),
    "parent": document(lambda x: x["weight_map"].update(a="..")),
    "nothing": document(lambda x: x["weight_map"].update(a="")),
    "number": document(lambda x: x["weight_map"].update(a=3)),
    "NUL": document(lambda x: x["weight_map"].update(a="a\0")),
    "no map": document(lambda x: x.pop("weight_map")),
    "another file": document(lambda x: x.update(weight_map=dict.fromkeys(x["weight_map"], first_file(x)))),
}


def damages_of(folder, other, chance, *, flips, forged):
    """Damages to every file of a folder, including its replacement by another folder's file with other contents."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    for name in names:
        for number in range(flips):
            yield Damage(name, f"flip {number}", flip(chance))
        for share in (0.0, 0.5, 0.999):
            yield Damage(name, f"cut to {share}", cut(share))
        yield Damage(name, "lengthened", lengthen)
        kind = chance.choice(sorted(KINDS))
        yield Damage(name, kind, replace_by(KINDS[kind]))
        old = other / name if other is not None else None
        if old is not None and old.is_file() and old.read_bytes() != (folder / name).read_bytes():
            yield Damage(name, "exchanged", lambda path, old=old: shutil.copyfile(old, path))
    if forged:
        yield from forgeries(names)


def forgeries(names):
    tensors = next(name for name in names if "/" not in name and name.endswith(".safetensors"))
    tables = {CONFIG: {**JSON, **CONFIGS}, tensors: HEADERS, INDEX: {**JSON, **INDICES}, STATE: {**JSON, **STATES}}
    tables["tokenizer.json"] = {name: JSON[name] for name in ("no UTF-8", "deep", "huge", "null", "no JSON")}
    for name, table in tables.items():
        if name in names:
            for kind, apply in table.items():
                yield Damage(name, kind, apply, sealed=True)
    if MANIFEST in names:
        for kind, apply in {**JSON, **MANIFESTS}.items():
            yield Damage(MANIFEST, kind, apply)


def seal(folder):
    """Forge the manifest so that it matches the damaged files."""
    if not (folder / MANIFEST).is_file():
        return
    manifest = Manifest.read(folder)
    records = {name: record_of(folder / name) for name in manifest.files}
    manifest.model_copy(update={"files": records}).write(folder)


# --- readers -------------------------------------------------------------------------------------------------------


def contents(folder):
    """Everything in a folder, with its path removed."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items()}


def converted(folder, **options):
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "target"
        output = run(folder, target, **options)
        assert any(line.startswith("checked: ") for line in output)
        return contents(target)


def inspected(folder):
    inspection = inspect_checkpoint(find_checkpoint(folder), verify=True)
    if inspection.faults:
        raise CuboidError("; ".join(inspection.faults))
    return {"shown": inspection.model_dump_json(exclude={"path"})}


def loaded(folder):
    model = cuboid.from_pretrained(folder, settings("1x1x1"))
    return {**model.state_dict(), "config": model.config.to_json_string()}


def resumed(engine):
    def read(folder):
        engine.load_checkpoint(folder)
        moments = engine.optimizer.optimizer.state.values()
        state = {f"moment {i} {k}": v for i, slots in enumerate(moments) for k, v in slots.items()}
        return {**engine.module.state_dict(), **state, "steps": engine.global_steps, "rng": torch.get_rng_state()}

    return read


def tokenized(folder):
    return {"vocabulary": str(sorted(load_tokenizer(folder).get_vocab().items()))}


def same(one, other):
    if one.keys() != other.keys():
        return False
    return all(torch.equal(x, other[k]) if isinstance(x, torch.Tensor) else x == other[k] for k, x in one.items())


@contextlib.contextmanager
def limited():
    """Ends readers that take too long, which counts as a crash."""

    def end(*_):
        raise TimeoutError(f"took more than {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def answer(read, folder, expected, detectable):
    """How a reader reacts to a damaged folder.

    "rejected" with an error that names the folder; "unused" if it reads the same as before; "undetectable" if it reads
    other values, which only a checksum could reveal; anything else is wrong.
    """
    try:
        with limited():
            state = read(folder)
    except CuboidError as error:
        return "rejected" if folder.name in str(error) else f"rejected without a name: {error}"
    except BaseException as error:
        return f"crashed: {type(error).__name__}: {str(error)[:300]}"
    if same(state, expected):
        return "unused"
    return "accepted" if detectable else "undetectable"


# --- the sweep -----------------------------------------------------------------------------------------------------


def write_checkpoints(path, root):
    """Two checkpoints of a run, with arrays in their client state, in files of weights with an index."""
    config = settings("1x1x1", bf16=True, max_file_bytes=20_000)
    engine = make_engine(path, config)
    for _ in range(2):
        train(engine, 1)
        engine.save_checkpoint(root, client_state={"array": torch.arange(4).numpy(), "array twice": torch.arange(4)})
    return engine


def prepare(path, root):
    """Folders of each form: checkpoints, a plain model in one file and in several, per-rank files."""
    train_tokenizer(["def f(x): return x"] * 9, 131).save_pretrained(path)
    engine = write_checkpoints(path, root / "run")
    newest = root / "run" / "global_step2"
    run(newest, root / "plain")
    run(newest, root / "several", max_shard_bytes=20_000)
    run(newest, root / "ranks", config=parse_config(layout_section("1x1x1")))
    run(root / "run" / "global_step1", root / "ranks before", config=parse_config(layout_section("1x1x1")))
    resume = resumed(engine)
    weights = {"convert": converted, "inspect": inspected, "load": loaded}
    masters = {"masters": lambda folder: converted(folder, master=True), "resume": resume}
    return [
        (newest, root / "run" / "global_step1", {**weights, **masters, "tokenizer": tokenized}),
        (root / "plain", None, {**weights, "tokenizer": tokenized}),
        (root / "several", None, weights),
        (root / "ranks", root / "ranks before", weights),
    ]


def is_detectable(damage, reader, recorded):
    """Whether a reader can detect a damage: it can't for values without a checksum, or with a forged one."""
    if damage.sealed:
        # These readers only copy or show the file, without building a model from it.
        return not (damage.name == CONFIG and damage.kind in CONFIGS and reader not in ("load", "resume"))
    return recorded or not damage.kind.startswith(("flip", "lengthened", "cut to 0.999", "missing"))


def sweep(path, root, seed, flips, share):
    """Counts of answers by form of the folder, and all wrong answers.

    Args:
        path: of a model.
        root: for everything that is written.
        seed: of the damages.
        flips: bits to flip in each file, one at a time.
        share: of the damages that are tried.
    """
    model_folder = Path(root) / "model"
    shutil.copytree(path, model_folder)
    chance, counts, wrong = random.Random(seed), Counter(), []
    for folder, other, readers in prepare(model_folder, Path(root)):
        expected = {name: read(folder) for name, read in readers.items()}
        recorded = (folder / MANIFEST).exists() or (folder / "shards.json").exists()
        for damage in damages_of(folder, other, chance, flips=flips, forged=True):
            if chance.random() > share:
                continue
            counts[folder.name, "damages"] += 1
            place = Path(root) / "damaged" / folder.name
            shutil.copytree(folder, place)
            damage.apply(place / damage.name)
            if damage.sealed:
                with contextlib.suppress(CuboidError, OSError):
                    seal(place)
            answers = {
                name: answer(read, place, expected[name], is_detectable(damage, name, recorded))
                for name, read in readers.items()
            }
            shutil.rmtree(place)
            counts.update((folder.name, result.partition(":")[0]) for result in answers.values())
            fine = {"rejected", "unused", "undetectable"}
            bad = {name: result for name, result in answers.items() if result not in fine}
            if bad:
                wrong.append((folder.name, damage.name, damage.kind, bad))
    return dict(counts), wrong
