"""The files that a command writes, checked before it computes anything."""

from __future__ import annotations

from pathlib import Path


def check_outputs(*files: Path | None, pictures: tuple[Path | None, ...] = ()) -> None:
    """Check that the files of a command can be written; their folders are created if missing.

    Args:
        files: of any kind; None for those that weren't asked for.
        pictures: likewise, whose suffix has to be that of a format.

    Raises:
        CuboidError: names the first that can't be written.
    """
    from cuboid.checkpoint.format.bounded_files import check_output_file
    from cuboid.seq1f1b.schedule.timeline_picture import check_picture

    for picture in pictures:
        if picture is not None:
            check_picture(picture)
    for file in (*files, *pictures):
        if file is not None:
            check_output_file(file)
