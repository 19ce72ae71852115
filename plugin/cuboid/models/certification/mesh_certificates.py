"""The verdict on an architecture and its config on meshes, and the parallel plan that follows from it.

As for pipelines (:mod:`.certificates`), it comes from the table that ships with Cuboid, from this machine's cache, or
from a probe, which takes seconds.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

from transformers import PretrainedConfig, PreTrainedModel

from cuboid.config.schema import PipelineConfig
from cuboid.distributed.mesh import current_rank
from cuboid.distributed.topology import MeshShape
from cuboid.errors import UnsupportedModelError
from cuboid.models.architectures.certificate import MODES, HeadPlan, Inputs, MeshVerdict, Mode, words_of_changes
from cuboid.models.attention.interface import check_model_options
from cuboid.models.certification.certificates import KINDS, Question
from cuboid.models.certification.mesh_check import check_meshes
from cuboid.models.kinds.probe_rows import CannotProbe
from cuboid.models.sharded.parallel_plan import ParallelPlan, make_parallel_plan

MESH_TABLE = Path(__file__).with_name("certified_meshes.json")
_logger = logging.getLogger(__name__)
_FOLDER = "mesh_certificates"
#: Fields of a verdict that are written only if they differ from their defaults, and their valid values.
_NEWER: dict[str, tuple[Any, ...]] = {
    "inputs": get_args(Inputs),
    "head": get_args(HeadPlan),
    "counts_items": (True, False),
    "token_types": (True, False),
}
_PLAIN = MeshVerdict()


def certified_plan(
    model: PreTrainedModel,
    mesh: MeshShape,
    cls: type[PreTrainedModel] | None = None,
    pipeline: PipelineConfig | None = None,
) -> ParallelPlan:
    """Make a model's parallel plan for a mesh, if its architecture is right there.

    Args:
        model: on any device, meta included.
        mesh: its shape.
        cls: the architecture's class, if the model's is derived from it.
        pipeline: the config's section about stages.

    Raises:
        UnsupportedModelError: it isn't right or can't be probed.
        MeshError: the mesh doesn't divide the model; names what, and the nearest meshes that do.
    """
    cls = cls or type(model)
    check_model_options(model.config)
    verdict = mesh_verdict(cls, model.config)
    mode: Mode | None = None
    if pipeline is not None and mesh.size > 1:
        mode = "whole" if pipeline.segments == 1 else "segments"
    verdict.check_model(cls.__name__, mode)
    if verdict.blocks and mesh.of("sequence", "hidden") > 1 and current_rank() == 0:
        names = ", ".join(name or "the whole layer" for name in verdict.blocks)
        _logger.warning(
            "%s: of each layer, %s has no rule and is computed by each of the %d ranks of sequence × hidden. A mesh of "
            "a batch axis alone computes nothing twice",
            cls.__name__,
            names,
            mesh.of("sequence", "hidden"),
        )
    return make_parallel_plan(model, mesh, verdict)


def mesh_verdict(cls: type[PreTrainedModel], config: PretrainedConfig) -> MeshVerdict:
    """The verdict on a class with a config; the probe runs if it isn't known yet.

    Raises:
        UnsupportedModelError: no small model of it can be run.
    """
    try:
        question = Question.of(cls, config, _FOLDER)
    except CannotProbe as error:
        raise _cannot_probe(cls, str(error)) from error
    known = question.known(MESH_TABLE)
    if known is not None:
        return read_verdict(known)
    outcome = _found(question)
    if isinstance(outcome, MeshVerdict):
        return replace(outcome, changes=question.code.changes)
    raise _cannot_probe(cls, outcome, question.code.changes)


def _cannot_probe(cls: type[PreTrainedModel], obstacle: str, changes: tuple[str, ...] = ()) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{cls.__name__} can't be probed before its weights are read: {obstacle}{words_of_changes(changes)}. So "
        "nothing shows that it would be right on a mesh; train it without the section tensor_parallel"
    )


# As for pipelines, in this process, too.
@cache
def _found(question: Question) -> MeshVerdict | str:
    """The verdict, or why there is none."""
    return question.answer(lambda: _find_out(question.cls, question.config), _read, _written)


def _find_out(cls: type[PreTrainedModel], config: PretrainedConfig) -> MeshVerdict | str:
    try:
        return check_meshes(cls, config)
    except CannotProbe as error:
        return str(error)


def _written(outcome: MeshVerdict | str) -> dict[str, Any]:
    return {"obstacle": outcome} if isinstance(outcome, str) else written_verdict(outcome)


def _read(entry: Any) -> MeshVerdict | str:
    return str(entry["obstacle"]) if "obstacle" in entry else read_verdict(entry)


def written_verdict(verdict: MeshVerdict) -> dict[str, Any]:
    """A verdict as an entry of the table or the cache."""
    return {
        "refused": verdict.refused,
        "whole": list(verdict.whole_blocks),
        "splits_late": verdict.splits_late,
        "gathers_logits": verdict.gathers_logits,
        "with_stages": verdict.with_stages,
        "error": verdict.error,
        "blocks": list(verdict.blocks),
        **{name: getattr(verdict, name) for name in _NEWER if getattr(verdict, name) != getattr(_PLAIN, name)},
    }


def read_verdict(entry: Any) -> MeshVerdict:
    """The inverse of :func:`written_verdict`.

    Raises:
        ValueError, KeyError, TypeError: the entry isn't what that writes.
    """
    refused = {kind: str(entry["refused"][kind]) for kind in KINDS if kind in entry["refused"]}
    stages = {mode: str(entry["with_stages"][mode]) for mode in MODES if mode in entry["with_stages"]}
    if len(refused) != len(entry["refused"]) or len(stages) != len(entry["with_stages"]):
        # What isn't known must not be taken for what isn't refused.
        raise ValueError(f"unknown: {entry['refused']}, {entry['with_stages']}")
    whole_blocks = tuple(str(name) for name in entry["whole"])
    flags = entry["splits_late"] is True, entry["gathers_logits"] is True
    verdict = MeshVerdict(refused, whole_blocks, *flags, stages, float(entry["error"]), tuple(entry["blocks"]))
    newer = {name: entry[name] for name in _NEWER if name in entry}
    if any(value not in values for value, values in ((value, _NEWER[name]) for name, value in newer.items())):
        raise ValueError(f"unknown: {newer}")
    return replace(verdict, **newer)
