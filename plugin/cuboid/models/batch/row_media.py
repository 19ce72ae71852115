"""Images and clips of audio beside token ids: which of a micro-batch's belong to the rows of a rank.

Most models take all images of a micro-batch in one tensor, in the order in which placeholders stand for them in the
rows: ``pixel_values`` ``[images, C, H, W]``, or ``[patches, features]`` with each image's patches in
``image_grid_thw`` ``[images, 3]``. How many placeholders an image has is up to the model; here it follows from the
numbers of both. Some take ``[B, images, C, H, W]``, where rows with fewer images are filled up. Where only the model's
own code knows how many features an image has, by its size, a rank takes all images, and of their features those of its
rows. So it is with clips: ``input_features`` ``[clips, …]`` are filled up to one length, and a mask may say how long
each is; besides, towers of audio may have norms over all clips.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from cuboid.errors import CuboidError
from cuboid.models.architectures.media import AUDIO, GRID, IMAGE_SIZES, IMAGES, MERGES, PIXELS, Medium

#: Of pixels that aren't divided by rows; those that are have one more.
_DIMS_OF_IMAGES = 4


@dataclass(frozen=True)
class RankMedia:
    """Images or clips among the arguments of a rank's forward.

    Args:
        medium: which of both.
        spare: arguments of one, for a rank whose rows have none: it computes that one's features and drops them, so
            that it takes part in unsharding the tower's weights. None where the rows have some.
        spans: of the features of all, the first and the end of those of each of the rank's rows; None if the arguments
            are those of its rows.
        placeholders: how many features there are altogether; with ``spans``.
        of_clips: whether spans are of whole clips ``[clips, features, H]``, of which the model's own code then leaves
            some features out.
    """

    medium: Medium
    spare: dict[str, torch.Tensor] | None = None
    spans: tuple[tuple[int, int], ...] | None = None
    placeholders: int = 0
    of_clips: bool = False


def media_of_rows(
    medium: Medium,
    tensors: Mapping[str, torch.Tensor],
    placeholders: Sequence[int],
    rows: Sequence[int],
) -> tuple[dict[str, torch.Tensor], RankMedia]:
    """The images or clips of some rows, in their order; or all, and which of their features are of these rows.

    Args:
        medium: which of both.
        tensors: those that the model takes of it, of the whole micro-batch.
        placeholders: how many each row of it has.
        rows: numbers of the wanted rows; one may be there twice.

    Raises:
        CuboidError: the numbers of images or clips, and of placeholders, contradict each other.
    """
    main, ends = tensors[medium.main], list(itertools.accumulate(placeholders, initial=0))
    if medium is AUDIO or any(name in tensors for name in IMAGE_SIZES):
        spans = tuple((ends[row], ends[row + 1]) for row in rows)
        return dict(tensors), RankMedia(medium, spans=spans, placeholders=ends[-1])
    if medium is IMAGES and main.dim() > _DIMS_OF_IMAGES:
        return _by_rows(tensors, placeholders, rows)
    grid = tensors.get(GRID)
    # Entries of the pixels for each image. Placeholders are proportional to them, or to how many are merged.
    entries: list[int] = [1] * len(main) if grid is None else grid.prod(-1).tolist()
    merges = tensors.get(MERGES)
    shares = entries if grid is None or merges is None else (grid.prod(-1) // merges**2).tolist()
    if sum(entries) != len(main):
        raise CuboidError(f"{GRID} describes images of {sum(entries)} patches altogether, but {PIXELS} has {len(main)}")
    if not entries or not ends[-1]:
        raise CuboidError(
            f"{PIXELS} has {len(entries)} images, and input_ids have {ends[-1]} placeholders for their features; leave "
            f"{PIXELS} out of a micro-batch without images"
        )
    return _in_proportion(tensors, placeholders, rows, entries, shares)


def _by_rows(
    tensors: Mapping[str, torch.Tensor], placeholders: Sequence[int], rows: Sequence[int]
) -> tuple[dict[str, torch.Tensor], RankMedia]:
    counts = {name: len(x) for name, x in tensors.items() if len(x) != len(placeholders)}
    if counts:
        raise CuboidError(
            f"{', '.join(f'{name} has {count} rows' for name, count in counts.items())}, and input_ids have "
            f"{len(placeholders)}; give {PIXELS} [batch, images, channels, height, width]"
        )
    if any(placeholders[row] for row in rows):
        return {name: x[list(rows)] for name, x in tensors.items()}, RankMedia(IMAGES)
    shown = next((row for row, count in enumerate(placeholders) if count), 0)
    spare = {name: x[shown : shown + 1] for name, x in tensors.items()}
    return {name: x[:0] for name, x in tensors.items()}, RankMedia(IMAGES, spare)


def _in_proportion(
    tensors: Mapping[str, torch.Tensor],
    placeholders: Sequence[int],
    rows: Sequence[int],
    entries: Sequence[int],
    shares: Sequence[int],
) -> tuple[dict[str, torch.Tensor], RankMedia]:
    """Those whose numbers of placeholders are proportional to ``shares``, such as images' patches; or all have as many.

    ``entries`` are how many of the main tensor's are of each.
    """
    sum_of_shares, total = sum(shares), sum(placeholders)
    numbers = {end: number for number, end in enumerate(itertools.accumulate(shares, initial=0))}
    ends = [count * sum_of_shares for count in itertools.accumulate(placeholders, initial=0)]
    parts = [row for row, end in enumerate(ends[1:]) if end % total or end // total not in numbers]
    if parts:
        raise CuboidError(
            f"row {parts[0]} of input_ids ends inside an image: {total} placeholders stand for {len(entries)} images "
            f"of {PIXELS}, and up to that row there are {ends[parts[0] + 1] // sum_of_shares} of them; each image's "
            "placeholders must be in one row, in the order of the images"
        )
    spans = [(numbers[ends[row] // total], numbers[ends[row + 1] // total]) for row in rows]
    places = list(itertools.accumulate(entries, initial=0))
    cuts = {
        name: [(places[start], places[end]) for start, end in spans] if name == PIXELS else spans for name in tensors
    }
    return _cut(tensors, cuts, places[1])


def _cut(
    tensors: Mapping[str, torch.Tensor], cuts: Mapping[str, list[tuple[int, int]]], first: int
) -> tuple[dict[str, torch.Tensor], RankMedia]:
    """Parts of tensors; where they are empty, beside the first image's, of ``first`` entries of the pixels."""
    if all(start == end for start, end in cuts[PIXELS]):
        spare = {name: x[: first if name == PIXELS else 1] for name, x in tensors.items()}
        return {name: x[:0] for name, x in tensors.items()}, RankMedia(IMAGES, spare)
    local = {name: torch.cat([x[start:end] for start, end in cuts[name]]) for name, x in tensors.items()}
    return local, RankMedia(IMAGES)
