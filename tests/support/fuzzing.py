"""Make configs with one mistake each from valid ones, and try them through all public entry points."""

import base64
import copy
import json
import random
import string
import traceback
from dataclasses import dataclass
from pathlib import Path

import deepspeed
import torch
import yaml

import cuboid

MESH = {"batch": 1, "sequence": 1, "hidden": 1}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.1, "torch_adam": True}}
WARMUP = {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_num_steps": 2, "warmup_type": "linear"}}
DEEPSPEED = {
    "steps_per_print": 100,
    "wall_clock_breakdown": False,
    "data_types": {"grad_accum_dtype": "fp32"},
    "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False},
    "comms_logger": {"enabled": False, "verbose": False},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000000, "overlap_comm": False},
}


def bases(ranks):
    """Valid configs for that many ranks, by name."""
    mesh = {"mode": "3d_tensor", "mesh": {**MESH, "hidden": ranks}}
    pipeline = {"engine": "seq1f1b", "stages": ranks, "segments": 2, "partition": "even"}
    batch = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    return {
        "mesh": {**batch, "tensor_parallel": mesh, "optimizer": ADAMW, "gradient_clipping": 1.0},
        "pipeline": {**batch, "pipeline": pipeline, "optimizer": ADAMW, "scheduler": WARMUP, **DEEPSPEED},
        "both": {
            **batch,
            "tensor_parallel": {"mode": "3d_tensor", "mesh": MESH, "gather_logits": False},
            "pipeline": {**pipeline, "schedule": "seq1f1b", "kv_gradients": "fp32", "stage_balance": "layers"},
            "checkpoint": {"keep_last": 2, "verify": True, "tag_validation": "WARN"},
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1},
            "optimizer": ADAMW,
        },
    }


@dataclass(frozen=True)
class Case:
    """A config with one mistake, or what one must fear is one.

    Attributes:
        name: what was done to which key.
        source: a dict; or the name of a file and its bytes; or a string.
        wrong: whether it must be rejected; of other cases some are valid.
        key: that the error must name; None where there is none to name.
    """

    name: str
    source: object
    wrong: bool
    key: str | None = None


def paths_of(value, path=()):
    """Every key of a config; sections before their keys."""
    for key, item in value.items():
        yield (*path, key)
        if isinstance(item, dict):
            yield from paths_of(item, (*path, key))


def section_of(config, path):
    for key in path[:-1]:
        config = config[key]
    return config


#: Numbers that are invalid for every key.
IMPOSSIBLE = (float("nan"), float("inf"), float("-inf"), 10**30, -(10**30))
OTHERS = (
    None,
    7,
    -1,
    0,
    1.5,
    "x",
    "",
    "auto",
    [],
    [1, 2],
    {},
    {"a": 1},
    True,
    False,
    "1",
    1e300,
    10**12,
    [[[]]],
    ["x"],
)


def confuse(config, draw):
    path = draw.choice(list(paths_of(config)))
    section, value = section_of(config, path), draw.choice(OTHERS)
    section[path[-1]] = value
    return f"{'.'.join(path)} = {value!r}", False, None


def exaggerate(config, draw):
    numbers = [path for path in paths_of(config) if type(section_of(config, path)[path[-1]]) in (int, float)]
    path, value = draw.choice(numbers), draw.choice(IMPOSSIBLE)
    section_of(config, path)[path[-1]] = value
    return f"{'.'.join(path)} = {value!r}", True, ".".join(path)


def misspell(config, draw):
    path = draw.choice(list(paths_of(config)))
    section, key = section_of(config, path), path[-1]
    place = draw.randrange(len(key))
    wrong = draw.choice(
        [key[:place] + key[place + 1 :], key[:place] + key[place] + key[place:], key.upper(), f"{key}s"]
    )
    section[wrong] = section.pop(key)
    return f"{'.'.join(path)} -> {wrong}", True, wrong


def forget(config, draw):
    path = draw.choice(list(paths_of(config)))
    del section_of(config, path)[path[-1]]
    return f"without {'.'.join(path)}", False, None


def add(config, draw):
    sections = [config, *(s for p in paths_of(config) if isinstance(s := section_of(config, p)[p[-1]], dict))]
    key = "".join(draw.choices(string.ascii_lowercase, k=8))
    draw.choice(sections)[key] = draw.choice(OTHERS)
    return f"with {key}", True, key


MUTATIONS = (confuse, confuse, confuse, exaggerate, misspell, misspell, forget, add)


def written(config, form, draw):
    """The same config as a dict, a file or a string."""
    text = json.dumps(config, indent=1)
    if form == "json":
        return "config.json", text.encode()
    if form == "hjson":
        return "config.json", text.replace("{", "{ # a comment", 1).replace("\n}", ",\n}").encode()
    if form == "yaml":
        return "config.yaml", yaml.safe_dump(config).encode()
    return base64.urlsafe_b64encode(text.encode()).decode() if form == "base64" else config


def twice(config, draw):
    """A file with a duplicate key."""
    path = draw.choice(list(paths_of(config)))
    section, key = section_of(config, path), path[-1]
    section["TWICE"] = section[key]
    name, text = written(config, draw.choice(["json", "yaml"]), draw)
    return Case(f"{'.'.join(path)} twice, {name}", (name, text.replace(b"TWICE", key.encode())), True, key)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def broken(config, draw):
    """A file that can't be read, or that must be rejected."""
    text = json.dumps(config).encode()
    place = draw.randrange(1, len(text) - 1)
    files = {
        "cut off": ("config.json", text[: len(text) - 1]),
        "not UTF-8": ("config.json", text[:place] + b"\xff\xfe" + text[place:]),
        "UTF-16": ("config.json", text.decode().encode("utf-16")),
        "a list": ("config.json", b"[" + text + b"]"),
        "nested": ("config.json", text[:-1] + b', "x": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
        "nested yaml": ("config.yaml", text[:-1] + b', "x": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
        "bomb": ("config.yaml", yaml.safe_dump(config).encode() + BOMB.encode()),
        "endless": ("config.yaml", yaml.safe_dump(config).encode() + b"x: &x [*x]\n"),
        "python": ("config.yaml", yaml.safe_dump(config).encode() + b"x: !!python/object/apply:os.getcwd []\n"),
        "broken yaml": ("config.yaml", yaml.safe_dump(config).encode() + b"\t- : ]"),
        "numeric key": ("config.yaml", yaml.safe_dump(config).encode() + b"7: 8\n"),
        "many digits": ("config.json", text[:-1] + b', "x": ' + b"9" * 6000 + b"}"),
        "half of base64": ("", base64.urlsafe_b64encode(text[:place]).decode()),
        "no file": ("", "nowhere/config.json"),
        "a folder": ("", "."),
        "empty": ("config.json", b""),
        "a string with NUL": ("", "\0"),
        "long": ("", "x" * 10_000),
        "twice the world": {**config, "tensor_parallel": {"mode": "3d_tensor", "mesh": {**MESH, "batch": 7}}},
    }
    name = draw.choice(list(files))
    file = files[name]
    source = file if isinstance(file, dict) else file[1] if file[0] == "" else file
    return Case(name, source, True)


def cases(count, seed, ranks):
    """That many cases, always the same ones."""
    draw = random.Random(seed)
    for number in range(count):
        base, valid = draw.choice(list(bases(ranks).items()))
        config = copy.deepcopy(valid)
        kind = draw.random()
        if kind < 0.2:
            case = (twice if kind < 0.07 else broken)(config, draw)
        else:
            done, wrong, key = draw.choice(MUTATIONS)(config, draw)
            form = draw.choice(["dict", "dict", "json", "hjson", "yaml", "base64"])
            case = Case(f"{done}, {form}", written(config, form, draw), wrong, key)
        yield Case(f"{number}: {base}: {case.name}", case.source, case.wrong, case.key)


def source_of(case, folder):
    """What the user passes; a file is written into the folder."""
    if not isinstance(case.source, tuple):
        return case.source
    name, content = case.source
    path = Path(folder) / case.name.partition(":")[0] / name
    path.parent.mkdir()
    path.write_bytes(content)
    return str(path)


def attempt(source, checkpoint):
    """One optimizer step with a config: ("trained" | "rejected" | "crashed", message)."""
    try:
        model = cuboid.from_pretrained(checkpoint, source)
        engine, *_ = deepspeed.initialize(model=model, config=source)
        ids = torch.arange(engine.train_micro_batch_size_per_gpu() * 8).view(-1, 8) % 64
        batch = {"input_ids": ids, "labels": ids}
        if hasattr(engine, "train_batch"):
            engine.train_batch(iter([batch] * engine.gradient_accumulation_steps()))
        else:
            engine.backward(engine(**batch).loss)
            engine.step()
        return "trained", ""
    except cuboid.CuboidError as error:
        return "rejected", f"{type(error).__name__}: {error}"
    except Exception:
        return "crashed", traceback.format_exc()


def attempt_all(sources, checkpoint):
    """The result of each case on this rank."""
    return [attempt(source, checkpoint) for source in sources]


def faults(case, ranks):
    """A message if the ranks' results of a case are wrong; None if they are right."""
    first = ranks[0]
    if any(status == "crashed" for status, _ in ranks):
        return f"{case.name}: crashed: {next(text for status, text in ranks if status == 'crashed')}"
    if any(result != first for result in ranks):
        return f"{case.name}: ranks differ: {ranks}"
    status, message = first
    if case.wrong and status == "trained":
        return f"{case.name}: it was accepted"
    if case.wrong and case.key is not None and case.key.rpartition(".")[2] not in message:
        return f"{case.name}: {case.key} isn't named: {message}"
    return None
