"""Open a DeepSpeed checkpoint: ``mp_rank_XX`` with any ZeRO stage, universal checkpoints, and ``PipelineModule``."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch
from transformers import PreTrainedModel

from cuboid.checkpoint.format.folder import read_pointer
from cuboid.convert.deepspeed.model_states import Files, ModelStates, files_in, read_states
from cuboid.convert.deepspeed.pipeline_module import is_pipeline, model_names, read_layers
from cuboid.convert.deepspeed.plain_fp32 import plain_masters
from cuboid.convert.deepspeed.zero import universal_masters, zero_masters
from cuboid.convert.formats.block_tensors import BlockTensors, differ
from cuboid.convert.formats.hugging_face import pickled_tensors
from cuboid.convert.formats.parameter_names import as_stored, blank_model, state_specs
from cuboid.convert.formats.pickles import PickledTensor
from cuboid.errors import CheckpointError, CuboidError

#: What the code below raises when a pickle has values of other types than DeepSpeed writes.
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError)
LATEST = ("latest", "latest_universal")


def tag_folder(folder: Path) -> Path | None:
    """The folder of DeepSpeed's files: this one, or the one that ``latest`` in it names; None if there is neither."""
    pointers = [read_pointer(path) for name in LATEST if (path := folder / name).is_file()]
    candidates = [folder, *(folder / name for name in pointers if name)]
    return next((path for path in candidates if files_in(path)), None)


def open_deepspeed(
    folder: Path, config: Path, stack: ExitStack, *, dtype: torch.dtype | None, trusted: bool
) -> BlockTensors:
    """The full tensors of a DeepSpeed checkpoint, by their names in Hugging Face checkpoints.

    If the optimizer has fp32 master weights, these are taken, and all tensors are in float32.

    Args:
        folder: the folder that :func:`tag_folder` found.
        config: the model's ``config.json``, or a folder with one.
        stack: closes the files on exit.
        dtype: the dtype to which the weights will be cast, if any.
        trusted: whether pickles may be loaded.

    Raises:
        CheckpointError: pickles aren't trusted; files are missing or damaged; or they aren't of this model.
    """
    try:
        return _open(folder, config, stack, dtype, trusted)
    except CuboidError:
        raise
    except (*_MALFORMED, AssertionError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{folder}: holds what DeepSpeed doesn't write: {reason}") from error


def _open(folder: Path, config: Path, stack: ExitStack, dtype: torch.dtype | None, trusted: bool) -> BlockTensors:
    files = files_in(folder)
    states = [read_states(files, rank, trusted=trusted) for rank in files.models]
    tensors = {name: tensor for state in states for name, tensor in state.tensors.items()}
    if files.layers:
        tensors |= read_layers(files, trusted=trusted)
    masters = _masters(files, states, dtype, trusted)
    model = blank_model(config)
    tensors_in_files = pickled_tensors(_merge(tensors, masters), stack)
    if is_pipeline(tensors_in_files.specs):
        tensors_in_files = tensors_in_files.renamed(model_names(model, tensors_in_files.specs, folder))
    shared = {name for state in states for name in state.shared}
    checked = _checked(model, tensors_in_files, shared, folder)
    floating = [name for name, spec in checked.specs.items() if spec.dtype.is_floating_point]
    return as_stored(model, checked.cast(dict.fromkeys(floating, torch.float32)) if masters else checked)


def _masters(
    files: Files, states: list[ModelStates], dtype: torch.dtype | None, trusted: bool
) -> dict[str, PickledTensor]:
    if files.universal:
        return universal_masters(files.folder, states, trusted=trusted)
    masters: dict[str, PickledTensor] = {}
    for rank, state in zip(files.models, states, strict=True):
        if rank in files.optimizers:
            # Parameters that several stages share have the same values on all; the first stage's are taken.
            masters = {**zero_masters(files.optimizers[rank], state, trusted=trusted), **masters}
        elif state.groups:
            raise CheckpointError(f"{files.folder}: ZeRO's weights are in *_optim_states.pt, and there are none")
        elif any(tensor.spec.dtype not in (dtype, torch.float32) for tensor in state.tensors.values()):
            masters |= plain_masters(state, files.models[rank][0])
    return masters


def _merge(tensors: dict[str, PickledTensor], masters: dict[str, PickledTensor]) -> dict[str, PickledTensor]:
    """All tensors, with master weights in place of the model's weights of the same names."""
    if is_pipeline(masters) and any(name.startswith("tied_modules.") for name in masters):
        # The layers' files hold tied weights a second time, under the number of each layer that uses them.
        numbers = {name.partition(".")[0] for name in masters}
        tensors = {name: tensor for name, tensor in tensors.items() if name.partition(".")[0] in numbers}
    return {**tensors, **masters}


def _checked(model: PreTrainedModel, tensors: BlockTensors, shared: set[str], folder: Path) -> BlockTensors:
    """Check the tensors against the model; returns the model's tensors, with tied ones only once.

    It is an error if one is missing, foreign or of another shape, or if two that the model ties differ.
    """
    kind, model_specs = type(model).__name__, state_specs(model)
    hint = "is --model the one that was trained?"
    for name, spec in tensors.specs.items():
        if name not in model_specs:
            raise CheckpointError(f"{folder}: has a tensor {name}, which {kind} doesn't know; {hint}")
        shape = model_specs[name].shape
        if spec.shape != shape:
            raise CheckpointError(
                f"{folder}: {name} is of shape {list(spec.shape)}, but {kind} has {list(shape)}; {hint}"
            )
    ties: dict[str, str] = model.all_tied_weights_keys
    for name in model_specs:
        if name not in tensors.specs and ties.get(name) not in tensors.specs:
            raise CheckpointError(f"{folder}: has no tensor for {name} of {kind}; {hint}")
    twice = [name for name, source in ties.items() if name in tensors.specs and source in tensors.specs]
    for name in twice:
        # Names that DeepSpeed itself lists as shared are one parameter, and need no comparison.
        if name not in shared and differ(tensors, name, ties[name]):
            raise CheckpointError(
                f"{folder}: {name} and {ties[name]} differ, but --model ties them; a config.json with "
                '"tie_word_embeddings": false keeps both'
            )
    return tensors.renamed({name: name for name in model_specs if name in tensors.specs and name not in twice})
