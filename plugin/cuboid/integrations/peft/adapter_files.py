"""PEFT's own files for adapters in a sharded model: one folder, written once, which plain PEFT loads."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file
from torch import nn

from cuboid.checkpoint.format.bounded_files import read_object
from cuboid.checkpoint.format.tensor_file import TensorFile
from cuboid.errors import CheckpointError, UnsupportedModelError
from cuboid.failures.rank_agreement import run_on_all_ranks
from cuboid.models.sharded.sharded_model import mesh_of, sharding_of, unwrap
from cuboid.tensor3d.sharding.sharding_spec import take_shard
from cuboid.weights.save import full_values
from cuboid.weights.state_dict_map import sharding_specs

#: What PEFT's files put before the names of a model's parameters.
PREFIX = "base_model.model."
#: A factor, or a module that an adapter trains whole, in a parameter's name, with the adapter's name behind it.
_OF_ADAPTER = re.compile(
    r"(?P<factor>\.lora_\w+|\.ia3_l|\.trainable_tokens_delta)?(?(factor)|\.modules_to_save)\.(?P<adapter>[^.]+)(?=\.|$)"
)
#: The begin of what an adapter adds to one of its ``target_modules``.
_FACTOR = re.compile(r"\.(?:lora_|ia3_l)")
#: A factor that is kept as the transpose of the file's; see :class:`~cuboid.tensor3d.low_rank_embedding.TokenRows`.
_TRANSPOSED = re.compile(r"\.lora_embedding_A(\.|$)")
#: Options that decide which tensors an adapter has, and what they mean.
_IDENTITY = (
    "peft_type",
    *("r", "lora_alpha", "use_rslora", "use_dora", "lora_bias", "bias", "rank_pattern", "alpha_pattern"),
    *("modules_to_save", "trainable_token_indices", "feedforward_modules", "target_parameters"),
)


class AdapterFiles:
    """Writes and reads the adapters of a sharded model; see ``ModelState.adapters``."""

    prefix = PREFIX

    def state(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The whole tensors of all adapters, by their names in PEFT's model, on the first rank; collective."""
        inner: Any = unwrap(model)
        kept = {id(parameter) for _, parameter in _parameters(inner, inner.peft_config)}

        def value(parameter: torch.Tensor) -> torch.Tensor | None:
            return parameter.detach() if id(parameter) in kept else None

        # Tied layers share a parameter of an adapter, which files have under its first name.
        first = {name for name, _ in inner.named_parameters()}
        others = {name for name, _ in inner.named_parameters(remove_duplicate=False)} - first
        values = {name: tensor for name, tensor in full_values(inner, value).items() if name not in others}
        return {f"{PREFIX}{name}": _in_file(name, tensor) for name, tensor in values.items()}

    def write(
        self, model: nn.Module, state: dict[str, torch.Tensor], folder: Path, selected: Sequence[str] | None = None
    ) -> None:
        """Write adapters as PEFT does; on the rank that has their state.

        Args:
            model: sharded.
            state: the result of :meth:`state`.
            folder: exists. Adapters with another name than "default" get folders of their own in it.
            selected: names of adapters; by default all.

        Raises:
            CheckpointError: the model has no adapter of such a name.
        """
        inner: Any = unwrap(model)
        for name in selected_names(inner.peft_config, selected):
            config = inner.peft_config[name]
            target = folder_of(folder, name)
            target.mkdir(exist_ok=True)
            # Not by PEFT's own function, which asks the Hub about the model's vocabulary.
            tensors = {_saved_name(key): x.contiguous() for key, x in state.items() if _is_in_files(key, name, config)}
            save_file(tensors, target / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
            saved = copy.copy(config)
            saved.target_modules = _targets(config, tensors, inner.cuboid.whole_model.parameters)
            write_config(saved, inner, target)

    def load(self, model: nn.Module, folder: Path) -> None:
        """Load the model's adapters from a folder of PEFT. Each rank reads them and keeps its shards; nothing is sent.

        Raises:
            CheckpointError: the folder has no such adapters, or they don't fit the model's.
        """
        inner: Any = unwrap(model)
        shardings, mesh = sharding_specs(inner), mesh_of(inner)
        read: list[tuple[nn.Parameter, torch.Tensor]] = []
        for adapter, config in inner.peft_config.items():
            source = folder_of(folder, adapter)
            check_same(config, source)
            with TensorFile(source / SAFETENSORS_WEIGHTS_NAME) as file:
                for name, parameter in _parameters(inner, {adapter: config}):
                    key = _saved_name(f"{PREFIX}{name}")
                    sharding, spec = shardings.get(name), file.specs.get(key)
                    shape = tuple(parameter.shape) if sharding is None else sharding.shape
                    if _TRANSPOSED.search(name):
                        shape = shape[::-1]
                    if spec is None or tuple(spec.shape) != shape:
                        has = "nothing" if spec is None else f"a tensor of shape {list(spec.shape)}"
                        raise CheckpointError(
                            f"{file.path}: for {key}, of shape {list(shape)} in the model, it has {has}; make the "
                            "adapter with the same options and target_modules"
                        )
                    full = _in_file(name, file.read(key))
                    read.append((parameter, full if sharding is None else take_shard(full, sharding, mesh)))
        with torch.no_grad():
            for parameter, value in read:
                parameter.copy_(value)


#: Arguments of ``PeftModel.save_pretrained`` that have one value here.
_FIXED = {"safe_serialization": True, "save_embedding_layers": False, "path_initial_model_for_weight_conversion": None}


def save_adapters(model: Any, folder: str | Path, **arguments: Any) -> None:
    """``save_pretrained`` of PEFT's model around a sharded one, or of that itself; the first rank writes. Collective.

    Args:
        model: PEFT's, or the sharded one, which like transformers' writes its adapters.
        folder: made if missing.
        arguments: further arguments of the call. If there is a ``state_dict`` of whole tensors, or an empty one on
            other ranks, as trainers pass it, then the rank that has the tensors writes them, without communication.

    Raises:
        CheckpointError: on every rank, if the first one can't write.
        UnsupportedModelError: an argument has no rule.
    """
    for name, value in _FIXED.items():
        if arguments.get(name, value) not in (value, "auto"):
            raise UnsupportedModelError(
                f"PeftModel.save_pretrained({name}={arguments[name]!r}) has no rule for a model on a mesh or in a "
                "pipeline; leave it out"
            )
    mesh, files, path = mesh_of(model), sharding_of(model).state.adapters or AdapterFiles(), Path(folder)

    def write(state: dict[str, torch.Tensor]) -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
            if hasattr(model, "create_or_update_model_card"):
                model.create_or_update_model_card(str(path))
            files.write(model, state, path, arguments.get("selected_adapters"))
        except OSError as error:
            raise CheckpointError(f"{path}: can't be written: {error.strerror or error}") from error

    full_state = arguments.get("state_dict")
    if full_state is not None and _is_whole(model, full_state, files.prefix):
        if full_state and arguments.get("is_main_process", mesh.rank == 0):
            write(full_state)
        return
    mesh.connect()
    state = files.state(model)
    mesh.connect_host()
    # All ranks return only when the files are complete, so that each can read them.
    run_on_all_ranks(lambda: write(state) if mesh.rank == 0 else None, mesh, what="PeftModel.save_pretrained")


def _in_file(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A whole parameter as files have it; or the other way round."""
    return tensor.t() if _TRANSPOSED.search(name) else tensor


def _is_whole(model: Any, state: Mapping[str, torch.Tensor], prefix: str) -> bool:
    """Whether a state dict has whole tensors of adapters."""
    specs = sharding_specs(unwrap(model))
    shapes = {f"{prefix}{name}": spec.shape[:: -1 if _TRANSPOSED.search(name) else 1] for name, spec in specs.items()}
    return all(tuple(x.shape) == shapes.get(name, tuple(x.shape)) for name, x in state.items())


def _parameters(inner: Any, configs: Mapping[str, PeftConfig]) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that the files of adapters hold, by their names in the model."""
    for name, parameter in inner.named_parameters():
        if any(_is_in_files(name, adapter, config) for adapter, config in configs.items()):
            yield name, parameter


def _is_in_files(name: str, adapter: str, config: Any) -> bool:
    """Whether an adapter's files hold a parameter: one of its own, or a bias of the model that it trains."""
    owner = _adapter_of(name)
    if owner is not None or not name.endswith(".bias"):
        return owner == adapter
    trained = getattr(config, "bias", "none")
    # Of "lora_only", the biases of the layers that have adapters.
    return trained == "all" or (trained.endswith("_only") and name.endswith(".base_layer.bias"))


def _adapter_of(name: str) -> str | None:
    """The adapter that a parameter ``….lora_A.<adapter>.weight`` belongs to; None for the model's own."""
    part = _OF_ADAPTER.search(name)
    return None if part is None else part["adapter"]


def _saved_name(name: str) -> str:
    """A parameter's name in PEFT's files, which don't name the adapter."""
    saved = _OF_ADAPTER.sub(lambda part: part["factor"] or "", name, count=1)
    # Once a parameter by itself, before it was one of a module.
    return saved.removesuffix(".weight") if saved.endswith(".lora_magnitude_vector.weight") else saved


def _targets(config: Any, tensors: Iterable[str], parameters: Iterable[str]) -> Any:
    """``target_modules`` for a file: those asked for, and layers of other stages that they don't name.

    On a stage, PEFT makes a list of its own layers out of ``"all-linear"``.

    Args:
        config: the adapter's.
        tensors: names of those in the file.
        parameters: names of those of the whole model, with its adapters.
    """
    asked = config.target_modules
    if not isinstance(asked, set | list | tuple):
        return asked
    layers = {_FACTOR.split(name.removeprefix(PREFIX), maxsplit=1)[0] for name in tensors if _FACTOR.search(name)}
    # Experts and routers aren't named there, but in ``target_parameters``.
    ends = tuple(f".{target}" for target in getattr(config, "target_parameters", None) or ())
    plain = [name.replace(".base_layer", "") for name in parameters]
    owners = {name.rpartition(".")[0] for name in plain if f".{name}".endswith(ends)}
    layers = {name for name in layers if name.replace(".base_layer", "") not in owners}
    missing = {layer for layer in layers if not any(layer == key or layer.endswith(f".{key}") for key in asked)}
    return sorted({*asked, *missing})


def selected_names(known: Iterable[str], selected: Sequence[str] | None) -> list[str]:
    """Names of the adapters to write: by default all.

    Raises:
        CheckpointError: there is none of such a name.
    """
    names = list(known)
    unknown = next((name for name in selected or () if name not in names), None)
    if unknown is not None:
        raise CheckpointError(f"there is no adapter {unknown!r}; there are {', '.join(names)}")
    return names if selected is None else list(selected)


def folder_of(folder: Path, adapter: str) -> Path:
    """Where PEFT keeps an adapter's files."""
    return folder if adapter == "default" else folder / adapter


def write_config(config: PeftConfig, inner: Any, folder: Path) -> None:
    """Write a copy of an adapter's config, as PEFT does: of its base model, for inference. The copy is changed."""
    config.base_model_name_or_path = config.base_model_name_or_path or inner.config._name_or_path or None
    config.inference_mode = True
    auto_mapping = None
    if config.task_type is None:
        # By which PEFT finds the class of the base model.
        base = inner.cuboid.base
        auto_mapping = {"base_model_class": base.__name__, "parent_library": base.__module__}
    config.save_pretrained(str(folder), auto_mapping_dict=auto_mapping)


def check_same(config: PeftConfig, folder: Path, options: Sequence[str] = _IDENTITY) -> None:
    """Check that a folder's adapter has the same options as a model's, of those that say what it is.

    Raises:
        CheckpointError: it hasn't, or there is none.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: has no {CONFIG_NAME}, but the model has adapters of PEFT; load a checkpoint of a run with the "
            "same adapters"
        )
    saved = read_object(path)
    for key in options:
        value = getattr(config, key, None)
        if _as_set(saved.get(key)) != _as_set(value):
            raise CheckpointError(
                f"{path}: {key} is {saved.get(key)!r}, and {value!r} in the model's adapter; make the adapter with the "
                "same options"
            )


def _as_set(value: Any) -> Any:
    """An option's value without the order of names: PEFT appends a classifier's heads to those that it has read."""
    return frozenset(map(str, value)) if isinstance(value, list | tuple | set) else value
