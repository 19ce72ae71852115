"""Rows of token ids that show whether a small model is computed correctly."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PretrainedConfig

from cuboid.models.architectures.media import AUDIO
from cuboid.models.batch.broadcast import MicroBatch
from cuboid.models.batch.length_cases import Case
from cuboid.models.batch.local_batch import IGNORE_INDEX

#: Makes a micro-batch of ids, with the labels of a causal model: of a case, and of a stream with ids of its own.
RowsOf = Callable[[Case, int], MicroBatch]
ROWS = 3
_UNUSED_VOCABULARY = 8
#: Endings of keys of configs for ids that stand for what isn't text; and keys with such an ending that are of text.
_SPECIAL = ("_token_id", "_token_index", "_token_ids", "_token_indices")
_OF_TEXT = frozenset(
    {f"{name}_token_id" for name in ("pad", "bos", "eos", "sep", "cls", "unk", "mask", "decoder_start", "forced_bos")}
)


def special_tokens(config: PretrainedConfig) -> dict[str, list[int]]:
    """Ids that stand for images and the like, by the keys of a config that has towers."""
    if not hasattr(config, "vision_config") and not hasattr(config, AUDIO.token):
        return {}
    tokens = {
        name: value for name, value in config.to_dict().items() if name.endswith(_SPECIAL) and name not in _OF_TEXT
    }
    listed = {name: list(value) if isinstance(value, list | tuple) else [value] for name, value in tokens.items()}
    return {name: ids for name, ids in listed.items() if ids and all(type(token) is int for token in ids)}


def vocabulary_size(config: PretrainedConfig) -> int:
    """The number of ids that are tokens of a config's model; of models of images, whose rows are only counted, any."""
    text = config.get_text_config()
    size: int = getattr(text, "vocab_size", _UNUSED_VOCABULARY)
    # Beyond these, tables and heads may have entries that only fill them up, without logits.
    return min(size, getattr(text, "unpadded_vocab_size", None) or size)


class CannotProbe(Exception):
    """No small model of the architecture can be made, or it doesn't run."""


def probe_rows(case: Case, vocabulary: int, *, has_labels: bool = False) -> MicroBatch:
    """A causal model's micro-batch for a case; with ``has_labels``, padding has labels, too."""
    generator = torch.Generator().manual_seed(case.length)
    ids = torch.randint(4, vocabulary, (ROWS, case.length), generator=generator)  # the first ones pad, begin and end
    batch = {"input_ids": ids, "labels": ids.clone()}
    mask, positions = case.attention_mask(ROWS), case.position_ids(ROWS)
    if mask is not None:
        mask[0] = 1  # one row is whole
        batch["attention_mask"] = mask
        if not has_labels:
            batch["labels"][mask == 0] = IGNORE_INDEX
    if positions is not None:
        batch["position_ids"] = positions
    return batch
