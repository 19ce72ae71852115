"""Load the tokenizer beside a checkpoint, or one of a folder of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from cuboid.errors import CheckpointError
from cuboid.weights.auxiliary_files import TOKENIZER_FILES
from cuboid.weights.model_folder import as_damage_of, check_exists, check_model_folder, verify_model_folder


def load_tokenizer(model: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer beside a checkpoint.

    Raises:
        CheckpointError: no such folder, no model in it, or no tokenizer.
    """
    check_model_folder(model, weights=False)
    verify_model_folder(model, weights=False)
    return tokenizer_in(model, trust_remote_code=trust_remote_code)


def tokenizer_in(folder: Path, *, remedy: str = "copy its files there", trust_remote_code: bool = False) -> Any:
    """The tokenizer in a folder, which needn't be a checkpoint's.

    Args:
        folder: with the files that transformers loads a tokenizer from.
        remedy: advice for the error message if there are none.
        trust_remote_code: whether code beside them may be run.

    Raises:
        CheckpointError: there is none.
    """
    check_exists(folder)
    names = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not names:
        raise CheckpointError(f"{str(folder)!r} has no tokenizer that transformers can load; {remedy}")
    # An error names the first file, which is the tokenizer itself if it is in one file.
    with as_damage_of(folder / names[0]):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
