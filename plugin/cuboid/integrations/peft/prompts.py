"""Prompt tuning and P-tuning by PEFT on a sharded model: trained vectors of virtual tokens before each row."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PromptEncoderConfig, PromptTuningConfig
from peft.tuners import tuners_utils
from peft.tuners.p_tuning import PromptEncoder, PromptEncoderReparameterizationType
from peft.tuners.prompt_tuning import PromptEmbedding
from peft.utils import SAFETENSORS_WEIGHTS_NAME, TaskType
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from cuboid.checkpoint.format.tensor_file import TensorFile
from cuboid.distributed.axis_collectives import all_reduce
from cuboid.distributed.mesh import WeightSeed
from cuboid.distributed.topology import AXES
from cuboid.errors import CheckpointError, MeshError, UnsupportedModelError
from cuboid.integrations.peft.adapter_files import (
    check_same,
    folder_of,
    save_adapters,
    selected_names,
    write_config,
)
from cuboid.integrations.peft.adapters import structure_changes
from cuboid.models.batch.batch_check import Limits
from cuboid.models.batch.local_batch import IGNORE_INDEX
from cuboid.models.kinds.causal import Causal
from cuboid.models.sharded.sharded_model import ShardedBase, ShardedModel, unwrap
from cuboid.models.stages.stage_model import StageModel
from cuboid.tensor3d.layers.vocab_embedding import ShardedEmbedding
from cuboid.tensor3d.sharding.full_params import whole_parameter
from cuboid.tensor3d.sharding.sharded_param import ShardedModule
from cuboid.tensor3d.sharding.sharding_spec import shard_boxes, take_shard
from cuboid.tensor3d.virtual_tokens import FIRST_ID, PromptedEmbedding, with_virtual_tokens
from cuboid.weights.save import full_values
from cuboid.weights.state_dict_map import sharding_specs

#: A prompt's name in PEFT's files.
_SAVED = "prompt_embeddings"
#: The file beside PEFT's that has the parameters of an encoder, to train it further; PEFT's has only what it gives.
ENCODER_FILE = "prompt_encoder.safetensors"
#: Options that decide what a prompt is, and what its encoder is.
_IDENTITY = ("peft_type", "task_type", "num_virtual_tokens")
_OF_ENCODER = ("encoder_reparameterization_type", "encoder_hidden_size", "encoder_num_layers")

PromptConfig = PromptTuningConfig | PromptEncoderConfig


def check_prompt(model: Any, config: PromptConfig) -> None:
    """Check that a model's rows may have virtual tokens before them.

    Raises:
        UnsupportedModelError: they have no rule; says why.
    """
    inner: Any = unwrap(model)
    kind, base, name = inner.cuboid.kind, inner.cuboid.base, type(config).__name__
    if type(kind) is not Causal or config.task_type != TaskType.CAUSAL_LM:
        task = None if config.task_type is None else str(TaskType(config.task_type).value)
        raise UnsupportedModelError(
            f"{name}(task_type={task!r}) has no rule for a sharded {base.__name__}: of sharded models, "
            "causal language models have virtual tokens, with task_type='CAUSAL_LM'; write that, or take LoRA"
        )
    if isinstance(config, PromptEncoderConfig) and config.encoder_dropout:
        is_lstm = config.encoder_reparameterization_type == PromptEncoderReparameterizationType.LSTM
        if is_lstm and not config.inference_mode:
            raise UnsupportedModelError(
                f"{name}(encoder_dropout={config.encoder_dropout}) has no rule on a mesh, where an encoder runs once "
                "for all rows, which PEFT drops different elements for; set encoder_dropout=0"
            )
    table = _table_of(inner)
    if table is None:
        return
    owner, _, _ = next(name for name, module in inner.named_modules() if module is table).rpartition(".")
    is_cut = isinstance(table, ShardedEmbedding) or inner.cuboid.mesh.shape.size == 1
    # Others compute positions of the ids, or give them to further tables, where those of virtual tokens mean nothing.
    if not is_cut or not isinstance(inner.get_submodule(owner), PreTrainedModel) or _reads_ids_elsewhere(inner, table):
        raise UnsupportedModelError(
            f"{name} has no rule for {base.__name__}, which does more with ids than to look them up in one "
            "table; take LoRA (LoraConfig), or train the prompt in plain transformers"
        )


def _table_of(inner: Any) -> nn.Embedding | None:
    """The model's embedding of tokens; None on stages that aren't the first one."""
    # The last stage may have it for a tied head.
    if isinstance(inner, StageModel) and not any(cut.is_first for cut in inner.staging.plan.cuts):
        return None
    table: nn.Embedding = inner.get_input_embeddings()
    return table


def _reads_ids_elsewhere(inner: Any, table: Any) -> bool:
    """Whether another module than the model's own ones and its embedding looks at ids."""
    config = inner.config.get_text_config()
    rows = {config.vocab_size, getattr(config, "vocab_size_per_layer_input", None)}
    others = (x for x in inner.modules() if x is not table and not isinstance(x, PreTrainedModel))
    return any(
        (isinstance(x, nn.Embedding) and x.num_embeddings in rows) or "input_ids" in _parameters_of(x) for x in others
    )


def _parameters_of(module: nn.Module) -> Sequence[str]:
    code = getattr(type(module).forward, "__code__", None)
    return () if code is None else code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def set_up_prompt(peft_model: Any, adapter_name: str) -> None:
    """Make the virtual tokens of an adapter, as ``PeftModel._setup_prompt_encoder`` does, and freeze the model.

    Raises:
        UnsupportedModelError: before the model is changed, if virtual tokens have no rule in it.
        MeshError: they begin as tokens of the vocabulary, and the ranks aren't connected.
    """
    config: PromptConfig = peft_model.peft_config[adapter_name]
    inner: Any = peft_model.base_model
    check_prompt(inner, config)
    if not hasattr(peft_model, "prompt_encoder"):
        peft_model.prompt_encoder, peft_model.prompt_tokens = nn.ModuleDict({}), {}
    mesh = inner.cuboid.mesh
    # Each rank makes the whole vectors, so all must draw the same.
    mesh.compare_seed(WeightSeed.of_state())
    config.num_transformer_submodules = 1
    table = _table_of(inner)
    encoder: nn.Module
    if isinstance(config, PromptEncoderConfig):
        encoder = PromptEncoder(config)
    else:
        encoder = PromptEmbedding(config, _WholeTable(inner, table))
    encoder.to(inner.device)
    here: PromptedEmbedding | None = None
    with structure_changes(inner):
        for parameter in inner.parameters():
            parameter.requires_grad = False
        if table is not None:
            here = with_virtual_tokens(table, mesh)
            if _is_encoded(config):
                here.add_encoder(adapter_name, encoder)
            else:
                vectors = encoder.get_submodule("embedding").get_parameter("weight").detach()
                vectors = nn.Parameter(vectors, requires_grad=not config.inference_mode)
                here.virtual_tokens.add(adapter_name, vectors, table)
    peft_model.prompt_encoder[adapter_name] = PromptOnMesh(inner, here, adapter_name, config.num_virtual_tokens)
    peft_model.prompt_tokens[adapter_name] = torch.arange(config.num_virtual_tokens)
    state, limits = inner.cuboid.state, inner.cuboid.whole_model.limits
    limits = dataclasses.replace(limits, virtual_tokens=max(limits.virtual_tokens, config.num_virtual_tokens))
    _knowing_limits(inner, limits)
    prompts = Prompts(peft_model)
    state.adapters, state.save, state.virtual_tokens = prompts, save_adapters, prompts


def _is_encoded(config: PeftConfig) -> bool:
    """Whether an encoder gives the vectors of virtual tokens. In files and for inference, there are only these."""
    return isinstance(config, PromptEncoderConfig) and not config.inference_mode


def _knowing_limits(inner: Any, limits: Limits) -> None:
    whole_model = dataclasses.replace(inner.cuboid.whole_model, limits=limits)
    sharding = dataclasses.replace(inner.cuboid, whole_model=whole_model)
    for part in (inner, inner.base_model):
        if isinstance(part, ShardedModel | ShardedBase):
            part.cuboid = sharding


class _WholeTable:
    """A sharded embedding as PEFT looks up the initial vectors of virtual tokens in it; collective."""

    def __init__(self, inner: Any, table: Any) -> None:
        self._inner, self._table = inner, table
        self.num_embeddings = inner.config.get_text_config().vocab_size
        self.weight = torch.empty(0)

    def parameters(self) -> Sequence[nn.Parameter]:
        return ()

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        mesh, table = self._inner.cuboid.mesh, self._table
        width = self._inner.config.get_text_config().hidden_size
        rows = torch.zeros((len(tokens), width), dtype=self._inner.dtype)
        if isinstance(table, ShardedModule):
            try:
                mesh.connect()
            except MeshError as error:
                raise MeshError(f"prompt_tuning_init begins with rows of the embedding: {error}") from error
            weight = table.get_parameter("weight").detach()
            rows = rows.to(weight.device)
            for (held, columns), (tokens_here, features) in shard_boxes(
                table.spec("weight"), mesh.shape, mesh.coordinate
            ):
                inside = (tokens >= tokens_here.start) & (tokens < tokens_here.stop)
                rows[inside, features] = weight[held.start + tokens[inside] - tokens_here.start, columns]
            rows = all_reduce(rows, mesh.along(*AXES))
        elif isinstance(table, nn.Embedding):
            rows = table.weight.detach()[tokens]
        # On stages without the embedding the values don't matter.
        scale = getattr(table, "embed_scale", None)
        return rows if scale is None else rows * scale


#: What PEFT saves and loads a prompt by; 0.20 asks nothing of its encoder's class.
_PromptEncoder: Any = getattr(tuners_utils, "BasePromptEncoder", nn.Module)


class PromptOnMesh(_PromptEncoder):
    """In the place of PEFT's encoder of a prompt, whose vectors the model's embedding has.

    Args:
        inner: the sharded model.
        table: its embedding; None on stages that don't have that.
        adapter_name: whose vectors these are.
        count: n of them.
    """

    def __init__(self, inner: Any, table: PromptedEmbedding | None, adapter_name: str, count: int) -> None:
        super().__init__()
        # In tuples, so that the model isn't a part of this module.
        self._table, self._inner, self._adapter_name, self._count = (table,), (inner,), adapter_name, count

    def activate(self) -> None:
        """Let ids of virtual tokens have these vectors."""
        (table,) = self._table
        if table is not None:
            table.active_prompt = self._adapter_name

    @property
    def embedding(self) -> PromptOnMesh:
        """This, for PEFT, which loads weights into it and looks up its weight's device."""
        return self

    @property
    def weight(self) -> torch.Tensor:
        """The rank's shard; nothing on stages that have none."""
        (table,), (inner,) = self._table, self._inner
        if table is None or self._adapter_name not in table.virtual_tokens:
            return torch.empty(0, device=inner.device)
        return table.virtual_tokens[self._adapter_name]

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """The whole vectors of virtual tokens, on every rank; collective, and not on stages that have none.

        Raises:
            UnsupportedModelError: the stage has none.
        """
        (table,) = self._table
        if table is None:
            raise UnsupportedModelError("the vectors of virtual tokens are on the stage that has the embedding")
        if self._adapter_name in table.prompt_encoders:
            return table.encoded(self._adapter_name, self._count)[indices]
        vectors = whole_parameter(table.virtual_tokens, self._adapter_name)
        assert vectors is not None
        return vectors[indices]

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:  # noqa: ARG002
        """Take the rank's shard of whole vectors.

        Raises:
            CheckpointError: they have another shape.
        """
        (table,), full = self._table, state_dict["weight"]
        if table is None:
            return
        tokens = table.virtual_tokens
        spec = tokens.spec(self._adapter_name)
        if tuple(full.shape) != spec.shape:
            raise CheckpointError(
                f"{_SAVED} has the shape {list(full.shape)}, but the model's is {list(spec.shape)}: the number of "
                "virtual tokens, or the model, is another one"
            )
        tokens[self._adapter_name].copy_(take_shard(full, spec, tokens.mesh))

    @torch.no_grad()
    def load_encoder(self, state: Mapping[str, torch.Tensor], path: Path) -> None:
        """Take the rank's shards of a whole encoder's parameters, read from a file.

        Raises:
            CheckpointError: they are another encoder's.
        """
        (table,) = self._table
        if table is None:
            return
        encoder = table.prompt_encoders[self._adapter_name]
        specs = sharding_specs(encoder)
        for name, parameter in encoder.named_parameters():
            full = state.get(name)
            if full is None or tuple(full.shape) != specs[name].shape:
                has = "nothing" if full is None else f"a tensor of shape {list(full.shape)}"
                raise CheckpointError(
                    f"{path}: for {name}, of shape {list(specs[name].shape)} in the model's encoder, it has {has}; "
                    "make the adapter with the same options"
                )
            parameter.copy_(take_shard(full, specs[name], table.virtual_tokens.mesh))


class Prompts:
    """The prompts of a sharded model: what they put before rows, and their files; see ``ModelState.adapters``
    and ``ModelState.virtual_tokens``.

    Args:
        peft_model: PEFT's, which has the configs, and knows which prompt is active.
    """

    #: What PEFT's model puts before the names of a model's parameters.
    prefix = "base_model."

    def __init__(self, peft_model: Any) -> None:
        self._peft_model = peft_model

    @property
    def _configs(self) -> dict[str, PeftConfig]:
        configs: dict[str, PeftConfig] = self._peft_model.peft_config
        return configs

    def before(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """A micro-batch with the active prompt's virtual tokens before its rows, as ``PeftModel.forward`` does it.

        Raises:
            UnsupportedModelError: it has tensors of which PEFT doesn't know what virtual tokens would have in them.
        """
        prompted, peft_model = dict(batch), self._peft_model
        if peft_model._adapters_disabled:
            return prompted
        for key in ("inputs_embeds", "shift_labels", "task_ids", "adapter_names"):
            if prompted.get(key) is not None:
                raise UnsupportedModelError(f"{key} has no rule beside virtual tokens; give input_ids and labels")
        name = peft_model.active_adapter
        config = self._configs[name]
        peft_model._adjust_prompt_learning_kwargs(config, kwargs=prompted)
        prompted = {key: value for key, value in prompted.items() if value is not None}
        peft_model.prompt_encoder[name].activate()
        ids = prompted["input_ids"]
        virtual = torch.arange(FIRST_ID, FIRST_ID + config.num_virtual_tokens, dtype=ids.dtype, device=ids.device)
        for key, value in (("input_ids", virtual), ("attention_mask", 1), ("labels", IGNORE_INDEX)):
            if key in prompted:
                tokens = prompted[key]
                columns = torch.as_tensor(value, dtype=tokens.dtype, device=tokens.device)
                columns = columns.expand(tokens.shape[0], config.num_virtual_tokens)
                prompted[key] = torch.cat((columns, tokens), 1)
        return prompted

    def in_generation(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """A forward's arguments in generation: the first one has virtual tokens, and all have them in the mask."""
        cache = arguments.get("past_key_values")
        seen = 0 if cache is None else cache.get_seq_length()
        if not seen or self._peft_model._adapters_disabled:
            return self.before(arguments)
        config = self._configs[self._peft_model.active_adapter]
        self._peft_model._adjust_prompt_learning_kwargs(config, kwargs=arguments)
        ids, mask = arguments["input_ids"], arguments.get("attention_mask")
        if ids.shape[1] <= seen:
            # With fewer ids than the cache has positions, transformers doesn't see that all but the last are in it.
            arguments["input_ids"] = ids[:, -1:]
        if mask is not None:
            seen_tokens = mask.new_ones((mask.shape[0], config.num_virtual_tokens))
            arguments["attention_mask"] = torch.cat((seen_tokens, mask), 1)
        return arguments

    def state(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The whole vectors, or encoders, by the names of their parameters, on the first rank; collective."""
        inner: Any = unwrap(model)
        kept = {id(x) for name, x in inner.named_parameters() if _OF_PROMPT.search(name)}
        values = full_values(inner, lambda parameter: parameter.detach() if id(parameter) in kept else None)
        return {f"{self.prefix}{name}": vectors for name, vectors in values.items()}

    def write(
        self, model: nn.Module, state: dict[str, torch.Tensor], folder: Path, selected: Sequence[str] | None = None
    ) -> None:
        """Write prompts as PEFT does; see :meth:`cuboid.integrations.peft.adapter_files.AdapterFiles.write`."""
        inner: Any = unwrap(model)
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        for name, x in state.items():
            part = _OF_PROMPT.search(name)
            assert part is not None
            tensors.setdefault(part["adapter"], {})[name[part.end() + 1 :]] = x.contiguous()
        for name in selected_names(self._configs, selected):
            target, config = folder_of(folder, name), self._configs[name]
            target.mkdir(exist_ok=True)
            vectors = tensors[name].get("")
            if vectors is None:
                save_file(tensors[name], target / ENCODER_FILE, metadata={"format": "pt"})
                vectors = _given_by(config, tensors[name])
            save_file({_SAVED: vectors}, target / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
            write_config(copy.copy(config), inner, target)

    def load(self, model: nn.Module, folder: Path) -> None:
        """Load prompts from a folder of PEFT. Each rank reads them and keeps its shards; nothing is sent.

        Raises:
            CheckpointError: the folder has no such prompts, or they don't fit the model's.
        """
        del model
        for name, config in self._configs.items():
            source, is_encoded = folder_of(folder, name), _is_encoded(config)
            check_same(config, source, (*_IDENTITY, *(_OF_ENCODER if is_encoded else ())))
            path = source / (ENCODER_FILE if is_encoded else SAFETENSORS_WEIGHTS_NAME)
            with TensorFile(path) as file:
                prompt = self._peft_model.prompt_encoder[name]
                if is_encoded:
                    prompt.load_encoder({key: file.read(key) for key in file.specs}, path)
                    continue
                if _SAVED not in file.specs:
                    raise CheckpointError(f"{path}: has no {_SAVED}, as a prompt's file does")
                prompt.load_state_dict({"weight": file.read(_SAVED)})


#: What a parameter of a prompt has in its name; behind it, an encoder's have their own.
_OF_PROMPT = re.compile(r"\.(?:virtual_tokens|prompt_encoders)\.(?P<adapter>[^.]+)(?=\.|$)")


def _given_by(config: Any, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The vectors that an encoder with whole parameters gives, as PEFT computes and saves them."""
    with torch.device("meta"):
        encoder = PromptEncoder(config)
    encoder.load_state_dict(parameters, assign=True)
    with torch.no_grad():
        vectors: torch.Tensor = encoder(torch.arange(config.num_virtual_tokens, device=encoder.embedding.weight.device))
    return vectors
