"""Read the weights of a Hugging Face folder: safetensors or, if the user trusts them, ``pytorch_model.bin`` pickles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import torch

from cuboid.checkpoint.format.tensor_file import TensorFile
from cuboid.checkpoint.format.weight_index import INDEX, INDEX_SUFFIX, SINGLE, read_index
from cuboid.convert.formats.block_tensors import BlockTensors, row_ranges
from cuboid.convert.formats.pickles import ExtentReader, PickledTensor, load_pickle, pickled_tensor
from cuboid.errors import CheckpointError

PICKLE = "pytorch_model.bin"

T = TypeVar("T")


def weights_in(folder: Path) -> str | None:
    """The name of a folder's single weights file or index, if it has one; safetensors are preferred to pickles."""
    names = (SINGLE, INDEX, PICKLE, PICKLE + INDEX_SUFFIX)
    return next((name for name in names if (folder / name).is_file()), None)


def open_weights(folder: Path, stack: ExitStack, *, trusted: bool) -> BlockTensors:
    """The weights of a folder in which :func:`weights_in` found some; ``stack`` closes the files on exit.

    Pickles are loaded only if they are trusted.

    Raises:
        CheckpointError: a file is missing or damaged, or contradicts the index.
    """
    entry_file = weights_in(folder)
    assert entry_file is not None, "the caller has checked that there are weights"
    if entry_file.startswith(PICKLE):
        return _open_pickles(folder, entry_file, stack, trusted)
    return _open_files(folder, entry_file, stack)


def _open_files(folder: Path, entry_file: str, stack: ExitStack) -> BlockTensors:
    def tensors_of(name: str) -> Mapping[str, TensorFile]:
        file = TensorFile(folder / name)
        stack.callback(file.close)
        return dict.fromkeys(file.specs, file)

    files = _collect(folder, entry_file, tensors_of)

    def blocks(name: str) -> Iterator[torch.Tensor]:
        file = files[name]
        for rows in row_ranges(file.specs[name]):
            yield file.read(name, [rows])

    return BlockTensors({name: file.specs[name] for name, file in files.items()}, blocks)


def _open_pickles(folder: Path, entry_file: str, stack: ExitStack, trusted: bool) -> BlockTensors:
    def tensors_of(name: str) -> Mapping[str, PickledTensor]:
        path = folder / name
        state = load_pickle(path, trusted=trusted)
        if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
            raise CheckpointError(f"{path}: isn't a dict of tensors")
        return {key: pickled_tensor(path, key, value) for key, value in state.items()}

    return pickled_tensors(_collect(folder, entry_file, tensors_of), stack)


def pickled_tensors(tensors: Mapping[str, PickledTensor], stack: ExitStack) -> BlockTensors:
    """Tensors that are read from pickles; the stack closes the files."""
    reader = stack.enter_context(ExtentReader())
    return BlockTensors(
        {name: tensor.spec for name, tensor in tensors.items()}, lambda name: reader.blocks(tensors[name])
    )


def _collect(folder: Path, entry_file: str, tensors_of: Callable[[str], Mapping[str, T]]) -> dict[str, T]:
    """The tensors of a single file, or of the files that an index names, which must agree with it both ways."""
    if not entry_file.endswith(INDEX_SUFFIX):
        return dict(tensors_of(entry_file))
    weight_map = read_index(folder / entry_file)
    contents = {file: tensors_of(file) for file in dict.fromkeys(weight_map.values())}
    for name, file in weight_map.items():
        if name not in contents[file]:
            raise CheckpointError(f"{folder / file}: has no tensor {name}, though {entry_file} says so")
    for file, names in contents.items():
        for name in names:
            if weight_map.get(name) != file:
                raise CheckpointError(f"{folder / file}: has a tensor {name}, of which {entry_file} says nothing")
    return {name: contents[file][name] for name, file in weight_map.items()}
