"""Read DeepSpeed's ``*_model_states.pt``: names, shapes, buffers, frozen parameters, and which ones are shared."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cuboid.checkpoint.format.tensor_file import TensorSpec, check_sizes
from cuboid.convert.formats.pickles import Extent, PickledTensor, cut, extent_of, load_pickle, pickled_tensor
from cuboid.errors import CheckpointError

_NAME = re.compile(
    r"(?:(?:bf16_|fp16_)?zero_pp_rank_(?P<data>\d+)_)?mp_rank_(?P<model>\d+)_(?P<kind>model|optim)_states\.pt"
)
_LAYER = re.compile(r"layer_(?P<layer>\d+)(?:-model_(?P<model>\d+))?-model_states\.pt")
_EXPERT_KEYS = ("ds_autoep_layers", "autoep_layers")


@dataclass(frozen=True)
class Files:
    """DeepSpeed's files in a tag's folder."""

    folder: Path
    #: ``*_model_states.pt`` by model-parallel rank, then by data-parallel rank.
    models: Mapping[int, Sequence[Path]]
    #: ``*_optim_states.pt`` likewise.
    optimizers: Mapping[int, Sequence[Path]]
    #: ``layer_XX-model_states.pt`` by number.
    layers: Mapping[int, Path]
    #: Whether there are merged tensors under ``zero/``.
    universal: bool

    def __bool__(self) -> bool:
        return bool(self.models or self.layers)


def files_in(folder: Path) -> Files:
    """Find DeepSpeed's files in a folder; there may be none.

    Raises:
        CheckpointError: a rank's file is missing, or the model was split in a way that can't be merged.
    """
    by_kind: dict[str, dict[int, dict[int, Path]]] = {"model": {}, "optim": {}}
    layers: dict[int, Path] = {}
    for path in sorted(folder.glob("*_states.pt")):
        if named := _NAME.fullmatch(path.name):
            ranks = by_kind[named["kind"]].setdefault(int(named["model"]), {})
            ranks[int(named["data"] or 0)] = path
        elif named := _LAYER.fullmatch(path.name):
            # A second model-parallel rank's file of the same layer.
            if int(named["model"] or 0):
                raise _tensor_parallel(path)
            layers[int(named["layer"])] = path
        elif "expert" in path.name or "expp_rank" in path.name:
            raise CheckpointError(f"{path}: holds experts that are parallel, which convert can't put together")
    models, optimizers = (
        {rank: _in_order(ranks) for rank, ranks in sorted(by_kind[kind].items())} for kind in ("model", "optim")
    )
    return Files(folder, models, optimizers, layers, (folder / "zero").is_dir())


def _in_order(ranks: Mapping[int, Path]) -> list[Path]:
    for number in range(max(ranks) + 1):
        if number not in ranks:
            like = next(iter(ranks.values()))
            name = re.sub(r"pp_rank_\d+", f"pp_rank_{number}", like.name)
            raise CheckpointError(
                f"{like.with_name(name)}: is missing; data-parallel ranks up to {max(ranks)} have files"
            )
    return [ranks[number] for number in sorted(ranks)]


def _tensor_parallel(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path}: several ranks have parts of one layer (tensor parallelism), and the files don't say how they fit "
        "together. Make a universal checkpoint first (python -m deepspeed.checkpoint.ds_to_universal --input_folder … "
        "--output_folder …), and convert that"
    )


@dataclass
class ModelStates:
    """Contents of one model-parallel rank's ``*_model_states.pt``.

    Attributes:
        groups: shapes of the parameters in the optimizer's order, by group; empty without ZeRO.
        tensors: buffers and frozen parameters; without ZeRO, all tensors of the model.
        shared: names of parameters that are aliases of others, with the others' names.
        ranks: loaded contents of each data-parallel rank's file.
    """

    groups: list[dict[str, tuple[int, ...]]] = field(default_factory=list)
    tensors: dict[str, PickledTensor] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    ranks: list[Mapping[str, Any]] = field(default_factory=list)


def read_states(files: Files, model_rank: int, *, trusted: bool) -> ModelStates:
    """Read one model-parallel rank's files.

    Raises:
        CheckpointError: pickles aren't trusted, or a file isn't what its name says.
    """
    paths = files.models[model_rank]
    states = ModelStates(ranks=[_load(path, trusted) for path in paths])
    first, path = states.ranks[0], paths[0]
    for key in _EXPERT_KEYS:
        if first.get(key):
            raise CheckpointError(f"{path}: holds experts that are parallel, which convert can't put together")
    degree = (first.get("checkpoint_parallel_dimensions") or {}).get("tp_degree", 1)
    several_whole = len(files.models) > 1 and first.get("module") is not None
    if (degree > 1 or several_whole) and not files.universal:
        raise _tensor_parallel(path)
    states.shared = dict(first.get("shared_params") or {})
    for shapes in first.get("param_shapes") or ():
        states.groups.append({name: check_sizes(tuple(shape)) for name, shape in shapes.items()})
    optimized = {name for group in states.groups for name in group}
    for name, value in (first["module"] or {}).items():
        # Optimized parameters come from the optimizer's states. ZeRO 3 leaves an empty tensor in their place.
        if isinstance(value, torch.Tensor) and value.numel() and name not in optimized:
            states.tensors[name] = pickled_tensor(path, name, value)
    for name, shape in (first.get("frozen_param_shapes") or {}).items():
        chain = [_fragment(path, name, rank) for path, rank in zip(paths, states.ranks, strict=True)]
        states.tensors[name] = assembled(name, check_sizes(tuple(shape)), chain)
    return states


def _load(path: Path, trusted: bool) -> Mapping[str, Any]:
    loaded = load_pickle(path, trusted=trusted)
    if not isinstance(loaded, Mapping) or "module" not in loaded:
        raise CheckpointError(f"{path}: isn't what DeepSpeed saves of a model: it has no key 'module'")
    return loaded


def _fragment(path: Path, name: str, loaded: Mapping[str, Any]) -> Extent:
    fragments = loaded.get("frozen_param_fragments") or {}
    if name not in fragments:
        raise CheckpointError(f"{path}: has no part of {name}, which the first rank's file names")
    return extent_of(path, name, fragments[name])


def assembled(name: str, shape: tuple[int, ...], chain: Iterable[Extent]) -> PickledTensor:
    """A tensor made of the first elements of a chain of extents; the rest is padding.

    Raises:
        CheckpointError: the chain has too few elements.
    """
    parts = list(chain)
    count = math.prod(shape)
    if sum(part.count for part in parts) < count:
        raise CheckpointError(f"{parts[0].path if parts else name}: the parts of {name} have too few elements")
    return PickledTensor(TensorSpec(parts[0].dtype, shape), cut(parts, 0, count))
