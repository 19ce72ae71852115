"""Images beside token ids: which of a micro-batch's images belong to the rows of a rank.

Most models take all images of a micro-batch in one tensor, in the order in which placeholders stand for them in the
rows: ``pixel_values`` ``[images, C, H, W]``, or ``[patches, features]`` with each image's patches in
``image_grid_thw`` ``[images, 3]``. How many placeholders an image has is up to the model; here it follows from the
numbers of both. Some take ``[B, images, C, H, W]``, where rows with fewer images are filled up. Where only the model's
own code knows how many features an image has, by its size, a rank takes all images, and of their features those of its
rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from cuboid.errors import CuboidError

PIXELS, GRID = "pixel_values", "image_grid_thw"
#: Tensors that describe images, besides: which pixels of each are real, ``[B, images, H, W]`` or ``[images, …]``; and
#: their heights and widths in pixels or patches, ``[images, 2]``, which decide how many features they have.
PIXEL_MASKS = ("pixel_attention_mask", "pixel_mask")
IMAGE_SIZES = ("image_sizes", "spatial_shapes")
IMAGES = (PIXELS, GRID, *PIXEL_MASKS, *IMAGE_SIZES)
#: Of pixels that aren't divided by rows; those that are have one more.
_DIMS_OF_IMAGES = 4


@dataclass(frozen=True)
class RankImages:
    """Images among the arguments of a rank's forward.

    Args:
        spare: arguments of one image, for a rank whose rows have none: it computes that image's features and drops
            them, so that it takes part in unsharding the tower's weights. None where the rows have images.
        spans: of the features of all images, the first and the end of those of each of the rank's rows; None if the
            images are those of its rows.
        placeholders: how many features there are altogether; with ``spans``.
    """

    spare: dict[str, torch.Tensor] | None = None
    spans: tuple[tuple[int, int], ...] | None = None
    placeholders: int = 0


def images_of_rows(
    images: Mapping[str, torch.Tensor], placeholders: Sequence[int], rows: Sequence[int]
) -> tuple[dict[str, torch.Tensor], RankImages]:
    """The images of some rows, in their order; or all, and which of their features are of these rows.

    Args:
        images: those of :data:`IMAGES` that the model takes, of the whole micro-batch.
        placeholders: how many each row of it has.
        rows: numbers of the wanted rows; one may be there twice.

    Raises:
        CuboidError: the numbers of images and of placeholders contradict each other.
    """
    if any(name in images for name in IMAGE_SIZES):
        ends = list(itertools.accumulate(placeholders, initial=0))
        return dict(images), RankImages(spans=tuple((ends[row], ends[row + 1]) for row in rows), placeholders=ends[-1])
    if images[PIXELS].dim() > _DIMS_OF_IMAGES:
        counts = {name: len(x) for name, x in images.items() if len(x) != len(placeholders)}
        if counts:
            raise CuboidError(
                f"{', '.join(f'{name} has {count} rows' for name, count in counts.items())}, and input_ids have "
                f"{len(placeholders)}; give {PIXELS} [batch, images, channels, height, width]"
            )
        if any(placeholders[row] for row in rows):
            return {name: x[list(rows)] for name, x in images.items()}, RankImages()
        shown = next((row for row, count in enumerate(placeholders) if count), 0)
        return {name: x[:0] for name, x in images.items()}, RankImages(
            {name: x[shown : shown + 1] for name, x in images.items()}
        )
    return _in_proportion(images, placeholders, rows)


def _in_proportion(
    images: Mapping[str, torch.Tensor], placeholders: Sequence[int], rows: Sequence[int]
) -> tuple[dict[str, torch.Tensor], RankImages]:
    """Images whose numbers of placeholders are proportional to their patches; without a grid, all have as many."""
    pixels, grid = images[PIXELS], images.get(GRID)
    masks = {name: x for name, x in images.items() if name in PIXEL_MASKS}
    # Entries of the pixels for each image. Placeholders are proportional to them.
    entries = [1] * len(pixels) if grid is None else grid.prod(-1).tolist()
    if sum(entries) != len(pixels):
        raise CuboidError(
            f"{GRID} describes images of {sum(entries)} patches altogether, but {PIXELS} has {len(pixels)}"
        )
    total = sum(placeholders)
    if not entries or not total:
        raise CuboidError(
            f"{PIXELS} has {len(entries)} images, and input_ids have {total} placeholders for their features; leave "
            f"{PIXELS} out of a micro-batch without images"
        )
    numbers = {end: number for number, end in enumerate(itertools.accumulate(entries, initial=0))}
    ends = [count * len(pixels) for count in itertools.accumulate(placeholders, initial=0)]
    parts = [row for row, end in enumerate(ends[1:]) if end % total or end // total not in numbers]
    if parts:
        raise CuboidError(
            f"row {parts[0]} of input_ids ends inside an image: {total} placeholders stand for {len(entries)} images "
            f"of {PIXELS}, and up to that row there are {ends[parts[0] + 1] // len(pixels)} of them; each image's "
            "placeholders must be in one row, in the order of the images"
        )
    spans = [(ends[row] // total, ends[row + 1] // total) for row in rows]
    if all(start == end for start, end in spans):
        spare = {PIXELS: pixels[: entries[0]]} | {name: x[:1] for name, x in images.items() if name != PIXELS}
        return {name: x[:0] for name, x in images.items()}, RankImages(spare)
    local = {name: torch.cat([x[start:end] for start, end in spans]) for name, x in {PIXELS: pixels, **masks}.items()}
    if grid is not None:
        local[GRID] = torch.cat([grid[numbers[start] : numbers[end]] for start, end in spans])
    return local, RankImages()
