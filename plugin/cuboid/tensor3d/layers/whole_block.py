"""Blocks that are computed whole: convolutions, state spaces, or attention whose heads aren't known.

Parameters are sharded like all others, 1/(b·s·h) on a rank. While the block's own code runs, they are unsharded, and
the input ``[B/b, S/s, H/h]`` is gathered to ``[B/b, S, H]``; each rank keeps its own part of the output. Along `batch`
this is FSDP, and as good as any other layout. Along the other axes it is redundant: all ranks of sequence × hidden
compute the same.

Autograd saves whole activations of the block, but only shards of its parameters, which are gathered again in backward.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch
from torch import nn

from cuboid.distributed.axis_collectives import (
    SEQUENCE_DIM,
    gather_dim,
    gather_positions,
    own_positions,
    own_slice,
    padded_length,
    positions_are_whole,
)
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.no_compile import uncompiled
from cuboid.distributed.topology import AXES, Axis
from cuboid.errors import UnsupportedModelError
from cuboid.tensor3d.layers.dropout import random_numbers_of_block
from cuboid.tensor3d.layers.linear import checked_dtype
from cuboid.tensor3d.running_forward import check_called_inside, forward_runs
from cuboid.tensor3d.sharding.bucketing import start_reduce_scatters, start_unshards
from cuboid.tensor3d.sharding.four_bits import FourBits
from cuboid.tensor3d.sharding.sharded_param import ShardedModule, ShardedParam, shard_in_place
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec, take_shard

_FEATURE_DIM = -1


#: Attribute of the class of a block that is computed whole: the class whose code it is.
WHOLE_OF = "cuboid_whole_of"


class KeptWhole(ShardedModule):
    """Mixin for the modules of a block, which unshards the parameters of all of them together."""

    is_prefetched = False


class KeptInFourBits(KeptWhole):
    """Of a linear layer whose weight is stored in 4 bits."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product in the dtype that the block has restored the weight in, as bitsandbytes' layers compute it."""
        dtype = checked_dtype(x, self.weight.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return nn.functional.linear(x.to(dtype), self.weight, bias).to(x.dtype)


def keep_whole(
    module: nn.Module,
    parameters: dict[str, nn.Parameter],
    *,
    mesh: Mesh,
    specs: dict[str, ShardingSpec],
    four_bits: FourBits | None = None,
) -> None:
    """Shard the parameters of a block, or of a module inside one, in place. Its class keeps its name and code.

    Args:
        module: the module.
        parameters: shards, by name.
        mesh: that they are cut over.
        specs: how.
        four_bits: how the weight of a linear layer is stored in 4 bits; None if it has its own elements.
    """
    kind = KeptWhole if four_bits is None else KeptInFourBits
    shard_in_place(module, kind, parameters, mesh=mesh, specs=specs)
    if four_bits is not None:
        assert isinstance(module, KeptInFourBits)
        module.sharded_params["weight"].store_in(four_bits)


def cut_and_keep_whole(module: nn.Module, mesh: Mesh) -> None:
    """As :func:`keep_whole`, of a module whose parameters are whole: they are cut along dim 0 over all axes."""
    specs = {name: ShardingSpec(tuple(x.shape), ((),) * x.dim()) for name, x in module.named_parameters()}
    shards = {
        name: nn.Parameter(take_shard(x.detach(), specs[name], mesh), requires_grad=x.requires_grad)
        for name, x in module.named_parameters()
    }
    keep_whole(module, shards, mesh=mesh, specs=specs)


class LateSplit:
    """Splits activations at the first layer and gathers them after the last, if code around layers needs them whole.

    Attributes:
        rejoins: whether it gathers them after the last layer. If not, only code before the layers needs them whole.
        is_whole: whether activations are whole at this point of the running forward.
    """

    def __init__(self, mesh: Mesh, *, rejoins: bool = True) -> None:
        self._mesh, self.rejoins = mesh, rejoins
        self._is_split = mesh.size("sequence", "hidden") > 1
        self.is_whole = False
        self._source: weakref.ref[torch.Tensor] | None = None

    @uncompiled
    def begin(self, _: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        """A forward hook of the embedding: ``[B/b, S/s, H/h]`` to ``[B/b, S, H]``."""
        if not self._is_split:
            return output
        self.is_whole = True
        full: torch.Tensor = _GatherActivation.apply(output, self._mesh)
        return full

    @uncompiled
    def enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward pre-hook of layers and of the head: the first one that runs splits the whole ``[B/b, S, H]``."""
        if not self.is_whole:
            return None
        self.is_whole = False
        stream = next(x for x in (*args, *kwargs.values()) if _is_activation(x))
        # A part of an encoder's output, if that is longer, may have the shape of a whole activation of the decoder.
        source = None if self._source is None else self._source()

        def part(x: Any) -> Any:
            is_whole = _is_activation(x) and x.shape == stream.shape and x is not source
            return _OwnPart.apply(x, self._mesh) if is_whole else x

        return tuple(map(part, args)), {name: part(x) for name, x in kwargs.items()}

    @uncompiled
    def leave(self, _: nn.Module, __: Any, output: Any) -> Any:
        """A forward hook of the last layer: ``[B/b, S/s, H/h]`` to ``[B/b, S, H]``."""
        if not self._is_split:
            return output
        self.is_whole = True
        if isinstance(output, tuple):
            return _GatherActivation.apply(output[0], self._mesh), *output[1:]
        return _GatherActivation.apply(output, self._mesh)

    def whole_shape(self, part: torch.Tensor) -> tuple[int, int, int]:
        """The shape of the activations of which a rank has a part."""
        batch, length, width = part.shape
        return batch, length * _sequence_pieces(self._mesh), width * self._mesh.size("hidden")

    @uncompiled
    def end(self, _: nn.Module, __: Any, output: Any) -> Any:
        """A forward hook of the base model: replaces its last hidden state by the rank's part."""
        if self.is_whole:
            output.last_hidden_state = self.own_part(output.last_hidden_state)
        return output

    def split_source(self, hidden: torch.Tensor, *, is_whole: bool = False) -> torch.Tensor:
        """The rank's part of an encoder's output, which :meth:`enter` passes to a decoder's layers unchanged.

        ``is_whole`` says that the encoder is a tower, whose output is.
        """
        self.is_whole = self.is_whole or (is_whole and self._is_split)
        part = self.own_part(hidden)
        self._source = weakref.ref(part)
        return part

    def own_part(self, hidden: torch.Tensor) -> torch.Tensor:
        """The rank's part of the base model's last hidden state, which is whole unless a head or hook has split it."""
        if not self.is_whole:
            return hidden
        self.is_whole = False
        part: torch.Tensor = _OwnPart.apply(hidden, self._mesh)
        return part


class ImageSplit:
    """Splits activations at the first layer of a list and gathers them after its last, for image models.

    Their length, such as 197 for 196 patches and a class token, is known only there. Inside the layers it is padded to
    a multiple of the mesh's axes; attention and blocks that are computed whole don't see the padding.

    Attributes:
        length: S of the last micro-batch; 0 before the first. All images of a model have one size.
    """

    #: Outside of the layers, activations are always whole.
    is_whole = True

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._granule = math.lcm(mesh.size("sequence"), mesh.size("hidden"))
        self.length = 0

    @uncompiled
    def enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward pre-hook of the first layer: ``[B/b, S, H]`` to ``[B/b, S'/s, H/h]``."""
        stream = next(x for x in (*args, *kwargs.values()) if _is_activation(x))
        if self.length not in (0, stream.shape[1]):
            raise UnsupportedModelError(
                f"layers were given {stream.shape[1]} positions, and {self.length} before; on a mesh all images of a "
                "model must make as many"
            )
        self.length = stream.shape[1]

        def part(x: Any) -> Any:
            return self.part(x) if _is_activation(x) and x.shape == stream.shape else x

        return tuple(map(part, args)), {name: part(x) for name, x in kwargs.items()}

    @uncompiled
    def leave(self, _: nn.Module, __: Any, output: Any) -> Any:
        """A forward hook of the last layer: ``[B/b, S'/s, H/h]`` to ``[B/b, S, H]``."""
        if isinstance(output, tuple):
            return self.whole(output[0]), *output[1:]
        return self.whole(output)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """Pad ``[B/b, S, …]`` to S', and take this rank's part."""
        x = self.filled_up(x, SEQUENCE_DIM)
        if self._mesh.size("sequence", "hidden") == 1:
            return x
        part: torch.Tensor = _OwnPart.apply(x, self._mesh)
        return part

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`part`."""
        if self._mesh.size("sequence", "hidden") > 1:
            x = _GatherActivation.apply(x, self._mesh)
        return x.narrow(SEQUENCE_DIM, 0, self.length)

    def filled_up(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Pad a dim of S positions with zeros to S'."""
        padding = padded_length(self.length, self._granule) - self.length
        return nn.functional.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, padding)) if padding else x


def compute_whole(
    block: nn.Module,
    mesh: Mesh,
    late: LateSplit | ImageSplit | None = None,
    *,
    everywhere: bool = False,
    images: ImageSplit | None = None,
    tower: bool = False,
) -> None:
    """Make a block compute whole, in place. :func:`keep_whole` must have sharded its modules.

    Args:
        block: any module.
        mesh: that of its parameters.
        late: tracks whether activations are whole, for a block outside of the layers where they may be.
        everywhere: whether all ranks of the mesh get the same input, that of the whole micro-batch.
        images: pads and splits the activations of images, for a block inside a layer.
        tower: whether ranks of sequence × hidden get the same input, that of the images in their rows.
    """
    is_stored = any(isinstance(module, KeptInFourBits) for module in block.modules())
    if mesh.shape.size > 1 or is_stored:
        # A single rank has nothing to split, whatever its input is.
        everywhere = everywhere or mesh.shape.size == 1
        vars(block).update(cuboid_late=late, cuboid_everywhere=everywhere, cuboid_images=images, cuboid_tower=tower)
        cls: Any = type(block)
        block.__class__ = _computed_whole(cls)


@cache
def _computed_whole(cls: Any) -> type[nn.Module]:
    # `wraps` keeps the signature, from which other code reads which arguments a layer takes.
    @wraps(cls.forward)
    @uncompiled
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _run(self, cls, args, kwargs)

    members = {"forward": forward, WHOLE_OF: cls, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), members)


def _run(block: Any, cls: type[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not forward_runs():
        check_called_inside(block, block.mesh)
    mesh: Mesh = block.mesh
    late: LateSplit | ImageSplit | None = block.cuboid_late
    images: ImageSplit | None = block.cuboid_images
    if block.cuboid_everywhere:
        with unsharded_block(block, AXES):
            return cls.forward(block, *args, **kwargs)
    is_late = late is not None and (late.is_whole or mesh.size("sequence", "hidden") == 1)
    if is_late or block.cuboid_tower:
        # Ranks of sequence × hidden have the same whole activations, too.
        device = next(block.parameters()).device
        with random_numbers_of_block(mesh, device), unsharded_block(block):
            return cls.forward(block, *args, **kwargs)
    split = activation_split(mesh)
    if images is not None:
        split = ActivationSplit(mesh, images.whole, images.part, images.length)

    def forward(*args: Any, **kwargs: Any) -> Any:
        # All ranks of sequence × hidden must draw the same random numbers, ranks along `batch` different ones.
        with random_numbers_of_block(mesh, next(block.parameters()).device), unsharded_block(block):
            return cls.forward(block, *args, **kwargs)

    return on_whole_activations(cls.__name__, split, forward, args, kwargs)


@dataclass(frozen=True)
class ActivationSplit:
    """How activations become whole, and parts again; by default they stay as they are.

    ``length`` is that of whole sequences; None if the axis `sequence` divides it.
    """

    mesh: Mesh
    to_whole: Callable[[torch.Tensor], torch.Tensor] | None = None
    to_part: Callable[[torch.Tensor], torch.Tensor] | None = None
    length: int | None = None


def activation_split(mesh: Mesh) -> ActivationSplit:
    """Of activations ``[B/b, S/s, H/h]``."""
    if mesh.size("sequence", "hidden") == 1:
        return ActivationSplit(mesh)
    return ActivationSplit(mesh, lambda x: _GatherActivation.apply(x, mesh), lambda x: _OwnPart.apply(x, mesh))


def on_whole_activations(
    name: str, split: ActivationSplit, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a block's forward with whole activations among its arguments, and return the rank's parts of its results.

    Raises:
        UnsupportedModelError: there is no activation among them; names the block.
    """
    stream = next((x for x in (*args, *kwargs.values()) if _is_activation(x)), None)
    if stream is None:
        raise UnsupportedModelError(
            f"{name} would have to be computed whole, and isn't called with an activation [B, S, H]"
        )
    batch, length, width = stream.shape
    pieces = _sequence_pieces(split.mesh)
    is_cut = pieces > 1

    def gather(x: Any) -> Any:
        # Every activation among the arguments is gathered, which its shape tells. Rotary cosines and sines have three
        # dims too, but the whole sequence already; where it isn't split, only their width differs.
        is_part = _is_activation(x) and x.shape[:2] == (batch, length) and (is_cut or x.shape[2] == width)
        return split.to_whole(x) if is_part and split.to_whole is not None else x

    positions = length * pieces if split.length is None else split.length

    def take_part(x: Any) -> Any:
        is_whole = _is_activation(x) and x.shape[:2] == (batch, positions)
        return split.to_part(x) if is_whole and split.to_part is not None else x

    output = forward(*[gather(x) for x in args], **{name: gather(x) for name, x in kwargs.items()})
    if isinstance(output, tuple):
        return tuple([take_part(x) for x in output])
    return take_part(output)


def _is_activation(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() == 3 and x.is_floating_point()


class _GatherActivation(torch.autograd.Function):
    """``[B/b, S/s, H/h]`` to ``[B/b, S, H]``, from which all ranks of sequence × hidden compute the same."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        ctx.mesh = mesh
        gathered = gather_positions(gather_dim(x, _FEATURE_DIM, mesh.along("hidden")), mesh.along("sequence"))
        # Where a rank has a single position, gathering permutes dims only, and models take views of their inputs.
        return gathered.contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        # All ranks of sequence × hidden computed the same gradient of all of x: nothing to reduce.
        return _own_part(gradient, ctx.mesh).contiguous(), None


class _OwnPart(torch.autograd.Function):
    """The transpose of :class:`_GatherActivation`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        ctx.mesh = mesh
        # Not a view, because some models add to it in place.
        return _own_part(x, mesh).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        hidden, sequence = ctx.mesh.along("hidden"), ctx.mesh.along("sequence")
        return gather_dim(gather_dim(gradient, _FEATURE_DIM, hidden), SEQUENCE_DIM, sequence), None


def _own_part(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    return own_slice(own_positions(x, mesh.along("sequence")), x.dim() - 1, mesh.along("hidden"))


def _sequence_pieces(mesh: Mesh) -> int:
    # Layers in a graph have cut positions, and Dynamo can't ask the context.
    is_cut = torch.compiler.is_compiling() or not positions_are_whole()
    return mesh.size("sequence") if is_cut else 1


@contextmanager
def unsharded_block(
    block: nn.Module, same: tuple[Axis, ...] = ("sequence", "hidden"), *, alone: bool = False
) -> Iterator[None]:
    """Inside a ``with``, the modules of a block, or it ``alone``, have their unsharded parameters.

    Ranks along ``same`` compute the same, so their gradients are averaged, not summed.
    """
    owners = [
        (module, name, param)
        for module in ((block,) if alone else block.modules())
        if isinstance(module, ShardedModule)
        for name, param in module.sharded_params.items()
    ]
    shards: list[Any] = [module._parameters[name] for module, name, _ in owners]
    params = [param for _, _, param in owners]
    full_params = _UnshardAll.apply(params, same, *shards) if owners else ()
    hooks = _SavedByNumber(params, shards, full_params)
    for (module, name, _), full in zip(owners, full_params, strict=True):
        module._parameters[name] = full  # type: ignore[assignment]
    try:
        with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
            yield
    finally:
        for (module, name, _), shard in zip(owners, shards, strict=True):
            module._parameters[name] = shard


class _UnshardAll(torch.autograd.Function):
    """Unshard the parameters of a block, in buckets."""

    @staticmethod
    def forward(
        ctx: Any, params: Sequence[ShardedParam], same: tuple[Axis, ...], *shards: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.params, ctx.same = params, same
        ctx.set_materialize_grads(False)
        full_params = _gathered(params, shards)
        # Otherwise autograd would compute gradients of frozen weights beside trained ones, and send them.
        frozen = [
            full for full, needs_grad in zip(full_params, ctx.needs_input_grad[2:], strict=True) if not needs_grad
        ]
        ctx.mark_non_differentiable(*frozen)
        return full_params

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        pairs = [
            (param, gradient) for param, gradient in zip(ctx.params, gradients, strict=True) if gradient is not None
        ]
        if not pairs:
            return None, None, *gradients
        mesh = pairs[0][0].mesh
        # This many ranks have computed the same gradient, and the reduce-scatter sums all of them.
        same = mesh.size(*ctx.same)
        totals = [(param, param.to_reduce(gradient / same if same > 1 else gradient)) for param, gradient in pairs]
        ready = {param: total for param, total in totals if total is not None}
        reducing = start_reduce_scatters(list(ready), list(ready.values()))
        reduced = {param: pending.wait() for param, pending in zip(ready, reducing, strict=True)}
        return None, None, *map(reduced.get, ctx.params)


def _gathered(params: Sequence[ShardedParam], shards: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    shards = [shard.detach() for shard in shards]
    start_unshards(params, shards)
    full_params = []
    for param, shard in zip(params, shards, strict=True):
        if not param.unshards:
            full_params.append(shard.view_as(shard))
        else:
            # Contiguous, out of a bucket's buffer: `_SavedByNumber` recognises a parameter by its storage.
            full_params.append(param.unsharded().contiguous())
            param.reshard()
    return tuple(full_params)


class _SavedByNumber:
    """Saved-tensor hooks that save a block's parameters by number only; backward gathers all of them again, once.

    Everything else goes through the hooks around the block. Autograd would call the innermost ones alone: activation
    checkpointing would keep what the block saves, and nothing that offloads or counts would see it.
    """

    def __init__(
        self, params: Sequence[ShardedParam], shards: Sequence[torch.Tensor], full_params: Sequence[torch.Tensor]
    ) -> None:
        self._params, self._shards = params, shards
        self._versions = [shard._version for shard in shards]
        self._numbers = {_storage(full): number for number, full in enumerate(full_params)}
        self._wholes: tuple[torch.Tensor, ...] | None = None
        around = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._pack_around, self._unpack_around = (_as_it_is, _as_it_is) if around is None else around

    def pack(self, x: torch.Tensor) -> Any:
        number = self._numbers.get(_storage(x)) if x.numel() else None
        if number is None:
            return None, self._pack_around(x)
        # Autograd may save a view of the parameter, such as its transpose.
        return number, (x.size(), x.stride(), x.storage_offset())

    def unpack(self, packed: Any) -> torch.Tensor:
        number, saved = packed
        if number is None:
            activation: torch.Tensor = self._unpack_around(saved)
            return activation
        if self._wholes is None:
            if self._versions != [shard._version for shard in self._shards]:
                raise RuntimeError("a parameter was changed between a forward and its backward")
            self._wholes = _gathered(self._params, self._shards)
        return self._wholes[number].as_strided(*saved)


def _as_it_is(saved: Any) -> Any:
    return saved


def _storage(x: torch.Tensor) -> int:
    """An id of a tensor's storage, also of one without memory, as long as the storage lives."""
    return x.untyped_storage()._cdata  # type: ignore[no-any-return, unused-ignore]
