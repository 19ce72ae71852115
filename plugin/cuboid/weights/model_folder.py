"""Check a model's folder before transformers reads it.

So errors name the damaged file, and a config that would take forever or all memory to build is rejected at once. If the
folder has a manifest, its files are compared with it; Hugging Face's own checkpoints have no checksums.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig

from cuboid.checkpoint.format.bounded_files import open_regular, read_object, reject_outward_links
from cuboid.checkpoint.format.manifest import MANIFEST, Manifest, check_contents, check_sizes
from cuboid.checkpoint.format.state_file import STATE, TENSORS, reject_lost_manifest
from cuboid.checkpoint.format.tensor_file import TensorFile, TensorSpec, read_specs
from cuboid.checkpoint.format.weight_index import INDEX_SUFFIX, SINGLE, read_index
from cuboid.checkpoint.save_plan import OPTIMIZER
from cuboid.checkpoint.save_planner import assign
from cuboid.distributed.mesh import current_rank, current_world_size
from cuboid.errors import CheckpointError, CuboidError
from cuboid.weights.auxiliary_files import TOKENIZER_FILES

CONFIG = "config.json"
#: Exceptions that aren't caused by damaged files.
_NOT_DAMAGE = (CuboidError, MemoryError, torch.OutOfMemoryError)
_BESIDE = ("generation_config.json", *TOKENIZER_FILES)
#: Config keys that are numbers of modules to build.
_COUNTS = re.compile(r"(num|n)_\w*(layer|expert|head|block|stage)\w*|\w*_layers?|depth")
_MOST_MODULES = 100_000
_ROWS_AT_ONCE = 4096
#: Config keys that are the number of decoder layers.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
#: The name of a model on the hub, with or without its owner.
_HUB_NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*(?<!\.json)")
#: A number in a parameter's dotted name: the index of a layer or an expert.
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def folder_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Path | None:
    """The folder that a call of ``from_pretrained`` with these arguments reads; None for a name on the hub."""
    path = args[0] if args else kwargs.get("pretrained_model_name_or_path")
    if not isinstance(path, str | os.PathLike) or "\0" in os.fspath(path):
        return None
    folder = Path(path) / (kwargs.get("subfolder") or "")
    return folder if folder.is_dir() else None


def check_exists(path: Path) -> None:
    """Check that a model's folder or file exists; commands don't take names of models on the hub.

    Raises:
        CheckpointError: it doesn't. If the path may be such a name, the message says how to download the model.
    """
    if os.path.lexists(path):
        return
    could_be_on_hub = _HUB_NAME.fullmatch(str(path)) and (path.parent == Path() or not path.parent.exists())
    hint = f"; if it is a model on the hub, download it first: hf download {path} --local-dir {path.name}"
    raise CheckpointError(f"{path}: does not exist{hint if could_be_on_hub else ''}")


def check_model_folder(folder: Path, *, variant: str | None = None, weights: bool = True) -> None:
    """Check a model's files as far as possible without reading all of the weights.

    Args:
        folder: of a Hugging Face checkpoint.
        variant: of its weights, as in ``from_pretrained``.
        weights: whether to check the weights' headers too, not only the files beside them.

    Raises:
        CheckpointError: names the file that is missing, damaged or malformed.
    """
    reject_outward_links(folder)
    path = folder / CONFIG
    config = read_config(path)
    for beside in (folder / name for name in _BESIDE if os.path.lexists(folder / name)):
        if beside.suffix == ".json":
            read_object(beside, numbers_only=False, unique=False)
            continue
        try:
            os.close(open_regular(beside))
        except OSError as error:
            raise CheckpointError(f"{beside}: can't be read: {error.strerror}") from None
    if weights:
        tensors = sum(len(specs) for specs in _tensors_in(folder, variant))
        layers = next((config[key] for key in _LAYERS if isinstance(config.get(key), int)), 0)
        if tensors and layers > tensors:
            raise CheckpointError(
                f"{path}: says that there are {layers:,} layers, but the weights beside it are {tensors:,} tensors; it "
                "was damaged, or is another model's"
            )


def read_config(path: Path) -> Mapping[str, Any]:
    """A model's ``config.json``, after checking that its counts of layers and other modules are plausible.

    Raises:
        CheckpointError: it is missing or damaged, or has an implausible count.
    """
    if not os.path.lexists(path):
        check_exists(path.parent)
        raise CheckpointError(f"{path.parent}: is not the folder of a Hugging Face checkpoint: no {CONFIG} in it")
    version: tuple[int, ...] = ()
    # If this fails, so does reading, with an error that says why.
    with suppress(OSError):
        status = path.stat()
        version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    return _parsed_config(path, version)


# One load asks for it in several places.
@functools.lru_cache(maxsize=4)
def _parsed_config(path: Path, _version: tuple[int, ...]) -> Mapping[str, Any]:
    # Some configs have ``Infinity`` for a limit.
    config = read_object(path, numbers_only=False)
    sections = [config]
    for section in sections:
        sections += [value for value in section.values() if isinstance(value, dict)]
        counts = {key: value for key, value in section.items() if type(value) is int and _COUNTS.fullmatch(key)}
        for key, value in counts.items():
            if value > _MOST_MODULES or (value < 0 and key in _LAYERS):
                raise CheckpointError(f"{path}: {key} is {value}, but no model has so many")
    return config


def model_config(path: Path, *, trust_remote_code: bool = False) -> Any:
    """A model's config as an instance of transformers' class.

    Args:
        path: a folder with a ``config.json``, or the file.
        trust_remote_code: whether code beside it may be run.

    Raises:
        CheckpointError: it is missing or damaged, or transformers can't read it, or needs code that isn't trusted.
    """
    check_exists(path)
    file = path / CONFIG if path.is_dir() else path
    read_config(file)
    with as_damage_of(file):
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)


def untrusted(path: Path | str, error: BaseException | None) -> CheckpointError | None:
    """The error to raise for transformers' refusal to run a model's own code; None for any other exception."""
    if not isinstance(error, ValueError) or isinstance(error, CuboidError) or "trust_remote_code" not in str(error):
        return None
    return CheckpointError(
        f"{path}: needs code that comes with the model, which isn't run unless you trust it: read it, then give "
        "--trust-remote-code (in a script, trust_remote_code=True); `cuboid convert` never runs it"
    )


@contextmanager
def without_own_code(path: Path | str) -> Iterator[None]:
    """Context for calls with ``trust_remote_code=False``: raises a sentence of ours where a model needs its own code.

    With None, transformers would ask on standard input, each rank by itself, and run the code after a ``y``.
    """
    try:
        yield
    except ValueError as error:
        refused = untrusted(path, error)
        if refused is None:
            raise
        raise refused from None


@contextmanager
def as_damage_of(path: Path | str) -> Iterator[None]:
    """Context that turns exceptions of transformers and the libraries below into a :class:`CheckpointError`.

    Its message names the path, which is what the user can do something about.
    """
    try:
        yield
    except _NOT_DAMAGE:
        raise
    except Exception as error:  # all of them, because tokenizers raises plain ``Exception``
        refused = untrusted(path, error)
        if refused is not None:
            raise refused from None
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{path}: can't be loaded: {type(error).__name__}: {reason}") from error


def check_loaded(model: Any, info: Mapping[str, Any], folder: Path | None) -> None:
    """Check that all loaded tensors had the shapes of the model's, and that it has all layers that its folder has.

    transformers only warns about surplus ones, so a damaged count in the config would give a smaller model.

    Args:
        model: as it was loaded, or a stage of it.
        info: what transformers tells of the load.
        folder: that it was loaded from; None if there is none with a config.

    Raises:
        CheckpointError: names the first tensor of another shape; or the folder's config has fewer layers, or experts,
            than its weights.
    """
    for name, *shapes in info["mismatched_keys"]:
        difference = f" ({' and '.join(str(list(shape)) for shape in shapes)})" if shapes else ""
        raise CheckpointError(f"{model.config._name_or_path}: {name} is of another shape than the model's{difference}")
    if folder is None:
        return
    # If the caller has changed a count, fewer layers are intended.
    stored, in_model = read_config(folder / CONFIG), model.config.to_dict()
    if any(in_model.get(key) != value for key, value in stored.items() if _COUNTS.fullmatch(key)):
        return
    known = {_NUMBER.sub("*", name) for name in model.state_dict()}
    unexpected = sorted(info["unexpected_keys"])
    beyond = next((name for name in unexpected if _NUMBER.search(name) and _NUMBER.sub("*", name) in known), None)
    if beyond is not None:
        raise CheckpointError(
            f"{folder}: holds {beyond}, but by its {CONFIG} there are fewer of these; that file was damaged, or is of "
            "another model"
        )


def _weight_files(folder: Path, variant: str | None) -> tuple[Path, Path]:
    """Where a folder's weights are: in one file or, if there is none, in the files that an index lists."""
    marked = "" if variant is None else f".{variant}"
    index = f"{SINGLE}.index{marked}.json"
    assert marked or index == SINGLE + INDEX_SUFFIX
    return folder / SINGLE.replace(".", f"{marked}.", 1), folder / index


def _tensors_in(folder: Path, variant: str | None = None) -> Iterator[Mapping[str, TensorSpec]]:
    """The tensors of each safetensors file, after checking its header; nothing if the folder has none."""
    single, index = _weight_files(folder, variant)
    if os.path.lexists(single):
        yield read_specs(single)
        return
    weight_map = read_index(index) if os.path.lexists(index) else {}
    for name in dict.fromkeys(weight_map.values()):
        specs = read_specs(folder / name)
        missing = next((tensor for tensor, place in weight_map.items() if place == name and tensor not in specs), None)
        if missing is not None:
            raise CheckpointError(f"{folder / name}: has no tensor {missing}, though {index.name} says so")
        yield specs


def stored_alike(folder: Path, first: str, second: str, *, variant: str | None = None) -> bool | None:
    """Whether two tensors of a folder's safetensors files are equal; None if it doesn't have both under these names.

    Reading stops at the first difference.
    """
    single, index = _weight_files(folder, variant)
    weight_map = read_index(index) if os.path.lexists(index) and not os.path.lexists(single) else {}
    paths = [folder / weight_map.get(name, single.name) for name in (first, second)]
    if not all(map(os.path.lexists, paths)):
        return None
    with TensorFile(paths[0]) as one, TensorFile(paths[1]) as other:
        if first not in one.specs or second not in other.specs:
            return None
        if one.specs[first].shape != other.specs[second].shape:
            return False
        rows = one.specs[first].shape[0]
        parts = [[slice(start, min(start + _ROWS_AT_ONCE, rows))] for start in range(0, rows, _ROWS_AT_ONCE)]
        return all(torch.equal(one.read(first, part), other.read(second, part)) for part in parts)


def weights_bytes(folder: Path, dtype: torch.dtype) -> int:
    """Size of a folder's weights in a dtype; 0 if they aren't in safetensors files."""
    return sum(math.prod(spec.shape) * dtype.itemsize for specs in _tensors_in(folder) for spec in specs.values())


def verify_model_folder(folder: Path, *, weights: bool = True) -> None:
    """Compare a model's files with the checksums in the folder's manifest, if it has one.

    Args:
        folder: of a Hugging Face checkpoint, which may be a checkpoint of cuboid.
        weights: whether to compare the weights too; the files are divided among the ranks of a process group.

    Raises:
        CheckpointError: on the rank that finds a file missing, damaged or edited; names it.
    """
    reject_lost_manifest(folder)
    if not os.path.lexists(folder / MANIFEST):
        return
    manifest = Manifest.read(folder)
    check_sizes(folder, manifest)
    names = [name for name in model_files(manifest) if weights or not is_weights(name)]
    if weights and dist.is_available() and dist.is_initialized():
        readers = assign([manifest.files[name].bytes for name in names], range(current_world_size()))
        names = [name for name, reader in zip(names, readers, strict=True) if reader == current_rank()]
    try:
        check_contents(folder, manifest, names)
    except CheckpointError as error:
        raise CheckpointError(
            f'{error}. Take another checkpoint; or, if it was edited on purpose, load it with "checkpoint": '
            '{"verify": false} in the config'
        ) from None


def is_weights(name: str) -> bool:
    """Whether a file has weights, or is an index of such files."""
    return name.endswith((".safetensors", f".safetensors{INDEX_SUFFIX}"))


def model_files(manifest: Manifest) -> list[str]:
    """A checkpoint's files without those of the training state."""
    return [name for name in manifest.files if name not in (STATE, TENSORS) and not name.startswith(f"{OPTIMIZER}/")]
