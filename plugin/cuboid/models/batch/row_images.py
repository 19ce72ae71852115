"""Images beside token ids: which of a micro-batch's images belong to the rows of a rank.

Models take all images of a micro-batch in one tensor, in the order in which placeholders stand for them in the rows:
``pixel_values`` ``[images, C, H, W]``, or ``[patches, features]`` with each image's patches in ``image_grid_thw``
``[images, 3]``. How many placeholders an image has is up to the model; here it follows from the numbers of both.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from cuboid.errors import CuboidError

PIXELS, GRID = "pixel_values", "image_grid_thw"


@dataclass(frozen=True)
class RankImages:
    """Images among the arguments of a rank's forward.

    Args:
        spare: arguments of one image, for a rank whose rows have none: it computes that image's features and drops
            them, so that it takes part in unsharding the tower's weights. None where the rows have images.
    """

    spare: dict[str, torch.Tensor] | None = None


def images_of_rows(
    images: Mapping[str, torch.Tensor], placeholders: Sequence[int], rows: Sequence[int]
) -> tuple[dict[str, torch.Tensor], RankImages]:
    """The images of some rows, in their order.

    Args:
        images: ``pixel_values`` and, for some models, ``image_grid_thw``, of the whole micro-batch.
        placeholders: how many each row of it has.
        rows: numbers of the wanted rows; one may be there twice.

    Raises:
        CuboidError: the numbers of images and of placeholders contradict each other.
    """
    pixels, grid = images[PIXELS], images.get(GRID)
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
        spare = {PIXELS: pixels[: entries[0]]} | ({} if grid is None else {GRID: grid[:1]})
        return {PIXELS: pixels[:0]} | ({} if grid is None else {GRID: grid[:0]}), RankImages(spare)
    local = {PIXELS: torch.cat([pixels[start:end] for start, end in spans])}
    if grid is not None:
        local[GRID] = torch.cat([grid[numbers[start] : numbers[end]] for start, end in spans])
    return local, RankImages()
