"""What Hugging Face's attention and mask interfaces need when a sequence runs in segments."""

from __future__ import annotations

import inspect
import itertools
import sys
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.masking_utils import find_packed_sequence_indices

from cuboid.distributed.mesh import Mesh
from cuboid.errors import UnsupportedModelError
from cuboid.models.attention.forward_context import Unit, UnitSlot
from cuboid.models.attention.whole_sequence import Masks
from cuboid.models.batch.local_batch import IGNORE_INDEX
from cuboid.tensor3d.layers.whole_block import ImageSplit

#: Names of cache arguments that transformers' checkpointing removes. Some layers don't annotate them as a cache.
STRIPPED = ("past_key_values", "layer_past")
_RECORD = "cuboid_attention"


@dataclass(eq=False)
class AttentionRecord:
    """What the attention functions need to know about the module that calls them.

    Args:
        mesh: the mesh that shards the heads, if any.
        slot: holds the running unit, if sequences run in segments.
        images: describes how positions were padded, in a model of images.
        implementations: the attention implementations that the model's configs named when the record was made.

    Attributes:
        number: tells it from others in a KV cache.
        place: while compiled layers are traced, where the running segment's keys and values are
            (:func:`~cuboid.seq1f1b.attention.segment_operators.place_of`); None for a whole sequence.
        is_in_graph: whether the module is part of a compiled layer, so that graphs find the segment by ``place``.
    """

    mesh: Mesh | None = None
    slot: UnitSlot | None = None
    images: ImageSplit | None = None
    implementations: frozenset[str] = frozenset()
    number: int = field(default_factory=itertools.count().__next__, init=False)
    place: torch.Tensor | None = field(default=None, init=False)
    is_in_graph: bool = field(default=False, init=False)

    @property
    def unit(self) -> Unit | None:
        """The running unit, if it is only part of its sequence; otherwise None."""
        unit = None if self.slot is None else self.slot.current
        return None if unit is None or unit.is_whole else unit


def hang_record(module: nn.Module, record: AttentionRecord) -> None:
    """Attach a record to a module that calls the attention functions, where these find it."""
    setattr(module, _RECORD, record)


def find_record(module: nn.Module) -> AttentionRecord | None:
    """Return the record that was attached to a module, if one was."""
    return getattr(module, _RECORD, None)


def record_of(module: nn.Module) -> AttentionRecord:
    """Return the record that was attached to a module."""
    record = find_record(module)
    assert record is not None
    return record


def use_segment_attention(
    config: PretrainedConfig,
    modules: dict[str, nn.Module],
    slot: UnitSlot,
    mesh: Mesh | None = None,
    *,
    gives_cache: bool = False,
) -> None:
    """Make a stage's attention modules attend to earlier segments too, and optionally with a mesh's part of the heads.

    Args:
        config: the model's config, which stays as it is; its implementation must have passed ``check_model_options``.
        modules: the layers (or attention modules) of this stage, by name. Each shares one record with all modules
            inside it, any of which may call the attention function.
        slot: holds the unit of each forward and backward.
        mesh: the mesh that shards the heads, if any.
        gives_cache: whether layers that have an argument for a cache will get one; see
            :mod:`cuboid.models.attention.segment_cache`.
    """
    for name, module in modules.items():
        if not gives_cache or cache_argument(module) is None:
            slot.obstacle = slot.obstacle or _obstacle(name, module)
        record = AttentionRecord(mesh, slot, implementations=frozenset({config._attn_implementation}))
        for part in module.modules():
            hang_record(part, record)
    if any(uses_interface(module) for module in modules.values()):
        slot.masks = Masks.OWN
    else:
        # Layers that compute attention by themselves run on whole sequences only, unless they get a cache. Then they
        # need an explicit mask, which sdpa's mask function may skip.
        slot.masks = Masks.EXPLICIT if gives_cache else Masks.PLAIN


def cache_argument(layer: nn.Module) -> str | None:
    """Return the name of a layer's argument for a cache, if it has one."""
    # Every class's own forward is inspected, because that of a mixed-in class may only have ``*args, **kwargs``.
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
    if not uses_interface(layer):  # it would attend to its own segment only
        return f"{name} ({type(layer).__name__}) computes attention without Hugging Face's attention interface"
    return None


def uses_interface(layer: nn.Module) -> bool:
    """Whether a module, or one inside it, may compute attention through Hugging Face's attention interface."""
    # Every file that uses the interface imports this name.
    return any(hasattr(sys.modules[type(part).__module__], "ALL_ATTENTION_FUNCTIONS") for part in layer.modules())


def check_segments(config: PretrainedConfig, segments: int | Literal["auto"]) -> None:
    """Check, as far as the config shows, that a model can run in segments.

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
    # With "vision", only the tokens of an image see one another, and a pipeline takes no images.
    sees_later = getattr(config, "use_bidirectional_attention", False) not in (None, False, "vision")
    if not getattr(config, "is_causal", True) or sees_later:
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
    """Reduce the user's mask and positions to what the causal pattern doesn't cover, once for each micro-batch.

    Padding on the right needs no mask: no real position sees what follows. What the padding itself sees matters only
    where it has labels.

    Args:
        attention_mask: ``[B, T]``, nonzero where a token is real; T may be less than S.
        position_ids: ``[B, T]`` or ``[1, T]``, if given by the user; the padding from T to S belongs to the last packed
            sequence. As in Hugging Face's models, sequences count as packed where positions don't increase by one and
            there is no attention mask.
        length: S.
        labels: ``[B, S]``, shifted.
        is_causal: whether no position sees later ones; otherwise padding on the right matters too.

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
    """Count the positions, from the first on, that a mask ``[B, S]`` lets every row see. A device-to-host sync.

    0 without a mask.
    """
    return 0 if attention_mask is None else int(attention_mask.all(0).cumprod(0).sum())
