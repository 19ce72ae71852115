"""Records what a base model computes outside its layers for a whole sequence, so that each segment is given its part.

A model's own code only ever sees the segment that runs. Some results depend on the whole sequence: ``dynamic`` and
``longrope`` rotary embeddings choose their frequencies by the longest position, and OPT counts positions by the mask.
So the base model's own forward runs once more for each micro-batch, without its layers and weights, and three things
are recorded: the arguments of layers, the outputs of modules without parameters, and the indices that position tables
were looked up with. The hidden state of that run is a ``FakeTensor``, which takes neither memory nor time. Results that
depend on it are ``FakeTensor``s too; they are left to the segment's own forward.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from transformers import PreTrainedModel

from cuboid.errors import UnsupportedModelError
from cuboid.models.attention.forward_context import UnitSlot, recording, without_values
from cuboid.models.attention.whole_sequence import Replay, WholeSequence
from cuboid.models.stages.outline import Outline
from cuboid.models.stages.placeholders import PlaceholderLayer, PlaceholderModule
from cuboid.tensor3d.sharding.sharded_param import ShardedModule


class WholeSequenceRecorder:
    """Records whole sequences with one stage's base model, and hooks its modules to use the records in segments.

    Args:
        model: a stage's model, with all modules in place.
        outline: the whole model's outline.
        own_layers: the stage's layers by name.
        slot: holds the current unit.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        outline: Outline,
        own_layers: dict[str, nn.Module],
        slot: UnitSlot,
    ) -> None:
        self._model, self._outline, self._slot = model, outline, slot
        for name, layer in own_layers.items():
            layer.register_forward_pre_hook(functools.partial(_give_whole, name, slot), with_kwargs=True)
        tables = dict(_position_tables(model, outline))
        for name, table in tables.items():
            _mix_in(_PositionTable, table, name, slot)
        plain = dict(_without_parameters(model, outline))
        for name, module in plain.items():
            _mix_in(_LengthAware, module, name, slot)
        self._base = _shell_of(model, outline, own_layers, kept={**plain, **tables}, slot=slot)

    def record(
        self,
        rows: int,
        length: int,
        device: torch.device,
        position_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
    ) -> WholeSequence:
        """Run the base model on ``rows`` sequences of ``length`` tokens.

        Args:
            rows: B, on this rank.
            length: S.
            device: the device of the weights.
            position_ids: ``[B, S]`` or ``[1, S]``; None if the model is to compute them itself.
            attention_mask: ``[B, S]``, or None.

        Raises:
            UnsupportedModelError: the model's code doesn't run without token ids and hidden states.
        """
        arguments = {"position_ids": position_ids, "attention_mask": attention_mask}
        options: dict[str, Any] = {k: x for k, x in arguments.items() if x is not None and k in self._outline.options}
        options.update(self._outline.fixed_options)
        self._slot.recording = whole_sequence = WholeSequence(length)
        log = logging.getLogger(FakeTensor.__module__)  # would log each exception below on every rank
        # Setting its level instead would walk through all loggers of the process, which takes a millisecond.
        disabled, log.disabled = log.disabled, True
        try:
            with recording(self._slot.masks), torch.no_grad():
                hidden = without_values((rows, length, self._outline.width), self._model.dtype, device)
                # Call the class's forward: hooks on the base model are the user's, and meant for real forwards.
                type(self._base).forward(self._base, inputs_embeds=hidden, **options)
        except Exception as error:
            raise UnsupportedModelError(
                f"{type(self._model).__name__} has no rule with segments or padding: what its layers are given can't "
                f"be computed for a whole sequence alone: {type(error).__name__}: {error}"
            ) from error
        finally:
            log.disabled = disabled
            self._slot.recording = None
        return whole_sequence


# --- the base model without layers and weights ---------------------------------------------------------------------


class _KeepArguments(PlaceholderLayer):
    """Placeholder for a layer of this stage; records the layer's arguments."""

    def __init__(self, name: str, layer: nn.Module, outline: Outline, slot: UnitSlot) -> None:
        super().__init__(layer, outline)
        self._name, self._slot = name, slot

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Record the arguments, and return the hidden state."""
        assert self._slot.recording is not None
        self._slot.recording.layers[self._name] = tree_flatten((args, kwargs))
        return super().forward(*args, **kwargs)


class _Unknown(PlaceholderModule):
    """Placeholder for a module with parameters, whose result has no values in a recording."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The given hidden state, or a scalar without values."""
        hidden = super().forward(*args, **kwargs)
        return hidden if isinstance(hidden, FakeTensor) else without_values((), hidden.dtype, hidden.device)


class _WithoutHooks(nn.Module):
    """Calls a module without its hooks (the user's, meant for real forwards); all other attributes are the module's."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        # In a tuple, so that it isn't registered as a submodule.
        self._module = (module,)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own result."""
        return self._module[0].forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"][0], name)


def _shell_of(
    model: PreTrainedModel,
    outline: Outline,
    own_layers: dict[str, nn.Module],
    *,
    kept: dict[str, nn.Module],
    slot: UnitSlot,
) -> nn.Module:
    """A copy of the base model, with placeholders for the layers and for modules with weights that aren't ``kept``."""
    layers = nn.ModuleList(
        _KeepArguments(name, layer, outline, slot) if name in own_layers else PlaceholderLayer(layer, outline)
        for name, layer in (
            (outline.layer(index), model.get_submodule(outline.layer(index))) for index in range(outline.count)
        )
    )
    copy_of_base = _copied(model.get_submodule(outline.base))
    copies = {"": copy_of_base}
    _replace(copy_of_base, copies, outline.layers.removeprefix(f"{outline.base}."), layers)
    for name, module in kept.items():
        # A sharded module, such as a norm without a weight, would run collectives on the hidden state.
        twin = _Unknown(model.dtype) if isinstance(module, ShardedModule) else _WithoutHooks(module)
        _replace(copy_of_base, copies, name.removeprefix(f"{outline.base}."), twin)
    for unit in (*outline.before, *outline.after):
        if unit not in kept:
            _replace(copy_of_base, copies, unit.removeprefix(f"{outline.base}."), _Unknown(model.dtype))
    return copy_of_base


def _replace(copy_of_base: nn.Module, copies: dict[str, nn.Module], name: str, module: nn.Module) -> None:
    """Put a module into the copy of the base model. The modules that contain it are copied first, each once."""
    *parents, last = name.split(".")
    owner = copy_of_base
    for depth, part in enumerate(parents):
        path = ".".join(parents[: depth + 1])
        if path not in copies:
            copies[path] = _copied(owner.get_submodule(part))
            owner._modules[part] = copies[path]
        owner = copies[path]
    owner._modules[last] = module


def _copied(module: nn.Module) -> nn.Module:
    """A shallow copy of a module, with its own dict of children and without hooks."""
    twin: nn.Module = object.__new__(type(module))
    twin.__dict__.update(vars(module))
    twin._modules = dict(module._modules)
    twin._forward_hooks, twin._forward_pre_hooks = type(module._forward_hooks)(), type(module._forward_pre_hooks)()
    return twin


def _position_tables(model: PreTrainedModel, outline: Outline) -> Iterator[tuple[str, nn.Module]]:
    """The position tables that a rank has whole.

    Sharded ones are looked up with the positions that the model is given for a segment. Models that are given none are
    certified on a mesh with whole sequences only.
    """
    for name in outline.before:
        module = model.get_submodule(name)
        if isinstance(module, nn.Embedding) and not isinstance(module, ShardedModule) and name != outline.embedding:
            yield name, module


def _without_parameters(model: PreTrainedModel, outline: Outline) -> Iterator[tuple[str, nn.Module]]:
    """The largest modules without parameters in the base model outside the layers, such as rotary embeddings."""
    around = {outline.base}
    parts = outline.layers.split(".")
    around |= {".".join(parts[: end + 1]) for end in range(len(parts)) if len(outline.base.split(".")) <= end + 1}
    around.discard(outline.layers)
    for name in sorted(around):
        for child, module in model.get_submodule(name).named_children():
            full = f"{name}.{child}"
            absent = isinstance(module, PlaceholderModule)
            if full not in (*around, outline.layers) and not absent and not any(True for _ in module.parameters()):
                if isinstance(module, nn.ModuleList | nn.ModuleDict):
                    # A list isn't called; its members are.
                    yield from ((f"{full}.{member}", called) for member, called in module.named_children())
                else:
                    yield full, module


# --- segments' forwards --------------------------------------------------------------------------------------------


class _Aware(nn.Module):
    """Mixed into a module's own class by :func:`_mix_in`.

    Attributes:
        cuboid_name: the module's name in the model.
        cuboid_slot: holds the current unit.
    """

    cuboid_name: str
    cuboid_slot: UnitSlot

    def running_replay(self) -> Replay | None:
        """The replay of the unit that is running; None if the model's own code sees the whole sequence."""
        unit = self.cuboid_slot.current
        return None if unit is None else unit.replay


def _mix_in(mixin: type[_Aware], module: nn.Module, name: str, slot: UnitSlot) -> None:
    module.__class__ = _mixed(mixin, type(module))  # type: ignore[arg-type]
    vars(module).update(cuboid_name=name, cuboid_slot=slot)


@functools.cache
def _mixed(mixin: type[_Aware], base: type[nn.Module]) -> type[nn.Module]:
    return type(base.__name__, (mixin, base), {"__module__": base.__module__, "__qualname__": base.__qualname__})


class _LengthAware(_Aware):
    """A module without parameters, whose results for segments are cut from the recorded ones.

    Results that depend on the hidden state are computed by the segment. The others aren't, so a module with state, such
    as a ``dynamic`` rotary embedding, only ever sees whole sequences.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own result, or the segment's part of the recorded one."""
        recording, replay = self.cuboid_slot.recording, self.running_replay()
        if recording is not None:
            outputs = super().forward(*args, **kwargs)
            recording.outputs.setdefault(self.cuboid_name, []).append(self._with_dims(outputs, args, kwargs))
            return outputs
        if replay is None:
            return super().forward(*args, **kwargs)
        kept, number = replay.whole_sequence.outputs.get(self.cuboid_name, []), replay.next_call(self.cuboid_name)
        if number >= len(kept) or kept[number] is None:
            return super().forward(*args, **kwargs)
        leaves, dims, spec = kept[number]
        return tree_unflatten(
            [x if dim is None else replay.cut(x, dim) for x, dim in zip(leaves, dims, strict=True)], spec
        )

    def _with_dims(self, outputs: Any, args: Any, kwargs: Any) -> tuple[list[Any], list[int | None], Any] | None:
        """The outputs' leaves, the dim of S positions of each, and their pytree spec.

        None if they depend on the hidden state.
        """
        leaves, spec = tree_flatten(outputs)
        if any(isinstance(x, FakeTensor) for x in leaves):
            return None
        assert self.cuboid_slot.recording is not None
        length = self.cuboid_slot.recording.length
        candidates = [[dim for dim, size in enumerate(getattr(x, "shape", ())) if size == length] for x in leaves]
        if any(len(dims) > 1 for dims in candidates) and length > 1:
            # Another dim happens to have size S too. Only the dim of positions changes for a sequence shorter by one.
            shorter = tree_leaves(self._of_shorter(length, args, kwargs))
            candidates = [
                [dim for dim in dims if short.shape[dim] != length]
                for dims, short in zip(candidates, shorter, strict=True)
            ]
        return leaves, [dims[0] if dims else None for dims in candidates], spec

    def _of_shorter(self, length: int, args: Any, kwargs: Any) -> Any:
        def shorten(x: Any) -> Any:
            has_positions = isinstance(x, torch.Tensor) and x.dim() > 1 and x.shape[1] == length
            return x[:, : length - 1] if has_positions else x

        twin = copy.deepcopy(self, {id(self.cuboid_slot): self.cuboid_slot})
        return super(_LengthAware, twin).forward(*tree_map(shorten, args), **tree_map(shorten, kwargs))


class _Lookups(TorchFunctionMode):
    """Records the indices that a table is looked up with, in place of the lookup."""

    def __init__(self, weight: torch.Tensor, width: int, indices: list[torch.Tensor]) -> None:
        super().__init__()
        self._weight, self._width, self._indices = weight, width, indices

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.embedding and args[1] is self._weight:
            self._indices.append(args[0])
            return without_values((*args[0].shape, self._width), self._weight.dtype, args[0].device)
        return func(*args, **(kwargs or {}))


class _PositionTable(_Aware):
    """A position table, which may compute the positions itself, as OPT's does from the mask."""

    weight: nn.Parameter
    embedding_dim: int

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The table's own result, looked up with the segment's part of the recorded indices if there are any."""
        recording, replay = self.cuboid_slot.recording, self.running_replay()
        if recording is not None:
            with _Lookups(self.weight, self.embedding_dim, recording.lookups.setdefault(self.cuboid_name, [])):
                return super().forward(*args, **kwargs)
        kept = [] if replay is None else replay.whole_sequence.lookups.get(self.cuboid_name, [])
        number = 0 if replay is None else replay.next_call(self.cuboid_name)
        if replay is None or number >= len(kept):
            return super().forward(*args, **kwargs)
        index = replay.cut(kept[number], kept[number].dim() - 1)
        # Bypass a subclass's own computation of the positions, which the recorded indices already contain.
        return nn.Embedding.forward(self, index)  # type: ignore[arg-type]


def _give_whole(
    name: str, slot: UnitSlot, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A forward pre-hook of a layer: replaces its arguments by the segment's part of the recorded ones."""
    replay = None if slot.current is None else slot.current.replay
    if replay is None:
        return None
    leaves, spec = tree_flatten((args, kwargs))
    recorded, recorded_spec = replay.whole_sequence.layers[name]
    if spec != recorded_spec:
        raise UnsupportedModelError(f"{name} isn't given the same things with a segment as with its whole sequence")
    return tree_unflatten([_part(name, replay, *pair) for pair in zip(leaves, recorded, strict=True)], spec)


def _part(name: str, replay: Replay, argument: Any, recorded: Any) -> Any:
    """A layer's argument: as given if the recorded one has no values, as masks have none; else a part of that."""
    if (
        not isinstance(argument, torch.Tensor)
        or not isinstance(recorded, torch.Tensor)
        or isinstance(recorded, FakeTensor)
    ):
        numbers = isinstance(argument, int | float) and isinstance(recorded, int | float)
        if numbers and argument != recorded:
            raise UnsupportedModelError(
                f"{name} is given the number {argument} with a segment and {recorded} with its whole sequence, for "
                "which there is no rule"
            )
        return argument
    if argument.dim() == recorded.dim():
        length, here = replay.whole_sequence.length, replay.stop - replay.start
        differing = [dim for dim in range(argument.dim()) if argument.shape[dim] != recorded.shape[dim]]
        # Equal rows may be given once, in either of the two.
        differing = [dim for dim in differing if 1 not in (argument.shape[dim], recorded.shape[dim]) or here == 1]
        if all(recorded.shape[dim] == length and argument.shape[dim] == here for dim in differing):
            first_row = recorded[..., :1, -1:] if argument.dim() > 2 else recorded
            for dim in differing:
                # A bias of attention scores ``[…, Q, K]``, such as ALiBi: a segment's keys start at position 0.
                is_keys = argument.dim() > 2 and dim == argument.dim() - 1
                recorded = replay.cut(recorded, dim, start=0 if is_keys else None)
                if is_keys and dim - 1 in differing and replay.stop > length:
                    # No position may see padding. ``replay.cut`` repeats the last key there, which the last position
                    # sees; use the first position's entry for that key, which is masked.
                    recorded[..., length:] = first_row
            return recorded
    raise UnsupportedModelError(
        f"{name} is given a tensor {list(argument.shape)} with a segment of {replay.stop - replay.start} positions and "
        f"{list(recorded.shape)} with its whole sequence of {replay.whole_sequence.length}, for which there is no rule"
    )
