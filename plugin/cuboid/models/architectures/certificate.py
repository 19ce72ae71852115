"""The results of an architecture's certification, and the errors for everything that failed it."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from cuboid.errors import CuboidError, UnsupportedModelError
from cuboid.models.architectures import liger
from cuboid.tensor3d.layers.vocab_cross_entropy import PADDING

#: How a pipeline runs a model: in stages only; in stages and segments; or with sequences padded to a multiple of what a
#: mesh or segments need.
Mode = Literal["whole", "segments", "filled"]
MODES: tuple[Mode, ...] = ("whole", "segments", "filled")
#: How the modules after a base model are computed. "split": sharded like the rest. "labels": one head of few outputs,
#: which all ranks get whole. "whole": from gathered hidden states, identically on every rank.
HeadPlan = Literal["split", "labels", "whole"]
#: What a model's forward is given. "embeddings": a rank's shard of them. "ids": those of whole sequences, with
#: positions. "only ids": the model counts positions by itself. "pixels": images; activations are whole up to the first
#: layer. "media": ids, and images or audio whose features take the place of some embeddings; activations are whole up
#: to the first layer, and parts behind the last one, unless they are split late.
Inputs = Literal["embeddings", "ids", "only ids", "pixels", "media"]
#: Kinds of micro-batches, each of which is certified by itself.
BatchKind = Literal[
    "whole rows",
    "padding on the left",
    "padding on the right",
    "labels in padding on the left",
    "labels in padding on the right",
    "packed sequences",
]
#: Maps a kind of padding to the kind whose padding has labels, too.
LABELLED: dict[BatchKind, BatchKind] = {
    "padding on the left": "labels in padding on the left",
    "padding on the right": "labels in padding on the right",
}


@dataclass(frozen=True)
class Verdict:
    """The result of probing one architecture and config.

    Args:
        refused: for each mode, the kinds of micro-batches with wrong results, and why. A mode in which whole rows are
            wrong can't be used at all.
        error: the largest relative error among the results that passed.
        gives_cache: whether segments are right only if layers get a stand-in for a cache of the previous segments.
        shifts_labels: whether a causal model's own loss compares each position with the next label. In
            ``BartForCausalLM`` and similar models it compares a position with its own label.
    """

    refused: dict[Mode, dict[BatchKind, str]] = field(default_factory=dict)
    error: float = 0.0
    gives_cache: bool = False
    shifts_labels: bool = True

    def reason_against(self, mode: Mode) -> str | None:
        """The reason why a mode can't be used; None if it can."""
        return self.refused.get(mode, {}).get("whole rows")


@dataclass(frozen=True)
class Certificate:
    """What a pipeline may do with a model.

    Args:
        verdict: of the probe; None if the model couldn't be probed.
        obstacle: why it couldn't be probed.
        changes: what the probed code differs in from the code that the model's libraries ship, in words.
    """

    verdict: Verdict | None
    obstacle: str = ""
    changes: tuple[str, ...] = ()

    def check_model(self, name: str, modes: tuple[Mode, ...], *, verified: bool) -> None:
        """Check that a model can be used in some modes.

        Args:
            name: of its class.
            modes: to be used.
            verified: whether the config states that ``cuboid verify`` passed on the real weights.

        Raises:
            UnsupportedModelError: one of them is wrong, or the model couldn't be probed and isn't verified.
        """
        if self.verdict is None:
            if verified:
                return
            raise UnsupportedModelError(
                f"{name} can't be probed before its weights are read: {self.obstacle}"
                f"{words_of_changes(self.changes)}. Run `cuboid verify --model … "
                '--config …` on your checkpoint, and once that passes, write "certification": "verified" into the '
                "pipeline section of the config"
            )
        for mode in modes:
            reason = self.verdict.reason_against(mode)
            if reason is not None:
                raise UnsupportedModelError(
                    f"{name} isn't right {_WORDS[mode]}: {reason}{words_of_changes(self.changes)}{self._hint(mode)}"
                )

    def _hint(self, mode: Mode) -> str:
        assert self.verdict is not None
        if mode == "segments" and self.verdict.reason_against("whole") is None:
            return '; "segments": 1 is right'
        return ""

    def modes(self, *, is_cut: bool, is_filled: bool) -> tuple[Mode, ...]:
        """The modes that a run uses, given whether sequences are cut into segments and whether they are padded."""
        first: Mode = "segments" if is_cut else "whole"
        return (first, "filled") if is_filled else (first,)

    def check_batch(self, batch: Mapping[str, torch.Tensor], modes: tuple[Mode, ...], name: str) -> None:
        """Check that a micro-batch is of no kind that the probe found wrong.

        Raises:
            CuboidError: it is of such a kind.
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
        """Whether layers must get a stand-in for a cache of the previous segments."""
        return self.verdict is not None and self.verdict.gives_cache

    @property
    def shifts_labels(self) -> bool:
        """See :class:`Verdict`; True if there is none, as it is for almost all models."""
        return self.verdict is None or self.verdict.shifts_labels


@dataclass(frozen=True)
class MeshVerdict:
    """The result of probing one architecture and config on meshes.

    Args:
        refused: kinds of micro-batches with wrong results, and why. If whole rows are wrong, no mesh can be used.
        whole_blocks: blocks that must be computed whole, by their names inside their layer; ``""`` for whole layers.
        splits_late: whether activations stay whole up to the first layer and are split there, because the model's own
            code reads lengths from them.
        gathers_logits: whether every rank needs whole logits, because the model has a loss of its own.
        with_stages: the modes in which a mesh can't be combined with pipeline stages, and why.
        error: the largest relative error among the results that passed.
        blocks: all blocks of layers that are computed whole, named as in ``whole_blocks``, including those without a
            rule.
        inputs: what the model is given; see :data:`Inputs`.
        head: how modules after the base model are computed; see :data:`HeadPlan`.
        counts_items: whether the loss is divided by ``num_items_in_batch`` where that is given.
        token_types: whether a micro-batch may have ``token_type_ids``.
        changes: as in :class:`Certificate`.
    """

    refused: dict[BatchKind, str] = field(default_factory=dict)
    whole_blocks: tuple[str, ...] = ()
    splits_late: bool = False
    gathers_logits: bool = False
    with_stages: dict[Mode, str] = field(default_factory=dict)
    error: float = 0.0
    blocks: tuple[str, ...] = ()
    inputs: Inputs = "embeddings"
    head: HeadPlan = "split"
    counts_items: bool = True
    token_types: bool = False
    changes: tuple[str, ...] = ()

    def check_model(self, name: str, mode: Mode | None = None) -> None:
        """Check that a model can be used on a mesh at all.

        Args:
            name: of its class.
            mode: how its pipeline stages run, if it has any.

        Raises:
            UnsupportedModelError: it can't.
        """
        reason = self.refused.get("whole rows")
        if reason is not None:
            raise UnsupportedModelError(f"{name} isn't right on a mesh: {reason}{words_of_changes(self.changes)}")
        reason = None if mode is None else self.with_stages.get(mode)
        if reason is not None:
            assert mode is not None
            raise UnsupportedModelError(
                f"{name} isn't right on a mesh {_WORDS[mode]}: {reason}{words_of_changes(self.changes)}"
            )

    def check_batch(self, batch: Mapping[str, torch.Tensor], name: str) -> None:
        """Check that a micro-batch is of no kind that the probe found wrong.

        Raises:
            CuboidError: it is of such a kind.
        """
        if not self.refused:
            return
        for kind in _kinds_of(batch, self.refused):
            raise CuboidError(
                f"the micro-batch has {kind}, with which {name} isn't right on a mesh: {self.refused[kind]}"
                f"{_advice(kind)}"
            )


_MOST_CHANGES = 4


def words_of_changes(changes: tuple[str, ...]) -> str:
    """The end of an error about a model whose code isn't what its libraries ship."""
    if not changes:
        return ""
    more = f" and {len(changes) - _MOST_CHANGES} more" if len(changes) > _MOST_CHANGES else ""
    advice = f". {liger.INSTEAD}" if liger.is_among(changes) else ""
    return f" (its code was replaced: {', '.join(changes[:_MOST_CHANGES])}{more}{advice})"


_WORDS: dict[Mode, str] = {
    "whole": "when it is cut into stages",
    "segments": "when its sequences are cut into segments",
    "filled": "when sequences are filled up to what a mesh or segments divide",
}


def _advice(kind: BatchKind) -> str:
    return f"; give what is padding the label {PADDING}" if kind in LABELLED.values() else ""


def _kinds_of(batch: Mapping[str, torch.Tensor], among: Collection[BatchKind]) -> list[BatchKind]:
    """The kinds in ``among`` that a micro-batch is of. Other kinds aren't checked: each check waits for the device."""
    kinds: list[BatchKind] = ["whole rows"]
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    target_mask = batch.get("decoder_attention_mask")
    for padding_mask in (mask, target_mask) if any("padding" in kind for kind in among) else ():
        if padding_mask is None:
            continue
        paddings = _paddings_of(padding_mask.bool())
        # Both at once, so that the host waits once.
        there = torch.stack([padding.any() for padding in paddings.values()]).tolist()
        # An encoder's padding has no labels.
        has_labels = padding_mask is target_mask or target_mask is None
        for kind, padding in itertools.compress(paddings.items(), there):
            kinds.append(kind)
            if LABELLED[kind] in among and has_labels and _has_label(batch, padding):
                kinds.append(LABELLED[kind])
    if "packed sequences" in among and mask is None and positions is not None:
        kinds += ["packed sequences"] if bool((positions.diff(dim=1) != 1).any()) else []
    return [kind for kind in kinds if kind in among]


def _paddings_of(seen: torch.Tensor) -> dict[BatchKind, torch.Tensor]:
    """Masks ``[B, S]`` of the positions, not among those ``seen``, that are padding on a side; one between two tokens
    is on both.
    """
    after_a_token = seen.cumsum(1) > 0
    before_a_token = seen.flip(1).cumsum(1).flip(1) > 0
    # A row without tokens is all padding on the right.
    return {
        "padding on the left": ~seen & before_a_token,
        "padding on the right": ~seen & (after_a_token | ~before_a_token),
    }


def _has_label(batch: Mapping[str, torch.Tensor], positions: torch.Tensor) -> bool:
    """Whether any token that the mask ``positions`` ``[B, S]`` selects is a label."""
    labels, shifted = batch.get("labels"), batch.get("shift_labels")
    if labels is not None and labels.shape == positions.shape:
        return bool((positions & (labels != PADDING)).any())
    if shifted is None or shifted.shape != positions.shape:
        return False
    # Entry i is the label of token i + 1. The last one's token isn't in the sequence; the last position stands for it.
    after = torch.cat([positions[:, 1:], positions[:, -1:]], dim=1)
    return bool((after & (shifted != PADDING)).any())
