"""The tables of certificates as people read them: docs/data/architectures.csv, and some in docs/architectures.md."""

from __future__ import annotations

from typing import Any

from cuboid.models.architectures.certificate import LABELLED
from generators.marked import table

Row = dict[str, str]
_CAUSAL = "causal language model"
#: Where a model's head runs on a mesh, by the name that the table of certificates has for it.
_HEAD = {"split": "split", "labels": "split; logits whole", "whole": "whole hidden states"}
#: What most people train, as model types and tasks; the page shows these alone.
_SHOWN = (
    *((name, _CAUSAL) for name in ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "glm4", "olmo2", "phi3")),
    *((name, _CAUSAL) for name in ("gpt2", "gpt_neox", "opt", "bloom", "falcon")),
    *((name, _CAUSAL) for name in ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe", "llama4_text")),
    *((name, _CAUSAL) for name in ("qwen3_next", "granitemoehybrid", "jamba", "mamba2")),
    *(("bert", task) for task in ("masked language model", "sequence classification")),
    *(("llama", task) for task in ("regression, rewards", "hidden states, pooled")),
    *((name, "sequence to sequence") for name in ("t5", "bart")),
    ("vit", "image classification"),
    *((name, "text with images") for name in ("llava", "gemma3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "paligemma")),
    *((name, "text with images") for name in ("idefics3", "smolvlm", "internvl", "mistral3", "llama4", "glm4v")),
)


def rows(pipelines: dict[str, Any], meshes: dict[str, Any]) -> list[Row]:
    """One for each architecture, variant of its config, and task."""
    return [*_causal_rows(pipelines, meshes), *_head_rows(pipelines, meshes)]


def _causal_rows(pipelines: dict[str, Any], meshes: dict[str, Any]) -> list[Row]:
    made = []
    types = sorted({name for entries in (pipelines, meshes) for name in (*entries["flavours"], *entries["rejected"])})
    for model_type in types:
        variants = {**meshes["flavours"].get(model_type, {}), **pipelines["flavours"].get(model_type, {})} or {"": ""}
        for variant in variants:
            row = _row(model_type, variant, _CAUSAL)
            staged, meshed = (_entry(entries, model_type, variant) for entries in (pipelines, meshes))
            row |= (
                {"why not in a pipeline": pipelines["rejected"].get(model_type, "")}
                if staged is None
                else _in_stages(staged)
            )
            row |= (
                {"why not on a mesh": meshes["rejected"].get(model_type, "")} if meshed is None else _on_a_mesh(meshed)
            )
            made.append({column: " ".join(cell.split()) for column, cell in row.items()})
    return made


def _head_rows(pipelines: dict[str, Any], meshes: dict[str, Any]) -> list[Row]:
    """Encoders, and heads for other tasks than causal language modelling."""
    made = []
    for model_type, heads in meshes["heads"].items():
        for task, key in heads.items():
            entry = meshes["architectures"][model_type][key]
            row = _row(model_type, "", task) | _on_a_mesh(entry)
            if row["mesh"] == "yes" and task != "hidden states, pooled":
                row["head on a mesh"] = _HEAD[entry.get("head", "split")]
            staged = pipelines["architectures"].get(model_type, {}).get(key)
            row["stages"] = "no" if staged is None or _whole_rows(staged, "whole") else "yes"
            # Positions see later ones, or the head looks at all of them.
            row["mesh and segments"] = "no"
            made.append({column: " ".join(cell.split()) for column, cell in row.items()})
    return made


def _row(model_type: str, variant: str, task: str) -> Row:
    """Of an architecture of which nothing is known to work; its keys are the table's columns, in order."""
    works = ("mesh", "stages", "segments", "mesh and stages", "mesh and segments")
    batches = ("any length", "left padding", "packed")
    notes = ("computed whole", "head on a mesh", "rejected on a mesh", "largest error on a mesh")
    reasons = ("why not in a pipeline", "why not on a mesh")
    names = {"architecture": model_type, "variant": variant, "task": task}
    return names | dict.fromkeys(works, "no") | dict.fromkeys((*batches, *notes, *reasons), "")


def _entry(entries: dict[str, Any], model_type: str, variant: str) -> dict[str, Any] | None:
    key = entries["flavours"].get(model_type, {}).get(variant)
    return None if key is None else entries["architectures"][model_type][key]


def _whole_rows(entry: dict[str, Any], mode: str) -> str:
    """Why even whole rows are wrong; empty if they are right."""
    return entry.get("obstacle") or entry["refused"].get(mode, {}).get("whole rows", "")


def _in_stages(entry: dict[str, Any]) -> Row:
    """What was seen of a pipeline."""
    reasons = {mode: _whole_rows(entry, mode) for mode in ("whole", "segments", "filled")}
    modes = dict(zip(("stages", "segments", "any length"), reasons.values(), strict=True))
    row = {column: "no" if reason else "yes" for column, reason in modes.items()}
    best = entry.get("refused", {}).get("whole" if reasons["segments"] else "segments", {})
    if row["stages"] == "yes":
        row["left padding"] = "no" if "padding on the left" in best else "yes"
        row["packed"] = "no" if "packed sequences" in best else "yes"
    return row | {"why not in a pipeline": reasons["whole"] or reasons["segments"]}


def _on_a_mesh(entry: dict[str, Any]) -> Row:
    """What was seen of meshes, and of a mesh in each stage."""
    reason = entry["refused"].get("whole rows")
    if reason is not None:
        return {"why not on a mesh": reason}
    blocks = ["layers" if name == "" else name for name in entry["blocks"]]
    # Labels in padding are refused wherever padding is.
    implied = {LABELLED[kind] for kind in LABELLED if kind in entry["refused"]}
    return {
        "mesh": "yes",
        "mesh and stages": "no" if "whole" in entry["with_stages"] else "yes",
        "mesh and segments": "no" if "segments" in entry["with_stages"] else "yes",
        "computed whole": ", ".join([*blocks, *(["around the layers"] if entry["splits_late"] else [])]),
        "rejected on a mesh": ", ".join(kind for kind in entry["refused"] if kind not in implied),
        "largest error on a mesh": f"{entry['error']:.0e}",
    }


def counts(known: list[Row]) -> str:
    """How many causal language models can do what."""
    causal = [row for row in known if row["task"] == _CAUSAL]

    def count(*columns: str, **values: str) -> int:
        wanted = {**dict.fromkeys(columns, "yes"), **{name.replace("_", " "): value for name, value in values.items()}}
        return len({row["architecture"] for row in causal if all(row[key] == value for key, value in wanted.items())})

    return (
        f"Of {count()} architectures of causal language models, {count('mesh')} are right on a mesh, "
        f"{count('mesh', computed_whole='')} of them with every block split; {count('stages')} in stages, "
        f"{count('segments')} of them with segments; {count('mesh', 'mesh and segments')} on a mesh and in a pipeline "
        "with segments at once. The others are rejected before weights are read."
    )


def common(known: list[Row]) -> str:
    """Table of the architectures that most people train, those with equal rows in one."""
    by_name = {(row["architecture"], row["task"]): row for row in known if not row["variant"]}
    columns = ("mesh", "computed whole", "stages", "segments", "mesh and stages", "mesh and segments", "packed")
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, task in _SHOWN:
        row = by_name[name, task]
        groups.setdefault((task, *(row[column] for column in columns)), []).append(f"`{name}`")
    lines = [[", ".join(names), *cells] for cells, names in groups.items()]
    return table(["architecture", "task", *columns], lines)
