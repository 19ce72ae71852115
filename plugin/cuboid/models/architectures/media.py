"""What a causal language model may be given beside text: images, or clips of audio."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Medium:
    """What may stand beside text.

    Args:
        noun: for one.
        nouns: for several.
        main: the tensor with their contents.
        tensors: that one, and those that describe it.
        compute: the method of base models that computes features.
        token: the key of configs for the id of placeholders.
    """

    noun: str
    nouns: str
    main: str
    tensors: tuple[str, ...]
    compute: str
    token: str

    def is_computed_by(self, cls: Any, base: Any) -> bool:
        """Whether a class's forward takes the medium beside ids, and it or its base model's class computes features."""
        if not hasattr(base, self.compute) and not hasattr(cls, self.compute):
            return False
        return {"input_ids", self.main, "labels"} <= inspect.signature(cls.forward).parameters.keys()


PIXELS, GRID = "pixel_values", "image_grid_thw"
#: The same images again, larger, ``[images, C, H, W]``, for a tower of their own.
LARGER_PIXELS = "high_res_pixel_values"
#: How many patches of each image along an edge are one feature, ``[images]``.
MERGES = "image_merge_sizes"
#: Tensors that describe images, besides: which pixels of each are real, ``[B, images, H, W]`` or ``[images, …]``; and
#: their heights and widths in pixels or patches, ``[images, 2]``, which decide how many features they have.
PIXEL_MASKS = ("pixel_attention_mask", "pixel_mask")
IMAGE_SIZES = ("image_sizes", "spatial_shapes", "target_sizes")
#: Frames of audio, ``[clips, bins, frames]`` or ``[clips, frames, bins]``; and which of them, or of the features that
#: are computed from them, are real, ``[clips, frames]``.
FRAMES = "input_features"
FRAME_MASKS = ("input_features_mask", "feature_attention_mask")
#: Which samples of recordings are real, ``[recordings, samples]``; a recording may be several clips.
SAMPLE_MASK = "padding_mask"
_OF_IMAGES = (PIXELS, LARGER_PIXELS, GRID, MERGES, *PIXEL_MASKS, *IMAGE_SIZES)
IMAGES = Medium("image", "images", PIXELS, _OF_IMAGES, "get_image_features", "image_token_id")
_OF_AUDIO = (FRAMES, *FRAME_MASKS, SAMPLE_MASK)
AUDIO = Medium("clip", "clips of audio", FRAMES, _OF_AUDIO, "get_audio_features", "audio_token_id")
