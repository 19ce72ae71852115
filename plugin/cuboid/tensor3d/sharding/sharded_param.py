"""A sharded parameter: unsharded for a multiplication, and resharded after it.

It follows FSDP2's per-parameter state (``torch.distributed.fsdp``), with :attr:`ShardingSpec.fsdp_axes` as the axes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from enum import Enum
from functools import cache
from typing import Any, Literal

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from cuboid.distributed.async_result import AsyncResult
from cuboid.distributed.axis_collectives import start_all_gather, start_reduce_scatter
from cuboid.distributed.mesh import Mesh
from cuboid.errors import UnsupportedModelError
from cuboid.tensor3d.sharding.deferred_reduce import DeferredReduce
from cuboid.tensor3d.sharding.four_bits import FourBits
from cuboid.tensor3d.sharding.fp8_blocks import BlockForm, Fp8Blocks, start_largest
from cuboid.tensor3d.sharding.gradient_sync import GradientSync
from cuboid.tensor3d.sharding.kept_blocks import kept_blocks
from cuboid.tensor3d.sharding.optimizer_steps import OptimizerSteps
from cuboid.tensor3d.sharding.refused_draws import RefusesDraws, words_of_apply
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec, take_shard
from cuboid.tensor3d.sharding.weight_gradients import WeightGradientStore

#: How the ranks' gradients of a block are summed; see :func:`set_gradient_reduce`.
GradientReduce = Literal["auto", "fp32", "backend"]
#: Gradients with elements of at least so many bytes are summed in their own dtype.
FULL_ITEMSIZE = torch.float32.itemsize


class ShardedState(Enum):
    """Where a parameter is in its life cycle; named after FSDP2's enum."""

    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"


class UnshardedCopy:
    """An unsharded block that lives as long as it is referred to, and what identifies the values it was gathered from.

    The values are identified by ``parameter``, the model's own shard, and by the optimizer's steps so far. Not by the
    tensor that was gathered: that may be a temporary cast, whose address depends on the rank's allocator, and all ranks
    must agree on whether a collective is needed.
    """

    def __init__(self, block: torch.Tensor, parameter: torch.Tensor, steps: OptimizerSteps) -> None:
        self.block = block
        # A weak reference; but while it exists, the storage's address isn't reused.
        self._storage = StorageWeakRef(parameter.untyped_storage())
        self._values = self._values_of(parameter, steps)

    def is_of(self, parameter: torch.Tensor, dtype: torch.dtype, steps: OptimizerSteps) -> bool:
        """Whether the block still has the parameter's values, in this dtype."""
        is_same = self._storage.cdata == parameter.untyped_storage()._cdata and self.block.dtype == dtype
        return is_same and self._values == self._values_of(parameter, steps)

    @staticmethod
    def _values_of(parameter: torch.Tensor, steps: OptimizerSteps) -> tuple[int, ...]:
        return int(parameter.storage_offset()), parameter._version, steps.count


class ShardedParam:
    """Unshards one parameter into the block that a multiplication needs, and reduce-scatters its gradient.

    ``SHARDED --start_unshard()--> UNSHARDING --unsharded()--> UNSHARDED --reshard()--> SHARDED``. A prefetch may start
    the all-gather early; :meth:`start_unshard` does nothing if it has. :meth:`reshard` frees the block.
    """

    def __init__(self, spec: ShardingSpec, mesh: Mesh) -> None:
        self.spec = spec
        self.mesh = mesh
        #: The ranks that the block is sharded over.
        self.along = mesh.along(*spec.fsdp_axes)
        #: Shards per block. If it is 1, there is never a collective.
        self.ranks = self.along.size
        #: Whether the block is another tensor than the shard.
        self.unshards = self.ranks > 1
        #: How a frozen weight's shard is stored in 4 bits; None if it has the weight's own elements.
        self.four_bits: FourBits | None = None
        self.block_shape = spec.block_shape(mesh.shape)
        self._shard_shape = spec.shard_shape(mesh.shape)
        self.state = ShardedState.SHARDED
        self._dtype: torch.dtype | None = None
        self._pending: AsyncResult[torch.Tensor] | None = None
        #: In fp8: what :class:`Fp8Blocks` makes of it.
        self._block: Any = None
        #: How the block is unsharded in fp8; None if it never is.
        self.fp8: Fp8Blocks | None = None
        self._form = BlockForm.WIDE
        #: Whether backward recomputes the last forward: they share a block, which each rounds by its own scales.
        self.is_recomputed = False
        #: The largest magnitudes in the block's columns, or a message in flight: those of the last forward.
        self.largest: Any = None
        #: With "weight_gather": "step", where blocks stay unsharded after a forward: counts the optimizer's steps, each
        #: of which makes them out of date. None where forwards reshard.
        self.optimizer_steps: OptimizerSteps | None = None
        self._copy: weakref.ref[UnshardedCopy] | None = None
        #: In a pipeline: the copies that live until the step ends; see :func:`keep_until_step_ends`.
        self.copies_of_step: list[UnshardedCopy] | None = None
        #: The model's own parameter, of which the shards are views or casts. Set where blocks stay unsharded.
        self._parameter: weakref.ref[torch.Tensor] | None = None
        self.gradient_reduce: GradientReduce = "auto"
        #: With "gradient_sync": "step": sums gradients until a step's last one. None to reduce each separately.
        self.gradient_sync: GradientSync | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> ShardedParam:
        """Of another parameter with the same spec and settings, on the same mesh."""
        copied = ShardedParam(self.spec, self.mesh)
        copied.follow(self)
        copied.fp8, copied.four_bits, copied.unshards = self.fp8, self.four_bits, self.unshards
        memo[id(self)] = copied
        return copied

    def follow(self, other: ShardedParam) -> None:
        """Unshard and reduce as another parameter of the model is set to; for one that came into the model later."""
        self.optimizer_steps, self.copies_of_step = other.optimizer_steps, other.copies_of_step
        self.gradient_reduce, self.gradient_sync = other.gradient_reduce, other.gradient_sync

    def store_in(self, four_bits: FourBits) -> None:
        """Set how the shards of the next calls are stored."""
        self.four_bits, self.unshards = four_bits, True

    def set_parameter(self, parameter: torch.Tensor) -> None:
        """Set the model's own parameter, of which the shards of the next calls are views or casts."""
        self._parameter = weakref.ref(parameter)

    def form(self, form: BlockForm) -> BlockForm:
        """What the block is really unsharded as, if a product asks for a form."""
        # A block that is kept for the step is sent once, for forwards and backwards: in fp8 it would be sent twice.
        is_wide = self.fp8 is None or self.optimizer_steps is not None
        return BlockForm.WIDE if is_wide or (form is BlockForm.COLUMNS and self.is_recomputed) else form

    def message(self, shard: torch.Tensor, form: BlockForm) -> torch.Tensor:
        """What this rank sends of a shard ``[rows/fsdp, ...]``."""
        shard, form = shard.detach(), self.form(form)
        if self.fp8 is None or form is BlockForm.WIDE:
            return shard
        if form is BlockForm.ROWS:
            return self.fp8.rows_message(shard)
        if self.largest is None:
            start_largest([self], [shard])
        return self.fp8.columns_message(shard, self.largest.wait())

    def start_unshard(self, shard: torch.Tensor) -> None:
        """Start to all-gather a shard ``[rows/fsdp, ...]``, unless its block ``[rows, ...]`` exists or is in flight."""
        if self.needs_unshard(shard):
            self.expect_unshard(shard, start_all_gather(shard.detach(), self.along))

    def needs_unshard(self, shard: torch.Tensor, form: BlockForm = BlockForm.WIDE) -> bool:
        """Whether an all-gather must be started. Discards a block of another dtype or form; reuses a valid copy."""
        if not self.unshards:
            return False
        if self.state is not ShardedState.SHARDED:
            # A block in its own dtype is right for each product.
            is_right = self._form is BlockForm.WIDE or self._form is self.form(form)
            if self._dtype != shard.dtype or not is_right:
                # Prefetched outside autocast and needed inside, or the other way round; or for another product.
                self.discard()
        # Outside of a backward and of a pipeline's step, a script may have changed the shard by ``.data``, which
        # nothing counts, while the graph of an earlier forward keeps a copy.
        may_reuse = self._copy is not None and (self.copies_of_step is not None or is_recomputing())
        copy = self._current_copy(shard.dtype) if may_reuse else None
        if self.state is ShardedState.SHARDED and copy is not None:
            self._block, self._dtype, self.state = copy.block, shard.dtype, ShardedState.UNSHARDED
            self._form = BlockForm.WIDE
        return self.state is ShardedState.SHARDED

    def expect_unshard(
        self, shard: torch.Tensor, stacked: AsyncResult[torch.Tensor], form: BlockForm = BlockForm.WIDE
    ) -> None:
        """Take over an all-gather that gives the messages of all ranks, ``[fsdp, ...]``."""
        assert self.state is ShardedState.SHARDED, "unsharded twice"
        self._dtype, self._pending = shard.dtype, stacked
        self._form = BlockForm.WIDE if self.fp8 is None else self.form(form)
        self.state = ShardedState.UNSHARDING

    def unsharded(self) -> Any:
        """Wait for the block. It is valid until :meth:`reshard`.

        Returns:
            ``[rows, ...]``, or in fp8 what :class:`Fp8Blocks` makes of it.
        """
        assert self.state is not ShardedState.SHARDED, "not unsharded"
        if self._pending is not None:
            stacked = self._pending.wait()
            if self.four_bits is not None:
                self._block = self.four_bits.block(stacked)[: self.block_shape[0]]
            elif self.fp8 is None or self._form is BlockForm.WIDE:
                # The last shard may be padded: cut the block back to its own rows.
                self._block = stacked.flatten(0, 1)[: self.block_shape[0]]
            elif self._form is BlockForm.ROWS:
                self._block = self.fp8.rows(stacked, self.block_shape[1])
            else:
                self._block = self.fp8.columns(stacked, self.largest.wait())
            self._pending = None
            self.state = ShardedState.UNSHARDED
        assert self._block is not None
        return self._block

    def reshard(self) -> None:
        """Free the block."""
        assert self.state is ShardedState.UNSHARDED, "not unsharded"
        self._block = None
        self.state = ShardedState.SHARDED

    def reshard_after_forward(self, shard: torch.Tensor, *, keep: bool) -> UnshardedCopy | None:
        """:meth:`reshard` after a forward's product; ``keep`` says whether a backward will follow.

        With "weight_gather": "step", returns the block. As long as it is referred to, it stays unsharded for the
        backward, and in a pipeline for other forwards until then.
        """
        if not self.unshards or is_recomputing():
            # The backward of a recomputed forward follows at once, and uses the same block.
            return None
        block = self.unsharded()
        self.reshard()
        parameter = None if self._parameter is None else self._parameter()
        if not keep or self.optimizer_steps is None or parameter is None:
            return None
        copy = self._current_copy(shard.dtype)
        if copy is None:
            copy = UnshardedCopy(block, parameter, self.optimizer_steps)
            self._copy = weakref.ref(copy)
            if self.copies_of_step is not None:
                self.copies_of_step.append(copy)
        # All graphs share the newest block, as those of a plain model share its weights.
        copy.block = block
        return copy

    def _current_copy(self, dtype: torch.dtype) -> UnshardedCopy | None:
        copy = None if self._copy is None else self._copy()
        parameter = None if self._parameter is None else self._parameter()
        if copy is None or parameter is None or self.optimizer_steps is None:
            return None
        return copy if copy.is_of(parameter, dtype, self.optimizer_steps) else None

    def discard(self) -> None:
        """Discard an unused all-gather, if there is one."""
        if self.state is not ShardedState.SHARDED:
            self.unsharded()
            self.reshard()

    @contextmanager
    def unshard(self, shard: torch.Tensor) -> Iterator[torch.Tensor]:
        """Unshard for the duration of a ``with`` statement."""
        if not self.unshards:
            yield shard.detach()
            return
        self.start_unshard(shard)
        try:
            yield self.unsharded()
        finally:
            # In a pipeline with "weight_gather": "step", the step's other units use the block too.
            if self.copies_of_step is None or is_recomputing():
                self.reshard()
            else:
                self.reshard_after_forward(shard, keep=True)

    def to_reduce(self, block_gradient: torch.Tensor, *, is_own: bool = False) -> torch.Tensor | None:
        """The gradient to reduce after a backward; ``is_own`` says whether it may be modified in place.

        With "gradient_sync": "step", that is the sum over the step's backwards after the last of them, and None before.
        """
        if self.gradient_sync is None or self.ranks == 1:
            return block_gradient
        return self.gradient_sync.add(self, block_gradient, is_own=is_own)

    def start_reduce_scatter(self, block_gradient: torch.Tensor) -> AsyncResult[torch.Tensor]:
        """Start to sum the ranks' gradients of the block; each rank gets the sum for its shard."""
        if self.ranks == 1:
            return AsyncResult(block_gradient)
        exchange = block_gradient.dtype.itemsize < FULL_ITEMSIZE and self.exchanges
        return start_reduce_scatter(self.stacked(block_gradient), self.along, exchange=exchange)

    @property
    def exchanges(self) -> bool:
        """Whether ranks exchange slices of 16-bit gradients and sum them in float32; see :func:`set_gradient_reduce`.

        Only meaningful for gradients with elements shorter than :data:`FULL_ITEMSIZE`.
        """
        return self.gradient_reduce == "fp32" or (self.gradient_reduce == "auto" and not self.mesh.spans_nodes)

    def stacked(self, block: torch.Tensor) -> torch.Tensor:
        """Cut a block into the ranks' shards, ``[fsdp, rows/fsdp, ...]``; padding rows are zeros."""
        height, *other_sizes = self._shard_shape
        padding_rows = self.ranks * height - block.shape[0]
        if padding_rows:
            block = torch.cat([block, block.new_zeros((padding_rows, *other_sizes))])
        return block.reshape(self.ranks, height, *other_sizes)

    def reduce_scatter(self, block_gradient: torch.Tensor) -> torch.Tensor | None:
        """:meth:`to_reduce`, then :meth:`start_reduce_scatter`, waited for. None if there is nothing to reduce yet."""
        # Saves a call in the usual case: this runs for every small parameter.
        total = block_gradient if self.gradient_sync is None else self.to_reduce(block_gradient)
        return None if total is None else self.start_reduce_scatter(total).wait()


def is_recomputing() -> bool:
    """Whether this forward runs inside a backward, as activation checkpointing's recomputation does."""
    return torch._C._current_graph_task_id() != -1


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, param: ShardedParam) -> torch.Tensor:
        ctx.param = param
        with param.unshard(shard) as block:
            return block

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        return ctx.param.reduce_scatter(gradient), None


def unshard_parameter(shard: torch.Tensor, param: ShardedParam) -> torch.Tensor:
    """Differentiable unshard, for small parameters (norms, biases) whose block autograd may save."""
    if not param.unshards:
        return shard
    kept = kept_blocks()
    if kept is None or torch.is_grad_enabled():
        return _Unshard.apply(shard, param)
    blocks = kept.find(param, (shard,))
    if blocks is None:
        blocks = (_Unshard.apply(shard, param),)
        kept.keep(param, (shard,), blocks)
    return blocks[0]


class ShardedModule(nn.Module):
    """A layer whose parameters are shards: it has the mesh, and a ShardedParam for each parameter.

    Attributes:
        prefetched_params, prefetched_shards: what the prefetcher prepared for this module's forward, by parameter name:
            unsharded small parameters, and shards whose reduce-scatter may be deferred.
        prefetched_fp8: by parameter name, what a graph is given beside a block that is sent in fp8; see
            :mod:`cuboid.tensor3d.compiled.fp8_products`.
        is_prefetched: whether the prefetcher unshards its parameters.
        gathered_once: names of small parameters with several dims. Like parameters of one dim, they are unsharded once
            per forward, bucketed with others, and autograd saves them for backward.
        weight_gradients: the store that gradients of ``weight`` may be deferred to; None if they never are.
        is_transposed: whether its matrices are kept as transposes of those that a state dict of whole ones has.
    """

    mesh: Mesh
    is_prefetched = True
    gathered_once: Collection[str] = ()
    weight_gradients: WeightGradientStore | None = None
    is_transposed = False

    def init_sharding(self, mesh: Mesh, specs: dict[str, ShardingSpec]) -> None:
        """Attach the mesh and the specs, by the parameter's name in this module."""
        self.mesh = mesh
        self.sharded_params = {name: ShardedParam(spec, mesh) for name, spec in specs.items()}
        self.prefetched_params: dict[str, torch.Tensor] = {}
        self.prefetched_fp8: dict[str, tuple[torch.Tensor | None, ...]] = {}
        self.prefetched_shards: dict[str, tuple[torch.Tensor, DeferredReduce]] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> ShardedModule:
        """A module with parameters of its own, on the same mesh; it also loads whole tensors, as PEFT's files have."""
        for common in (self.mesh, self.weight_gradients):
            memo[id(common)] = common
        # As deepcopy does by itself, without this method.
        copied: ShardedModule = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__dict__.update(deepcopy(self.__dict__, memo))
        copied.register_load_state_dict_pre_hook(take_whole)
        return copied

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        """As ``nn.Module.apply``, also from a block around it, for functions that don't draw random numbers.

        Raises:
            UnsupportedModelError: the function draws new values.
        """
        if self.mesh.shape.size == 1:
            return super().apply(fn)
        with RefusesDraws(words_of_apply(type(self).__name__, fn)):
            return super().apply(fn)

    def spec(self, name: str) -> ShardingSpec:
        """Layout of this module's parameter ``name``."""
        return self.sharded_params[name].spec

    def shard_values(self, name: str) -> torch.Tensor:
        """The values of the rank's shard of a parameter, which may be stored in 4 bits."""
        shard: torch.Tensor = getattr(self, name)
        four_bits = self.sharded_params[name].four_bits
        return shard if four_bits is None else four_bits.restore(shard.unsqueeze(0))

    def unsharded(self, name: str) -> torch.Tensor:
        """The block of a small parameter, differentiably."""
        block = self.prefetched_params.get(name)
        return unshard_parameter(getattr(self, name), self.sharded_params[name]) if block is None else block

    @contextmanager
    def unsharded_in_place(self) -> Iterator[None]:
        """In the ``with`` block, the module's parameters are unsharded, so that its original forward can run."""
        shards: dict[str, Any] = dict(self._parameters)
        blocks: dict[str, Any] = {name: self.unsharded(name) for name in self.sharded_params}
        self._parameters.update(blocks)
        try:
            yield
        finally:
            self._parameters.update(shards)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self.mesh.shape.size > 1:
            check_knows_of_shards(self)
        super()._save_to_state_dict(destination, prefix, keep_vars)


def take_whole(module: ShardedModule, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A hook before a state dict is loaded: whole tensors in it become the rank's shards."""
    for name, param in module.sharded_params.items():
        value = state.get(f"{prefix}{name}")
        if isinstance(value, torch.Tensor) and module.is_transposed:
            value = value.t()
        if isinstance(value, torch.Tensor) and tuple(value.shape) == param.spec.shape:
            state[f"{prefix}{name}"] = take_shard(value, param.spec, module.mesh)


def shard_in_place(
    module: nn.Module,
    kind: type[ShardedModule],
    parameters: Mapping[str, nn.Parameter],
    *,
    mesh: Mesh,
    specs: dict[str, ShardingSpec],
) -> None:
    """Turn a module into a sharded one in place: its class becomes a subclass of ``kind`` and of its own class."""
    classes: tuple[Any, Any] = kind, type(module)
    module.__class__ = _subclass(*classes)
    for name, parameter in parameters.items():
        module.register_parameter(name, parameter)
    assert isinstance(module, ShardedModule)
    module.init_sharding(mesh, specs)


@cache
def _subclass(kind: Any, cls: Any) -> type[nn.Module]:
    return type(cls.__name__, (kind, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


#: Whether the caller of ``state_dict`` expects shards in it.
_knows_of_shards: ContextVar[bool] = ContextVar("cuboid_knows_of_shards", default=False)


@contextmanager
def knowing_of_shards() -> Iterator[None]:
    """In the ``with`` block, whoever asks for a state dict expects shards, under the names of the whole tensors."""
    token = _knows_of_shards.set(True)
    try:
        yield
    finally:
        _knows_of_shards.reset(token)


def local_state(model: nn.Module) -> dict[str, Any]:
    """A model's ``state_dict(keep_vars=True)`` on this rank: shards, under the names of the whole tensors."""
    with knowing_of_shards():
        return dict(model.state_dict(keep_vars=True))


def check_knows_of_shards(module: nn.Module) -> None:
    """Outside :func:`local_state`, raise an error: the caller would take the shards for the model's whole tensors."""
    if not _knows_of_shards.get():
        raise UnsupportedModelError(
            f"{type(module).__name__}.state_dict() would give this rank's part of the model under the names of whole "
            "tensors; cuboid.full_state_dict(model), which all ranks call, gives the whole ones to the first rank, and "
            "cuboid.save_pretrained(model, folder) or an engine's save_checkpoint writes them"
        )


def set_gradient_reduce(model: nn.Module, how: GradientReduce) -> None:
    """Set how the ranks' gradients of 16-bit weights are summed over the axes that shard them.

    It makes no difference over gloo, from float32 on, or for two ranks, whose sum is rounded once in any case.

    Args:
        model: sharded.
        how: ``"fp32"``: ranks exchange slices, and each sums its own in float32. ``"backend"``: the backend's
            reduce-scatter, which under NCCL rounds once for each rank but the first. ``"auto"``: ``"fp32"`` on a mesh
            within one node, where it sends no more bytes over any link; NCCL's rings send fewer between nodes.
    """
    for param in _params_of(model):
        param.gradient_reduce = how


def defer_gradient_sync(model: nn.Module) -> GradientSync:
    """Sum gradients over a step, and reduce them only in the backwards that are marked as its last."""
    sync = GradientSync()
    for param in _params_of(model):
        param.gradient_sync = sync
    return sync


def disable_reshard_after_forward(model: nn.Module) -> None:
    """Keep weights unsharded from a forward to its backward."""
    steps = OptimizerSteps()
    for param in _params_of(model):
        # What is stored in 4 bits isn't kept in more.
        if param.four_bits is None:
            param.optimizer_steps = steps


def keep_until_step_ends(model: nn.Module) -> list[UnshardedCopy]:
    """Keep weights unsharded between the units of a step too, even after the backward of the only unit in flight.

    Returns:
        The list that keeps them; clear it when the step ends.
    """
    copies: list[UnshardedCopy] = []
    for param in _params_of(model):
        param.copies_of_step = copies
    return copies


def _params_of(model: nn.Module) -> Iterator[ShardedParam]:
    for module in model.modules():
        if isinstance(module, ShardedModule):
            yield from module.sharded_params.values()
