"""Gather full tensors from a sharded model, and write it as an ordinary Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.hub import convert_file_size_to_int

from cuboid.checkpoint.format.publish import SCRATCH, abandon_export, begin_export, publish
from cuboid.checkpoint.saver import join_background_save
from cuboid.checkpoint.writer import write_indices, write_items
from cuboid.config.schema import MAX_FILE_BYTES
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import AXES
from cuboid.errors import CheckpointError
from cuboid.failures.rank_agreement import run_on_all_ranks
from cuboid.models.sharded.sharded_model import mesh_of, unwrap
from cuboid.models.stages.stage_model import StageModel
from cuboid.optim.grad_buffer import gradient_of
from cuboid.tensor3d.sharding.sharded_param import local_state
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec, put_shard
from cuboid.weights.auxiliary_files import keep_own_tokenizer, write_auxiliary_files
from cuboid.weights.state_dict_map import check_has_whole_tensors, model_items, sharding_specs

_ValueOf = Callable[[torch.Tensor], torch.Tensor | None]


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and persistent buffers as full tensors, on the CPU of the first rank of each replica.

    With a pipeline that is the first rank of the first stage's mesh; other ranks get ``{}``. All ranks of all stages
    must call it.
    """
    inner = unwrap(model)
    check_has_whole_tensors(inner)
    state = local_state(inner)
    tensors = {name: x for name, x in state.items() if isinstance(x, torch.Tensor)}
    return _gather_full(inner, tensors, torch.Tensor.detach)


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """All gradients as full tensors, on the same rank as :func:`full_state_dict`; parameters without one are left out.

    For a parameter that the first and the last stage share, it is the first stage's gradient. The engine has summed
    the two by then, so both stages have the same.
    """

    def gradient(parameter: torch.Tensor) -> torch.Tensor | None:
        shard = gradient_of(parameter)  # type: ignore[arg-type]
        return None if shard is None else shard.view_as(parameter)

    return full_values(model, gradient)


def full_values(model: nn.Module, value_of: _ValueOf) -> dict[str, torch.Tensor]:
    """Full tensors of ``value_of(shard)`` for each parameter, gathered like :func:`full_gradients`.

    Args:
        model: a sharded model, or an engine around one.
        value_of: maps a shard to a tensor of its shape; or to None, to leave the parameter out.
    """
    inner = unwrap(model)
    return _gather_full(inner, dict(inner.named_parameters(remove_duplicate=False)), value_of)


def save_sharded(
    model: PreTrainedModel,
    directory: str | Path,
    *,
    state_dict: dict[str, torch.Tensor] | None = None,
    is_main_process: bool | None = None,
    **kwargs: Any,
) -> None:
    """Write a checkpoint that plain transformers loads.

    All ranks call it, and each writes its share. An exception is a ``state_dict`` of full tensors (or an empty one on
    other ranks), as trainers pass it: then the rank that has the tensors writes them, without communication.

    Args:
        model: the sharded model.
        directory: of the checkpoint.
        state_dict: full tensors; or this rank's shards, which are ignored: the model's own are written.
        is_main_process: whether this rank writes the full tensors that it was given; by default rank 0 does.
        kwargs: of ``PreTrainedModel.save_pretrained``. With any but ``max_shard_size``, rank 0 gathers the full model
            and writes it alone.

    Raises:
        CheckpointError: on every rank, if any of them can't write.
    """
    mesh = mesh_of(model)
    if state_dict is not None and _is_whole(model, state_dict):
        if state_dict and (mesh.rank == 0 if is_main_process is None else is_main_process):
            _save_as_own_class(model, directory, state_dict, kwargs)
        return
    mesh.connect()
    asked = {name: value for name, value in kwargs.items() if value not in (None, False)}
    if set(asked) <= {"max_shard_size"}:
        limit = asked.get("max_shard_size", MAX_FILE_BYTES)
        export_model(model, Path(directory), convert_file_size_to_int(limit))
        return
    state = full_state_dict(model)
    mesh.connect_host()
    # All ranks return only when the checkpoint is complete, so that each can read it.
    run_on_all_ranks(
        lambda: _save_as_own_class(model, directory, state, kwargs) if mesh.rank == 0 else None,
        mesh,
        what="save_pretrained",
    )


def export_model(model: nn.Module, folder: Path, max_file_bytes: int) -> None:
    """Write a model's weights as a Hugging Face checkpoint, without training state. Collective over the world.

    Weights that are in the folder are replaced atomically; see :mod:`cuboid.checkpoint.format.publish`.

    Args:
        model: a sharded model, or an engine around one.
        folder: created if missing.
        max_file_bytes: size limit of a file, unless a single tensor is larger.

    Raises:
        CheckpointError: on every rank, if any of them can't write.
    """
    run_on_all_ranks(
        lambda: _export_model(model, folder, max_file_bytes), mesh_of(model), what=f"save of {folder.name}"
    )


def _export_model(model: nn.Module, folder: Path, max_file_bytes: int) -> None:
    inner: Any = unwrap(model)
    check_has_whole_tensors(inner)
    if inner.cuboid.state.adapters is not None:
        raise CheckpointError(
            f"{folder}: the model has adapters, beside which a whole model isn't written; save them with "
            "cuboid.save_pretrained or PEFT's save_pretrained, or merge them into the model first, merge_and_unload()"
        )
    mesh = mesh_of(inner)
    # Both would exchange shards over the same groups, with the same tags.
    join_background_save(mesh)
    mesh.connect_host()

    def begin() -> None:
        if mesh.rank == 0:
            begin_export(folder)

    what = f"save of {folder.name}"
    run_on_all_ranks(begin, mesh, what=what)
    try:
        results = write_items(model_items(inner), folder / SCRATCH, mesh, max_file_bytes=max_file_bytes)

        def finish() -> None:
            # A write error was recorded, not raised, so that the other ranks could finish their exchange.
            failure = results[mesh.rank].failure
            if failure is not None:
                raise CheckpointError(failure)
            if mesh.rank == 0:
                write_indices(folder / SCRATCH, results)
                write_auxiliary_files(inner, folder / SCRATCH)
                keep_own_tokenizer(folder / SCRATCH, folder)

        run_on_all_ranks(finish, mesh, what=what)
        run_on_all_ranks(lambda: publish(folder) if mesh.rank == 0 else None, mesh, what=what)
    except BaseException:
        if mesh.rank == 0:
            abandon_export(folder)
        raise


def _save_as_own_class(model: Any, directory: str | Path, state: dict[str, torch.Tensor], kwargs: Any) -> None:
    # The original class's ``save_pretrained`` writes the files. Meanwhile the model needs the ties of the full model,
    # some of which a stage has dropped. It would overwrite existing files, so it writes into a scratch folder.
    base, folder, ties = model.cuboid.base, Path(directory), model._tied_weights_keys
    if kwargs.get("push_to_hub"):
        kwargs = {"repo_id": folder.absolute().name, **kwargs}
    model._tied_weights_keys = base._tied_weights_keys
    try:
        base.save_pretrained(model, begin_export(folder), is_main_process=True, state_dict=state, **kwargs)
        publish(folder)
    except BaseException as error:
        abandon_export(folder)
        if isinstance(error, OSError):
            raise CheckpointError(f"{folder}: can't be written: {error.strerror or error}") from error
        raise
    finally:
        model._tied_weights_keys = ties


def _is_whole(model: nn.Module, state: dict[str, torch.Tensor]) -> bool:
    shapes = {name: spec.shape for name, spec in sharding_specs(model).items()}
    if not all(tuple(state[name].shape) == shape for name, shape in shapes.items() if name in state):
        return False
    if not state or not isinstance(model, StageModel):
        return True
    outline = model.staging.plan.outline
    return all(any(name.startswith(f"{outline.layer(i)}.") for name in state) for i in range(outline.count))


@dataclass(frozen=True)
class _Entry:
    """A stage's tensor; if ``source`` differs from ``name``, it is tied to the tensor of that name and not sent."""

    name: str
    source: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def _gather_full(model: nn.Module, tensors: dict[str, torch.Tensor], value_of: _ValueOf) -> dict[str, torch.Tensor]:
    """Full tensors of ``value_of`` for this stage's ``tensors`` and those of all other stages, on the first rank."""
    mesh = mesh_of(model)
    mesh.connect()
    specs = sharding_specs(model)
    entries = _entries(model, tensors, specs, value_of)
    others = _of_other_stages(entries, mesh)
    state: dict[str, torch.Tensor] = {}
    for entry in entries:
        if entry.source != entry.name:
            if entry.source in state:
                state[entry.name] = state[entry.source]
            continue
        value = value_of(tensors[entry.name])
        assert value is not None
        full = _collect(value, specs.get(entry.name), mesh)
        if full is not None and mesh.coordinate.pipe > 0:
            dist.send(full.to(value.device), mesh.peer(0), group=mesh.pipe_group)
        elif full is not None:
            state[entry.name] = full
    device = next(model.parameters()).device
    for stage, theirs in others.items():
        # One at a time, in the order in which that stage sends them.
        for entry in theirs:
            if entry.source != entry.name:
                state[entry.name] = state[entry.source]
                continue
            received = torch.empty(entry.shape, dtype=entry.dtype, device=device)
            dist.recv(received, mesh.peer(stage), group=mesh.pipe_group)
            state[entry.name] = received.cpu()
    return state


def _entries(
    model: nn.Module, tensors: dict[str, torch.Tensor], specs: dict[str, ShardingSpec], value_of: _ValueOf
) -> list[_Entry]:
    """The tensors to send; the same on all ranks of a mesh. Parameters shared with the first stage aren't sent."""
    repeated: dict[str, nn.Parameter] = {}
    if isinstance(model, StageModel) and mesh_of(model).has_last_stage:
        repeated = model.staging.shared
    names = {id(parameter): name for name, parameter in repeated.items()}
    entries = []
    for name, tensor in tensors.items():
        value = value_of(tensor)
        if value is None or name in repeated:
            continue
        spec = specs.get(name)
        shape = value.shape if spec is None else spec.shape
        entries.append(_Entry(name, names.setdefault(id(tensor), name), tuple(shape), value.dtype))
    return entries


def _of_other_stages(entries: list[_Entry], mesh: Mesh) -> dict[int, list[_Entry]]:
    """The other stages' entries by stage, on the first rank of the first stage; empty on other ranks."""
    if mesh.topology.pipe == 1 or mesh.index(*AXES) > 0:
        return {}
    here = mesh.coordinate.pipe == 0
    gathered: list[Any] | None = [None] * mesh.topology.pipe if here else None
    dist.gather_object(entries, gathered, dst=mesh.peer(0), group=mesh.pipe_group)
    return dict(list(enumerate(gathered))[1:]) if gathered else {}


def _collect(value: torch.Tensor, spec: ShardingSpec | None, mesh: Mesh) -> torch.Tensor | None:
    """The full tensor on the CPU of the first rank of a stage's mesh; None on other ranks."""
    peers = mesh.mesh_ranks
    if spec is None:
        # Not sharded: every rank has all of it.
        return value.to("cpu", copy=True) if mesh.rank == peers[0] else None
    shard = value.contiguous()
    if len(peers) == 1:
        shards: list[torch.Tensor] | None = [shard]
    else:
        shards = [torch.empty_like(shard) for _ in peers] if mesh.rank == peers[0] else None
        dist.gather(shard, shards, dst=peers[0], group=mesh.mesh_group)
    if shards is None:
        return None
    full = torch.empty(spec.shape, dtype=shard.dtype, device="cpu")
    for rank, piece in zip(peers, shards, strict=True):
        put_shard(full, piece.cpu(), spec, mesh.shape, mesh.topology.coordinate(rank))
    return full
