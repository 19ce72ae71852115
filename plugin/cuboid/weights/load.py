"""Load a Hugging Face checkpoint so that each rank reads only its own slices.

If a parameter is a ``DTensor``, transformers' loader reads only the local slice. So a subclass of the architecture is
built on the meta device, replaces each parameter by a DTensor with its shard's placement, runs the ordinary
``from_pretrained`` (with all its renaming, conversion and tying), and becomes a sharded model at the end. No process
group is needed: a rank's coordinate comes from the launcher's environment.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from cuboid.config.schema import CuboidConfig
from cuboid.distributed.determinism import use_deterministic
from cuboid.distributed.mesh import current_rank
from cuboid.errors import CheckpointError, UnsupportedModelError
from cuboid.failures.rank_agreement import run_on_all_ranks
from cuboid.library_warnings import progress_bars_of
from cuboid.models.architectures.refusals import adapters_refused, check_checkpoint, check_unquantized
from cuboid.models.certification.certificates import CodeCheck
from cuboid.models.kinds.registry import check_class
from cuboid.models.model_plan import ModelPlan, RankPart
from cuboid.models.plain_construction import plain_construction
from cuboid.models.sharded.quantization import Quantization, check_dtype, quantization_of, stored_quantization
from cuboid.models.stages.placeholders import taken_for_initialized
from cuboid.tensor3d.sharding.sharded_param import local_state
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec
from cuboid.weights.four_bit_weights import FourBitReader, StoredWeights
from cuboid.weights.model_folder import (
    CONFIG,
    as_damage_of,
    check_loaded,
    check_model_folder,
    folder_of,
    model_config,
    read_config,
    stored_alike,
    verify_model_folder,
)
from cuboid.weights.new_weights import is_of_new_head, make_new_weights
from cuboid.weights.presharded import from_rank_file, take_settings
from cuboid.weights.rank_folder import SHARDS
from cuboid.weights.read_once import load_once
from cuboid.weights.resolve import plan_of, resolve
from cuboid.weights.save import save_sharded
from cuboid.weights.slicing import mark_parameters, unmark_parameters
from cuboid.weights.state_dict_map import check_has_whole_tensors

_logger = logging.getLogger(__name__)

#: Arguments of ``from_pretrained`` that place or transform weights in ways that contradict sharded loading.
_INCOMPATIBLE = (
    "device_map",
    "load_in_8bit",
    "load_in_4bit",
    "tp_plan",
    "tp_size",
    "distributed_config",
    "device_mesh",
    "gguf_file",
)


def load_sharded(
    cls: type[PreTrainedModel], from_pretrained: Any, config: CuboidConfig, args: tuple, kwargs: dict[str, Any]
) -> PreTrainedModel:
    """``cls.from_pretrained(*args, **kwargs)``, sharded and split into pipeline stages as ``config`` says.

    If there is a process group, errors are raised on all ranks.

    Args:
        cls: the architecture's class.
        from_pretrained: transformers' original function (unbound), because the patched one calls this.
        config: Cuboid's config.

    Raises:
        MeshError, UnsupportedModelError, ConfigError: before any weight is read.
        CheckpointError: the checkpoint is damaged or lacks a parameter.
    """
    return run_on_all_ranks(
        lambda: _load_sharded(cls, from_pretrained, config, args, kwargs), what=f"{cls.__name__}.from_pretrained"
    )


def _load_sharded(
    cls: type[PreTrainedModel], from_pretrained: Any, config: CuboidConfig, args: tuple, kwargs: dict[str, Any]
) -> PreTrainedModel:
    device = None
    if kwargs.get("device_map") is not None and (device := own_device(kwargs["device_map"])) is not None:
        kwargs = {**kwargs, "device_map": None}
    for name in _INCOMPATIBLE:
        if kwargs.get(name) not in (None, False):
            instead = ""
            if name.startswith("load_in"):
                instead = "; write quantization_config=BitsAndBytesConfig(load_in_4bit=True, …)"
            raise UnsupportedModelError(
                f"from_pretrained({name}=…) can't be combined with tensor_parallel.mode 3d_tensor or pipeline.engine "
                f"seq1f1b{instead}"
            )
    kwargs = dict(kwargs)
    quantization_config = kwargs.pop("quantization_config", None)
    quantization = None if quantization_config is None else quantization_of(quantization_config)
    if config.deterministic:
        use_deterministic()
    check_class(cls, stages=config.pipeline is not None)
    check_checkpoint(args, kwargs)
    folder = folder_of(args, kwargs)
    rank_folder = folder if folder is not None and (folder / SHARDS).is_file() else None
    # Beside weights without one, the caller passes the config.
    config_file = folder / CONFIG if folder is not None and os.path.lexists(folder / CONFIG) else None
    in_4_bits = _stored_quantization(cls, config_file, kwargs)
    if in_4_bits is not None:
        if rank_folder is not None:
            check_unquantized(read_config(rank_folder / CONFIG), str(rank_folder / CONFIG))
        is_other = quantization is not None and replace(quantization, stored=True) != in_4_bits
        if is_other and current_rank() == 0:
            _logger.warning(
                "from_pretrained(quantization_config=…) isn't used: the weights are stored in 4 bits already, as the "
                "quantization_config in the model's own config says",
            )
        quantization = in_4_bits
        config_of_model = take_settings(cls, folder, kwargs)
        if hasattr(config_of_model, "quantization_config"):
            del config_of_model.quantization_config
        kwargs["config"] = config_of_model
    stored = None if folder is None else Stored(folder, kwargs.get("variant"))
    loading = loading_class(
        cls, lambda whole_model: resolve(whole_model, config, cls, quantization), stored=stored, new_head=True
    )
    if rank_folder is not None:
        loading, args, kwargs = from_rank_file(loading, config, quantization, rank_folder, args, kwargs)
    elif folder is not None:
        # Damaged files are reported before transformers reads them; see :mod:`cuboid.weights.model_folder`.
        if config_file is not None:
            safetensors = kwargs.get("use_safetensors") is not False
            check_model_folder(folder, variant=kwargs.get("variant"), weights=safetensors)
        if config.checkpoint.verify:
            verify_model_folder(folder)
    wants_info = kwargs.pop("output_loading_info", False)
    name = args[0] if args else kwargs.get("pretrained_model_name_or_path", cls.__name__)
    with as_damage_of(name), progress_bars_of(shown=current_rank() == 0):
        # With ``ignore_mismatched_sizes``, transformers lists tensors of another shape, and we raise the error.
        asked = {**kwargs, "output_loading_info": True, "ignore_mismatched_sizes": True}
        model, info = from_pretrained(loading, *args, **asked)
    check_loaded(model, info, folder if config_file is not None and rank_folder is None else None)
    model.finish_loading()
    if device is not None:
        model.to(device)
    return (model, info) if wants_info else model


def _stored_quantization(
    cls: type[PreTrainedModel], config_file: Path | None, kwargs: dict[str, Any]
) -> Quantization | None:
    """How the weights that a call of ``from_pretrained`` reads are stored in 4 bits; None if they aren't quantised."""
    in_file = None if config_file is None else read_config(config_file).get("quantization_config")
    stored = stored_quantization(in_file, str(config_file)) if in_file else None
    # Auto classes give a config that they have read.
    settings, where = kwargs.get("config"), f"the config given to {cls.__name__}.from_pretrained"
    in_config = vars(settings).get("quantization_config") if isinstance(settings, PretrainedConfig) else None
    asked = stored_quantization(in_config, where) if in_config else None
    if config_file is None:
        return asked
    if asked not in (None, stored):
        raise UnsupportedModelError(
            f"{where} has another quantization_config than the {CONFIG} of {config_file.parent}, which says how "
            "weights are stored"
        )
    return stored


def own_device(device_map: Any) -> torch.device | None:
    """This rank's own device, if a ``device_map`` puts all of a model there, as do libraries with a process for each
    device; None for any other map."""
    place = device_map
    if isinstance(device_map, Mapping):
        place = device_map[""] if set(device_map) == {""} else None
    accelerator = torch.accelerator.current_accelerator()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    rank_device = torch.device("cpu") if accelerator is None else torch.device(accelerator.type, local)
    # Libraries number processes' devices without asking whether there are accelerators.
    named = {local, str(local), rank_device, str(rank_device)}
    return rank_device if isinstance(place, int | str | torch.device) and place in named else None


def read_weights(model: Any, folder: str | Path) -> dict[str, torch.Tensor]:
    """This rank's parts of a checkpoint, sharded as an existing model is.

    Returns:
        Shards and persistent buffers by name, on the CPU.

    Raises:
        CheckpointError: the checkpoint is of another architecture, or lacks a parameter.
    """
    check_has_whole_tensors(model)
    check_model_folder(Path(folder))
    config = model_config(Path(folder))
    if config.model_type != model.config.model_type:
        raise CheckpointError(f"{folder}: holds a {config.model_type}, but the model is a {model.config.model_type}")
    cls = loading_class(model.cuboid.base, lambda whole_model: plan_of(model, whole_model), stored=Stored(Path(folder)))
    with as_damage_of(folder), progress_bars_of(shown=current_rank() == 0):
        asked = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        loaded, info = cls.from_pretrained(folder, config=config, dtype=model.dtype, **asked)
    check_loaded(loaded, info, Path(folder))
    return {name: x.detach() for name, x in local_state(loaded).items() if isinstance(x, torch.Tensor)}


@dataclass(frozen=True)
class Stored:
    """The weights that are loaded."""

    folder: Path
    variant: str | None = None


def loading_class(
    cls: type[PreTrainedModel],
    decide: Callable[[PreTrainedModel], ModelPlan],
    *,
    stored: Stored | None = None,
    marks: bool = True,
    new_head: bool = False,
) -> type[PreTrainedModel]:
    """A subclass whose constructor, on the meta device, cuts a model to this rank's part.

    Args:
        cls: the architecture's class.
        decide: makes the plan of a whole model.
        stored: what is loaded; None for a name on the hub, and if nothing is.
        marks: whether parameters become DTensors, of which transformers reads slices.
        new_head: whether a task's head may be missing from the checkpoint; see :func:`is_of_new_head`.
    """
    # transformers finds the conversions of old checkpoints by the class's module and name.
    members = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_cuboid_base": cls}
    members.update(_cuboid_decide=staticmethod(decide), _cuboid_stored=stored)
    members.update(_cuboid_marks=marks, _cuboid_new_head=new_head)
    return type(cls.__name__, (LoadingModel, cls), members)


class LoadingModel:
    """Mixed into an architecture's class from its construction on the meta device until it is sharded."""

    _cuboid_base: type[PreTrainedModel]
    _cuboid_decide: Callable[[PreTrainedModel], ModelPlan]
    _cuboid_stored: Stored | None
    _cuboid_marks: bool
    _cuboid_new_head: bool
    #: The rank's part of the model; set by the constructor, and gone once the model is sharded.
    cuboid_part: RankPart
    # From the architecture's class.
    named_parameters: Any
    config: Any
    all_tied_weights_keys: Any

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        # Some classifiers make their base model with ``AutoModel.from_config``, which a scope would shard separately.
        # Weights aren't tied here, because transformers ties them once they are loaded.
        with plain_construction(ties=False):
            super().__init__(*args, **kwargs)  # type: ignore[safe-super]
        plan = self._cuboid_decide(self)
        all_names = set() if plan.stages is None else set(self.state_dict())
        self.cuboid_part = plan.cut(self)
        if plan.stages is not None:
            _ignore_other_stages(self, all_names)
        if self.cuboid_part.parallel is not None and self._cuboid_marks:
            quantized = plan.quantized
            stored = () if quantized is None or not quantized.quantization.stored else quantized.names
            mark_parameters(self, self.cuboid_part.parallel, plan.mesh, stored)

    @staticmethod
    def _load_pretrained_model(
        model: Any, state_dict: Any, checkpoint_files: list[str] | None, load_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Fill a model from files, which transformers' loader reads; see :mod:`cuboid.weights.read_once` and
        :mod:`cuboid.weights.four_bit_weights`.
        """
        part: RankPart = model.cuboid_part
        if load_config.hf_quantizer is not None:
            raise UnsupportedModelError(
                f"{model.config._name_or_path}: its config.json has a quantization_config that is read too late for a "
                "mesh or a pipeline; load the model by an auto class, such as AutoModelForCausalLM"
            )
        load = functools.partial(model._cuboid_base._load_pretrained_model, model)
        mesh, files, quantized = part.plan.mesh, checkpoint_files, part.plan.quantized
        is_read = state_dict is None and all(file.endswith(".safetensors") for file in files or ())
        with ExitStack() as stack:
            stored: StoredWeights | None = None
            specs: Mapping[str, ShardingSpec] = {}
            # Files of ranks have shards, which are rounded when all are there.
            if quantized is not None and part.parallel is not None:
                check_dtype(load_config.dtype)
                reader = FourBitReader(model, part)
                load_config, specs = replace(load_config, hf_quantizer=reader), reader.specs
                if quantized.quantization.stored:
                    stored = stack.enter_context(StoredWeights.open(files))

            def read(tensors: dict[str, Any] | None) -> Any:
                if stored is not None and quantized is not None:
                    values = quantized.quantization.values
                    tensors = stored.tensors(tensors, model, load_config, specs, values)
                return load(tensors, files if tensors is None else None, load_config, *args, **kwargs)

            if not is_read or mesh.topology.data == 1:
                return load(state_dict, files, load_config, *args, **kwargs) if stored is None else read(None)
            return load_once(model, mesh, files or (), read)

    def initialize_weights(self: Any) -> None:
        # Leaves loaded weights alone, and makes buffers that the checkpoint lacks.
        for module in self.modules():
            tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            if tensors and all(getattr(x, "_is_hf_initialized", False) for x in tensors):
                # Some formulas for new values fail on a rank's slices, even where nothing is kept of them.
                module._is_hf_initialized = True
        with taken_for_initialized(self):
            super().initialize_weights()  # type: ignore[misc]

    def spec_of(self, name: str) -> ShardingSpec | None:
        """How a parameter is sharded; None if it isn't."""
        return None if self.cuboid_part.parallel is None else self.cuboid_part.parallel.by_parameter.get(name)

    def _move_missing_keys_from_meta_to_device(self, missing_keys: Any, *args: Any) -> None:
        parameters = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        missing = set(missing_keys) & parameters - set(self.all_tied_weights_keys)
        new = {name for name in missing if self._may_be_new(name)}
        lost = sorted(missing - new)
        if lost:
            rest = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            raise CheckpointError(
                f"{self.config._name_or_path}: has no (fitting) tensor for {lost[0]}{rest}; is it damaged, or of "
                "another model than its config.json says? New parameters can't be initialised "
                "slice by slice: save a complete checkpoint with plain transformers first"
            )
        super()._move_missing_keys_from_meta_to_device(set(missing_keys) - new, *args)  # type: ignore[misc]
        if self.cuboid_part.parallel is not None:
            unmark_parameters(self, self.cuboid_part.parallel, self.cuboid_part.plan.mesh)
        if new:
            make_new_weights(self, self._cuboid_base, new)

    def _may_be_new(self: Any, name: str) -> bool:
        # Some classes don't save parameters that a formula gives, such as Marian's sinusoidal positions.
        is_made = any(re.search(pattern, name) for pattern in self._keys_to_ignore_on_load_missing or ())
        return is_made or (self._cuboid_new_head and is_of_new_head(self, name))

    def tie_weights(self: Any, missing_keys: Any = None, **kwargs: Any) -> Any:
        """Untie parameters that the config ties, but the checkpoint has with different values, as T5's heads since 1.1.

        transformers compares only the rank's slices, so that one rank could untie them while others don't. So each rank
        compares the whole tensors in the files.
        """
        stored = self._cuboid_stored
        for target, source in [] if missing_keys is None else list(self.all_tied_weights_keys.items()):
            if target in missing_keys or source in missing_keys:
                continue
            alike = None if stored is None else stored_alike(stored.folder, target, source, variant=stored.variant)
            # Stages were planned with the two as one parameter, so there they can't be untied any more.
            if alike is False and self.cuboid_part.staging is None:
                del self.all_tied_weights_keys[target]
            elif alike is False or not torch.equal(self.get_parameter(target), self.get_parameter(source)):
                raise CheckpointError(
                    f"the config ties {target} to {source}, but the checkpoint holds both with different values; "
                    "set tie_word_embeddings to false in its config.json, or remove one of them"
                )
        return super().tie_weights(missing_keys=missing_keys, **kwargs)  # type: ignore[misc]

    def _adjust_bias(self, *modules: Any) -> None:
        """Pad a head's bias to its weight's rows; not of slices: a rank may have fewer rows of the bias."""
        part: RankPart | None = getattr(self, "cuboid_part", None)
        if part is None or part.parallel is None:
            super()._adjust_bias(*modules)  # type: ignore[misc]

    def load_adapter(self, *_: Any, **__: Any) -> None:
        raise adapters_refused(f"the checkpoint names adapters of PEFT around {type(self).__name__}")

    def finish_loading(self: Any) -> None:
        """Turn into a sharded model or a pipeline stage."""
        part = self.cuboid_part
        self.__class__ = self._cuboid_base
        del self.cuboid_part
        part.finish(self, lambda shard, _: shard.detach())
        if part.plan.quantized is not None:
            # What libraries ask of a model of transformers, before they prepare it for adapters.
            self.is_loaded_in_4bit = True
        self.cuboid.state.save = save_sharded
        self.cuboid.state.made.code = CodeCheck(self.cuboid.base, self.config)


def _ignore_other_stages(model: Any, all_names: set[str]) -> None:
    """Let a stage ignore the checkpoint's tensors of other stages. ``all_names`` are the names in the whole model."""
    # By module, not by parameter: an old checkpoint may have further tensors in a removed module.
    absent = {name.rpartition(".")[0] for name in all_names - set(model.state_dict())}
    prefix = re.escape(f"{model.base_model_prefix}.")
    patterns = {
        rf"^({prefix})?{re.escape(name.removeprefix(f'{model.base_model_prefix}.'))}\." for name in sorted(absent)
    }
    model._keys_to_ignore_on_load_unexpected = set(model._keys_to_ignore_on_load_unexpected or ()) | patterns
