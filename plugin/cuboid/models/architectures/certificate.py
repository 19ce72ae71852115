"""With what an architecture was seen to be right, and the errors for all else."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from cuboid.errors import CuboidError, UnsupportedModelError
from cuboid.tensor3d.layers.vocab_cross_entropy import PADDING

#: Cut into stages only; into segments as well; or cut into stages and filled up to a multiple of what a mesh needs.
Mode = Literal["whole", "segments", "filled"]
MODES: tuple[Mode, ...] = ("whole", "segments", "filled")
#: How what follows a base model is computed: split as the rest; as one head of few outputs, which all ranks get
#: whole; or of hidden states that are gathered, by every rank alike.
HeadPlan = Literal["split", "labels", "whole"]
#: What a model is given: embeddings, which are split; ids of whole sequences, with positions; ids without positions,
#: which it counts by itself; images, which are whole up to the first layer.
Inputs = Literal["embeddings", "ids", "only ids", "pixels"]
#: What a micro-batch may have besides whole rows.
Kind = Literal[
    "whole rows",
    "padding on the left",
    "padding on the right",
    "labels in padding on the left",
    "labels in padding on the right",
    "packed sequences",
]
#: Kinds whose padding has labels; by the kind of the padding alone.
LABELLED: dict[Kind, Kind] = {
    "padding on the left": "labels in padding on the left",
    "padding on the right": "labels in padding on the right",
}


@dataclass(frozen=True)
class Verdict:
    """What came of one architecture and config.

    Args:
        refused: for each mode the kinds of micro-batches that are not right, and why. A mode whose whole rows aren't
            right can't be used at all.
        error: the largest relative error of what was found right.
        gives_cache: whether layers are right with segments only if something stands for a cache of the ones before.
        shifts_labels: whether a causal model's own loss compares each position with the label after it. That of
            ``BartForCausalLM`` and similar models compare it with its own.
    """

    refused: dict[Mode, dict[Kind, str]] = field(default_factory=dict)
    error: float = 0.0
    gives_cache: bool = False
    shifts_labels: bool = True

    def reason_against(self, mode: Mode) -> str | None:
        """Why a mode can't be used, if it can't."""
        return self.refused.get(mode, {}).get("whole rows")


@dataclass(frozen=True)
class Certificate:
    """What may be done with a model in a pipeline.

    Args:
        verdict: of the probe; None where there could be none.
        obstacle: why there could be none.
    """

    verdict: Verdict | None
    obstacle: str = ""

    def check_model(self, name: str, modes: tuple[Mode, ...], *, verified: bool) -> None:
        """Make sure that a model can be used so.

        Args:
            name: of its class.
            modes: how.
            verified: whether the user says that ``cuboid verify`` passed on the real weights.

        Raises:
            UnsupportedModelError: it can't, or nobody knows.
        """
        if self.verdict is None:
            if verified:
                return
            raise UnsupportedModelError(
                f"{name} can't be probed before its weights are read: {self.obstacle}. Run `cuboid verify --model … "
                '--config …` on your checkpoint, and once that passes, write "certification": "verified" into the '
                "pipeline section of the config"
            )
        for mode in modes:
            reason = self.verdict.reason_against(mode)
            if reason is not None:
                raise UnsupportedModelError(f"{name} isn't right {_WORDS[mode]}: {reason}{self._hint(mode)}")

    def _hint(self, mode: Mode) -> str:
        assert self.verdict is not None
        if mode == "segments" and self.verdict.reason_against("whole") is None:
            return '; "segments": 1 is right'
        return ""

    def modes(self, *, is_cut: bool, is_filled: bool) -> tuple[Mode, ...]:
        """How a model is used: with sequences that are cut into segments, or filled up."""
        first: Mode = "segments" if is_cut else "whole"
        return (first, "filled") if is_filled else (first,)

    def check_batch(self, batch: Mapping[str, torch.Tensor], modes: tuple[Mode, ...], name: str) -> None:
        """Make sure that a kind of micro-batch was seen to be right.

        Raises:
            CuboidError: it was seen to be wrong.
        """
        if self.verdict is None:
            return
        refused = {mode: self.verdict.refused.get(mode, {}) for mode in modes}
        kinds = _kinds_of(batch, {kind for reasons in refused.values() for kind in reasons})
        for mode, reasons in refused.items():
            for kind in kinds:
                if kind in reasons:
                    raise CuboidError(
                        f"the micro-batch has {kind}, with which {name} isn't right {_WORDS[mode]}: {reasons[kind]}"
                        f"{_advice(kind)}"
                    )

    @property
    def gives_cache(self) -> bool:
        """Whether layers must be given something for a cache of the segments before."""
        return self.verdict is not None and self.verdict.gives_cache

    @property
    def shifts_labels(self) -> bool:
        """See :class:`Verdict`; as almost all do, where nobody knows."""
        return self.verdict is None or self.verdict.shifts_labels


@dataclass(frozen=True)
class MeshVerdict:
    """What came of one architecture and config on meshes.

    Args:
        refused: kinds of micro-batches that are not right, and why. If whole rows aren't right, nothing is.
        whole: blocks that have to be computed whole, by their names inside their layer; ``""`` for the layers.
        splits_late: whether activations have to be whole up to the first layer, because the model's own code takes
            lengths from them, and are split there.
        gathers_logits: whether logits have to be whole on every rank, because the model has a loss of its own.
        with_stages: why a mesh can't be used together with stages, or with segments too, where it can't.
        error: the largest relative error of what was found right.
        blocks: all that is computed whole in layers, by such names, also for want of rules.
        inputs: what the model is given.
        head: how what is after the base model is computed.
        counts_items: whether the loss is divided by ``num_items_in_batch`` where that is given.
        token_types: whether there may be ``token_type_ids``.
    """

    refused: dict[Kind, str] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    splits_late: bool = False
    gathers_logits: bool = False
    with_stages: dict[Mode, str] = field(default_factory=dict)
    error: float = 0.0
    blocks: tuple[str, ...] = ()
    inputs: Inputs = "embeddings"
    head: HeadPlan = "split"
    counts_items: bool = True
    token_types: bool = False

    def check_model(self, name: str, mode: Mode | None = None) -> None:
        """Make sure that a model of a class of this name can be used on a mesh at all.

        Args:
            name: of the class.
            mode: how its stages run, if it is to be cut into stages as well.

        Raises:
            UnsupportedModelError: it can't.
        """
        reason = self.refused.get("whole rows")
        if reason is not None:
            raise UnsupportedModelError(f"{name} isn't right on a mesh: {reason}")
        reason = None if mode is None else self.with_stages.get(mode)
        if reason is not None:
            assert mode is not None
            raise UnsupportedModelError(f"{name} isn't right on a mesh {_WORDS[mode]}: {reason}")

    def check_batch(self, batch: Mapping[str, torch.Tensor], name: str) -> None:
        """Make sure that a kind of micro-batch was seen to be right.

        Raises:
            CuboidError: it was seen to be wrong.
        """
        if not self.refused:
            return
        for kind in _kinds_of(batch, self.refused):
            raise CuboidError(
                f"the micro-batch has {kind}, with which {name} isn't right on a mesh: {self.refused[kind]}"
                f"{_advice(kind)}"
            )


_WORDS: dict[Mode, str] = {
    "whole": "when it is cut into stages",
    "segments": "when its sequences are cut into segments",
    "filled": "when sequences are filled up to what a mesh or segments divide",
}


def _advice(kind: Kind) -> str:
    return f"; give what is padding the label {PADDING}" if kind in LABELLED.values() else ""


def _kinds_of(batch: Mapping[str, torch.Tensor], among: Collection[Kind]) -> list[Kind]:
    """Which of some kinds a micro-batch is of. The host waits for as few numbers as these need."""
    kinds: list[Kind] = ["whole rows"]
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    target_mask = batch.get("decoder_attention_mask")
    for each in (mask, target_mask) if any("padding" in kind for kind in among) else ():
        if each is not None and not bool(each.all()):
            seen = each.bool()
            is_left = bool((seen[:, 1:] > seen[:, :-1]).any())
            kind: Kind = "padding on the left" if is_left else "padding on the right"
            kinds.append(kind)
            # An encoder's padding has no labels.
            has_labels = each is target_mask or target_mask is None
            if LABELLED[kind] in among and has_labels and _has_label(batch, ~seen):
                kinds.append(LABELLED[kind])
    if "packed sequences" in among and mask is None and positions is not None:
        kinds += ["packed sequences"] if bool((positions.diff(dim=1) != 1).any()) else []
    return [kind for kind in kinds if kind in among]


def _has_label(batch: Mapping[str, torch.Tensor], positions: torch.Tensor) -> bool:
    """Whether some of the tokens at ``[B, S]`` positions are labels."""
    labels, shifted = batch.get("labels"), batch.get("shift_labels")
    if labels is not None and labels.shape == positions.shape:
        return bool((positions & (labels != PADDING)).any())
    if shifted is None or shifted.shape != positions.shape:
        return False
    # Its entries are of the tokens after them, and the last one's isn't among them.
    after = torch.cat([positions[:, 1:], positions[:, -1:]], dim=1)
    return bool((after & (shifted != PADDING)).any())
