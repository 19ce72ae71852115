"""The files beside a checkpoint's tensors: configs, custom code, the tokenizer."""

from __future__ import annotations

import copy
import logging
import shutil
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import cached_file

from cuboid.checkpoint.format.bounded_files import leads_outward

logger = logging.getLogger(__name__)

#: Files that tokenizers and processors of the various models may have.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
)


def write_auxiliary_files(model: Any, folder: Path) -> None:
    """Write what ``PreTrainedModel.save_pretrained`` writes beside the weights, and the tokenizer's files."""
    # A copy, because the model may be training meanwhile.
    config = copy.deepcopy(model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [model.cuboid.base.__name__]
    if model.is_remote_code():
        custom_object_save(model, folder, config=config)
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    copy_tokenizer(config._name_or_path, folder)


def keep_own_tokenizer(new: Path, folder: Path) -> None:
    """Don't replace a tokenizer that the target folder has: the user may have added tokens to it.

    Args:
        new: folder of the files to be published; its tokenizer is removed.
        folder: the target.
    """
    if any((folder / name).exists() for name in TOKENIZER_FILES):
        for name in TOKENIZER_FILES:
            (new / name).unlink(missing_ok=True)


def copy_tokenizer(source: str | Path, folder: Path) -> None:
    """Copy the tokenizer's files of a checkpoint, if it has any.

    Args:
        source: a folder, or the name of a model whose files may be in the hub's cache.
        folder: the target.
    """
    # A config that was read from a file has the file's path as its name.
    if not source or Path(source).is_file():
        return
    for name in TOKENIZER_FILES:
        path = cached_file(
            str(source),
            name,
            local_files_only=True,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
        if path is None or Path(path).resolve() == (folder / name).resolve():
            continue
        if leads_outward(Path(path)):
            # Not an error, so that a trained model is saved. Checkpoints that Cuboid loads itself have no such links.
            logger.warning("%s: is a link that leads out of its folder; it isn't copied to %s", path, folder)
        else:
            shutil.copyfile(path, folder / name)
