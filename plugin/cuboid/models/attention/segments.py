"""What Hugging Face's attention and mask interfaces need to know when a sequence runs in segments."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.masking_utils import find_packed_sequence_indices

from cuboid.distributed.mesh import Mesh
from cuboid.errors import UnsupportedModelError
from cuboid.models.attention.whole_sequence import Replay, WholeSequence
from cuboid.models.batch.batch import IGNORE_INDEX
from cuboid.seq1f1b.attention.kv_cache import KVCache
from cuboid.tensor3d.layers.whole_block import ImageSplit

PREFIX = "cuboid_"
#: Names of a cache that transformers' checkpointing takes from a layer's arguments. Some layers annotate none.
STRIPPED = ("past_key_values", "layer_past")
_RECORD = "cuboid_attention"


@dataclass(frozen=True, eq=False)
class Unit:
    """One segment of one micro-batch on one stage, as attention sees it.

    Args:
        store: keys and values of the micro-batch on this stage.
        start, stop: the segment's positions in the whole sequence.
        length: S, positions of the whole sequence with its padding.
        attention_mask: ``[B, S]``, true where a position may be seen; None where causal attention needs no help.
        packed: ``[B, S]`` or ``[1, S]``, the number of the packed sequence that a position belongs to; None for one.
        replay: what the base model's code made of the whole sequence, of which this unit takes its part; None where
            that code sees the whole sequence itself.
        visible: positions from the first on that ``attention_mask`` lets every row see.
    """

    store: KVCache
    start: int
    stop: int
    length: int
    attention_mask: torch.Tensor | None = None
    packed: torch.Tensor | None = None
    replay: Replay | None = None
    visible: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether the sequence isn't cut at all, so that nothing need be stored."""
        return self.start == 0 and self.stop == self.length


#: Of the forward that is running, for mask functions, which get no module that could know.
_running: ContextVar[Unit | None] = ContextVar("cuboid_unit", default=None)


def running_unit() -> Unit | None:
    """The unit whose forward this thread is in."""
    return _running.get()


class UnitSlot:
    """Where the attention modules of one stage find the unit that is running.

    They can't ask a ``ContextVar``: autograd may repeat a checkpointed forward in a thread of its own.

    Attributes:
        current: the running unit.
        recording: what is being found out about a whole sequence, while it is.
        obstacle: why the stage's layers can't run in segments, if they can't; set with the layers.
    """

    def __init__(self) -> None:
        self.current: Unit | None = None
        self.recording: WholeSequence | None = None
        self.obstacle: str | None = None
        self._calls: dict[Hashable, int] = {}

    @contextmanager
    def running(self, unit: Unit) -> Iterator[None]:
        """Forward or backward inside is of this unit.

        Raises:
            UnsupportedModelError: it is a part of a sequence, and this stage's layers need whole ones.
        """
        if self.obstacle is not None and not unit.is_whole:
            raise UnsupportedModelError(f'{self.obstacle}; write "segments": 1')
        before, self.current = self.current, unit
        self._calls.clear()
        token = _running.set(unit)
        try:
            yield
        finally:
            self.current = before
            _running.reset(token)

    def next_call(self, module: Hashable) -> int:
        """How often a module called its attention function before, in this forward or in its recomputation."""
        count = self._calls.get(module, 0)
        self._calls[module] = count + 1
        return count


@dataclass
class AttentionRecord:
    """What the attention functions need to know of the module that calls them, and how often it did.

    Args:
        mesh: that the heads are split over, if any.
        slot: names the running unit, where sequences run in segments.
        images: knows how positions were filled up, in a model of images.
    """

    mesh: Mesh | None = None
    slot: UnitSlot | None = None
    calls: int = 0
    images: ImageSplit | None = None

    @property
    def unit(self) -> Unit | None:
        """The unit that is running, if it is only a part of its sequence."""
        unit = None if self.slot is None else self.slot.current
        return None if unit is None or unit.is_whole else unit


def hang_record(module: nn.Module, record: AttentionRecord) -> None:
    """Let the attention functions find a record on a module that calls them."""
    setattr(module, _RECORD, record)


def record_of(module: nn.Module) -> AttentionRecord:
    """The record that was hung on a module."""
    record = getattr(module, _RECORD)
    assert isinstance(record, AttentionRecord)
    return record


def use_segment_attention(
    config: PretrainedConfig,
    modules: dict[str, nn.Module],
    slot: UnitSlot,
    mesh: Mesh | None = None,
    *,
    gives_cache: bool = False,
) -> None:
    """Point a model's config at the twin of its attention implementation, for segments and perhaps a mesh.

    Args:
        config: of the model; its attention implementation must have passed ``check_attention``.
        modules: the layers (or attention modules) of this stage, by name. Each has one record, also for whichever
            module inside calls the attention function.
        slot: set for each forward and backward.
        mesh: that the heads are split over.
        gives_cache: whether layers that have an argument for a cache are to be given one; see
            :mod:`cuboid.models.attention.segment_cache`.
    """
    for name, module in modules.items():
        if not gives_cache or cache_argument(module) is None:
            slot.obstacle = slot.obstacle or _obstacle(name, module)
        record = AttentionRecord(mesh, slot)
        for part in module.modules():
            hang_record(part, record)
    # Those that bypass the interface may look for their implementation's own name, and only run on whole sequences.
    if any(uses_interface(module) for module in modules.values()):
        config._attn_implementation = PREFIX + config._attn_implementation
    elif gives_cache:
        # What computes attention by itself needs a mask wherever there is one to make.
        config._attn_implementation = f"{PREFIX}eager"


def cache_argument(layer: nn.Module) -> str | None:
    """The name of a layer's argument for a cache, if it has one."""
    # Not that of a class mixed in, whose forward takes anything.
    for cls in type(layer).__mro__:
        if "forward" in vars(cls):
            for name, parameter in inspect.signature(vars(cls)["forward"]).parameters.items():
                if "Cache" in str(parameter.annotation) or name in STRIPPED:
                    return name
    return None


def _obstacle(name: str, layer: nn.Module) -> str | None:
    for inner, part in layer.named_modules(prefix=name):
        if isinstance(part, (nn.Conv1d, nn.Conv2d)):
            return f"{inner} mixes neighbouring positions, which may lie in different segments"
    if not uses_interface(layer):  # so that it would attend to its segment alone
        return f"{name} ({type(layer).__name__}) computes attention without Hugging Face's attention interface"
    return None


def uses_interface(layer: nn.Module) -> bool:
    """Whether a module, or one inside it, may compute attention by Hugging Face's attention interface."""
    # Whoever uses Hugging Face's attention interface imports this name.
    return any(hasattr(sys.modules[type(part).__module__], "ALL_ATTENTION_FUNCTIONS") for part in layer.modules())


def check_segments(config: PretrainedConfig, segments: int | Literal["auto"]) -> None:
    """Make sure, as far as a config tells, that a model can run in segments.

    Raises:
        UnsupportedModelError: it can't; whole sequences (``"segments": 1``) may still work.
    """
    if segments == 1:
        return
    reason = _reason_against(config)
    if reason is not None:
        raise UnsupportedModelError(f"{reason}; with pipeline.segments = {segments!r} that has no rule, with 1 it may")


def _reason_against(config: PretrainedConfig) -> str | None:
    if config._attn_implementation == "flex_attention":
        return 'attn_implementation is "flex_attention" ("sdpa", "eager" and "flash_attention_2" know segments)'
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        return f"{config.model_type} is configured so that positions see later ones"
    if getattr(config, "index_topk", None):
        return f"{config.model_type} picks the keys to see by an index of its own"
    return None


def prepare_masks(
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    length: int,
    labels: torch.Tensor | None = None,
    *,
    is_causal: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Reduce what a user gave to what causal attention doesn't do by itself, once for each micro-batch.

    Padding on the right is nothing: no real position sees what follows. What the padding itself sees matters only
    where it has labels.

    Args:
        attention_mask: ``[B, S]``, nonzero where a token is real; may be shorter than S.
        position_ids: ``[B, T]`` or ``[1, T]``, where given by the user; what fills up to S belongs to the last
            sequence. As in Hugging Face's models, sequences count as packed where positions don't go up by one and
            there is no attention mask.
        length: S.
        labels: ``[B, S]``, shifted.
        is_causal: whether no position sees later ones; else padding on the right matters as well.

    Returns:
        ``attention_mask`` and ``packed`` of :class:`Unit`.
    """
    if attention_mask is None:
        packed = None if position_ids is None else find_packed_sequence_indices(position_ids)
        if packed is not None and packed.shape[1] < length:
            packed = torch.cat([packed, packed[:, -1:].expand(-1, length - packed.shape[1])], dim=1)
        return None, packed
    mask = nn.functional.pad(attention_mask.bool(), (0, length - attention_mask.shape[1]))
    only_on_the_right = (mask[:, 1:] <= mask[:, :-1]).all()
    labelled = torch.zeros_like(only_on_the_right) if labels is None else ((labels != IGNORE_INDEX) & ~mask).any()
    hides_nothing = only_on_the_right & ~labelled if is_causal else mask.all()
    return (None if bool(hides_nothing) else mask), None


def visible_to_all(attention_mask: torch.Tensor | None) -> int:
    """Positions from the first on that a mask ``[B, S]`` lets every row see. The host waits for it."""
    return 0 if attention_mask is None else int(attention_mask.all(0).cumprod(0).sum())
