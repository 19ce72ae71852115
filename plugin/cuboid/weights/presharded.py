"""Load a checkpoint that was sharded ahead of time, for clusters without a shared file system.

``cuboid convert --config`` writes such folders. A rank reads the file of its coordinate in the pipeline and its mesh;
its machine needs no other rank's file, only ``shards.json`` and the config, tokenizer and so on.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from cuboid.checkpoint.format.manifest import content_fault, size_fault
from cuboid.config.schema import CuboidConfig
from cuboid.distributed.mesh import Mesh
from cuboid.errors import CheckpointError
from cuboid.models.model_plan import RankPart
from cuboid.models.sharded.quantization import Quantization
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec, pad_shard
from cuboid.weights.model_folder import check_model_folder
from cuboid.weights.rank_folder import SHARDS, RankFolder, layout_in_words
from cuboid.weights.resolve import resolve


def from_rank_file(
    loading: type[PreTrainedModel],
    config: CuboidConfig,
    quantization: Quantization | None,
    folder: Path,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[type[PreTrainedModel], tuple[Any, ...], dict[str, Any]]:
    """Change a call of ``from_pretrained`` to read this rank's own file.

    Args:
        loading: the class that shards itself while it is loaded; see :mod:`cuboid.weights.load`.
        config: Cuboid's config.
        quantization: how the model's linear layers are stored in 4 bits.
        folder: with per-rank files.
        args, kwargs: of the call.

    Returns:
        The class and the arguments to call it with instead.

    Raises:
        CheckpointError: the files are for another layout than the config's, or this rank's file is missing.
        MeshError: the layout doesn't divide the world size.
    """
    document = RankFolder.read(folder)
    _check_config(document, config, folder)
    mesh = Mesh(document.mesh.shape, pipe=document.topology.pipe, placement=document.placement or None)
    name = document.file_of(mesh.coordinate)
    _check_file(folder / name, document, mesh)
    check_model_folder(folder, weights=False)
    if config.checkpoint.verify:
        for file_name, record in {name: document.files[name], **document.beside}.items():
            fault = content_fault(folder / file_name, record, SHARDS)
            if fault is not None:
                raise CheckpointError(fault)
    kwargs = dict(kwargs)
    settings = take_settings(loading, folder, kwargs)
    # transformers then reads this file instead of model.safetensors; ``finish_loading`` removes the key.
    settings.transformers_weights = name
    members = {"__module__": loading.__module__, "__qualname__": loading.__qualname__, "_cuboid_ranks": document}
    # The mesh "auto" becomes the one that the files were made for.
    config, base = config.on_mesh(document.mesh.shape), loading._cuboid_base  # type: ignore[attr-defined]
    members.update(
        _cuboid_folder=folder,
        _cuboid_decide=staticmethod(lambda model: resolve(model, config, base, quantization)),
    )
    return type(loading.__name__, (_FromRankFile, loading), members), args, {**kwargs, "config": settings}


def _check_config(document: RankFolder, config: CuboidConfig, folder: Path) -> None:
    """Reject a config for another mesh or for other stages, before a model is built."""
    mesh, placement = config.tensor_parallel.mesh, document.placement or tuple(range(document.topology.pipe))
    other_mesh = mesh != "auto" and mesh.shape != document.mesh.shape
    other_size = config.tensor_parallel.size not in (None, document.mesh.shape.size)
    other_places = placement != (0,) if config.pipeline is None else not config.pipeline.allows(placement)
    if other_mesh or other_size or other_places:
        asked = f"{config.tensor_parallel.size or 'any number of'} ranks" if mesh == "auto" else str(mesh.shape)
        raise _other_layout(document, f"a mesh of {asked} in {config.stages_in_words}", folder)


def _other_layout(document: RankFolder, asked: str, folder: Path) -> CheckpointError:
    return CheckpointError(
        f"{folder}: its files are for {document.describe()}, but the config asks for {asked}; run `cuboid convert` "
        "with this config, or load with the one that the files were made for"
    )


def _check_file(path: Path, document: RankFolder, mesh: Mesh) -> None:
    who = f"rank {mesh.rank} of {mesh.topology.world_size}"
    if not path.is_file():
        raise CheckpointError(f"{path}: is missing, and {who} reads it")
    if path.name not in document.files:
        raise CheckpointError(f"{path.parent / SHARDS}: doesn't list {path.name}, which {who} reads")
    fault = size_fault(path, document.files[path.name])
    if fault is not None:
        raise CheckpointError(fault)


def take_settings(cls: type[PreTrainedModel], folder: Path | None, kwargs: dict[str, Any]) -> PretrainedConfig:
    """Take the config out of the kwargs of a ``from_pretrained`` call, updated with those that are its keys."""
    asked = kwargs.pop("config", None)
    if isinstance(asked, PretrainedConfig):
        return copy.deepcopy(asked)
    assert cls.config_class is not None, "a model has a config"
    settings: PretrainedConfig = cls.config_class.from_pretrained(folder if asked is None else asked)
    for name in [name for name in kwargs if name in settings.to_dict() and name not in ("dtype", "torch_dtype")]:
        setattr(settings, name, kwargs.pop(name))
    return settings


class _FromRankFile:
    """Mixed into a ``LoadingModel`` class: its parameters are loaded as shards, not as slices of full tensors."""

    _cuboid_ranks: RankFolder
    _cuboid_folder: Path
    # From the ``LoadingModel`` class.
    cuboid_part: RankPart

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[safe-super]
        # Hidden from the ``LoadingModel`` class, which would slice the parameters once more.
        self._parallel, self.cuboid_part.parallel = self.cuboid_part.parallel, None
        _check_layouts(self)
        for module, name, _ in self._cut_parameters():
            parameter = getattr(module, name)
            module.register_parameter(name, nn.Parameter(parameter.to_local(), requires_grad=parameter.requires_grad))

    def _cut_parameters(self: Any) -> Iterable[tuple[nn.Module, str, ShardingSpec]]:
        return () if self._parallel is None else self._parallel.parameters_of(self)

    def _move_missing_keys_from_meta_to_device(self: Any, *args: Any) -> None:
        super()._move_missing_keys_from_meta_to_device(*args)  # type: ignore[misc]
        for module, name, spec in self._cut_parameters():
            loaded = getattr(module, name)
            shard = nn.Parameter(
                pad_shard(loaded.detach(), spec, self.cuboid_part.plan.mesh.shape), loaded.requires_grad
            )
            shard._is_hf_initialized = True  # type: ignore[attr-defined]
            module.register_parameter(name, shard)
        self.cuboid_part.parallel = self._parallel
        del self._parallel

    def finish_loading(self: Any) -> None:
        """Turn into a sharded model or a pipeline stage."""
        del self.config.transformers_weights
        super().finish_loading()  # type: ignore[misc]


def _check_layouts(model: Any) -> None:
    """Reject files whose sharding differs from the model's."""
    document, mesh, stages = model._cuboid_ranks, model.cuboid_part.plan.mesh, model.cuboid_part.plan.stages
    layers = () if stages is None else stages.layout.counts
    # No pipeline and a pipeline of one stage are the same layout.
    same_layers = layers == document.layers or max(len(layers), len(document.layers)) <= 1
    same_places = mesh.placement == (document.placement or tuple(range(document.topology.pipe)))
    if mesh.shape != document.mesh.shape or not same_layers or not same_places:
        wanted = layout_in_words(mesh.shape, layers, mesh.placement if len(layers) > mesh.topology.pipe else ())
        raise _other_layout(document, wanted, model._cuboid_folder)
    if mesh.shape.size == 1:
        return
    specs = model._parallel.by_parameter
    for name, tensor in document.tensors.items():
        if mesh.coordinate.pipe in tensor.stages and specs.get(tensor.parameter) != tensor.sharding:
            raise CheckpointError(
                f"{model._cuboid_folder}: {name} is cut otherwise than this version of cuboid and this config cut it; "
                "run `cuboid convert` again"
            )
