"""The backward of a multiplication, dx = Gᵀ(Rᵀ(dy) W) and dW = Rᵀ(dy)ᵀ G(x), its collectives behind its products."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from cuboid.distributed.async_result import AsyncResult
from cuboid.distributed.axis_collectives import SEQUENCE_DIM, scatter_dim
from cuboid.tensor3d.layers.input_gather import GatherSequence
from cuboid.tensor3d.layers.linear_op import LinearOp
from cuboid.tensor3d.layers.matmul import Pieces, weight_gradient
from cuboid.tensor3d.layers.norm import statistics_dtype
from cuboid.tensor3d.layers.output_reduce import OutputReduce
from cuboid.tensor3d.sharding.bucketing import start_reduce_scatters
from cuboid.tensor3d.sharding.deferred_reduce import DeferredReduce


class LinearBackward:
    """One backward.

    Args:
        own: the multiplication.
        needs_x: whether the input's gradient is wanted.
        needs_weights: which of the weights' are.
    """

    def __init__(self, own: LinearOp, needs_x: bool, needs_weights: Sequence[bool]) -> None:
        self._own = own
        self._needs_x = needs_x
        self._wanted = [number for number, needed in enumerate(needs_weights) if needed]
        self._dtypes: list[torch.dtype] = []
        self._dx: list[AsyncResult[Sequence[torch.Tensor]]] = []
        self._blocks: dict[int, torch.Tensor] = {}

    def run(
        self,
        gathering: Sequence[AsyncResult[Pieces]],
        weights: Sequence[torch.Tensor],
        dy: Sequence[torch.Tensor],
        parts: int,
        begin_next: Callable[[], None],
    ) -> tuple[torch.Tensor | None, dict[int, AsyncResult[torch.Tensor]]]:
        """Multiply.

        Args:
            gathering: the whole input on its way, part by part; none where no weight's gradient is wanted.
            weights: the shards.
            dy: for each product.
            parts: into which the rows of the batch are cut.
            begin_next: called once the last collective is started that this backward waits for.

        Returns:
            The gradient of the input, and those of the wanted shards, on their way, by the product's number.
        """
        own = self._own
        self._dtypes = [weight.dtype for weight in weights]
        if self._needs_x:
            own.start_unshard(weights)
        by_part = list(zip(*(each.tensor_split(parts) for each in dy), strict=True))
        transposing = [
            [reduce.start_transpose([part[number] for number in numbers]) for reduce, numbers in own.groups]
            for part in by_part
        ]
        for index, part in enumerate(transposing):
            whole = own.in_order([each.wait() for each in part])
            # What is to be reduced comes first, and what isn't last: dW needs no weights, which may be on their way.
            if self._needs_x and own.input_gather.reduces:
                self._dx.append(self._input_gradient(whole))
            if index == parts - 1:
                begin_next()
            if self._wanted:
                self._add_block_gradients(whole, gathering[index].wait(), parts)
            if self._needs_x and not own.input_gather.reduces:
                self._dx.append(self._input_gradient(whole))
        reducing = self._reductions()
        dx = [each.wait()[0] for each in self._dx]
        for product in own.products:
            product.weight.discard()
        return (torch.cat(dx) if len(dx) > 1 else dx[0]) if dx else None, reducing

    def scatter_input(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of a gathered input that was used elsewhere too, to that of the rank's own part."""
        assert isinstance(self._own.input_gather, GatherSequence)
        return scatter_dim(gradient, SEQUENCE_DIM, self._own.input_gather.mesh, ("sequence",))

    def _input_gradient(self, dy: Sequence[Pieces]) -> AsyncResult[Sequence[torch.Tensor]]:
        """dy W, summed over the products, on its way to the rank's own part."""
        pieces: list[torch.Tensor] = []
        rows: list[torch.Tensor] = []
        for output_reduce, numbers in self._own.groups:
            for place, number in enumerate(numbers):
                product = self._own.products[number]
                own = output_reduce.rows(product.out_in(product.weight.unsharded()), place)
                pieces += dy[number]
                rows += [each.t() for each in own]
        return self._own.input_gather.transpose.start(pieces, [rows])

    def _add_block_gradients(self, dy: Sequence[Pieces], x: Pieces, parts: int) -> None:
        """dyᵀ x of one part, in float32 at least where there are several to add up."""
        for number in self._wanted:
            product = self._block_gradient(number, dy[number], x)
            if number in self._blocks:
                self._blocks[number] += product
            else:
                self._blocks[number] = product if parts == 1 else product.to(statistics_dtype(product.dtype))

    def _block_gradient(self, number: int, dy: Pieces, x: Pieces) -> torch.Tensor:
        """dyᵀ x, as ``[out, in]`` or ``[in, out]``, with zeros in the rows that were not multiplied."""
        product = self._own.products[number]
        output_reduce, place = self._output_reduce_of(number)
        shape, some = product.weight.block_shape, x[0]
        whole = some.new_empty(shape) if product.rows is None else some.new_zeros(shape)
        by_column = self._own.input_gather.columns(product.out_in(whole))
        for index, piece in enumerate(dy):
            for features, columns in zip(x, by_column, strict=True):
                for part, out in output_reduce.put_rows(columns, place, index):
                    weight_gradient(piece[..., part], features, out)
        return whole

    def _output_reduce_of(self, number: int) -> tuple[OutputReduce, int]:
        return next((e, numbers.index(number)) for e, numbers in self._own.groups if number in numbers)

    def _reductions(self) -> dict[int, AsyncResult[torch.Tensor]]:
        params = [self._own.products[number].weight for number in self._wanted]
        # The sums of several parts may have another dtype than the weights.
        blocks = [self._blocks[number].to(self._dtypes[number]) for number in self._wanted]
        return dict(zip(self._wanted, start_reduce_scatters(params, blocks), strict=True))


def defer_or_wait(gradient: AsyncResult[torch.Tensor] | None, deferred: DeferredReduce | None) -> torch.Tensor | None:
    """A shard's gradient, which may still be on its way if there is somebody who waits for it later."""
    if gradient is None:
        return None
    if deferred is None:
        return gradient.wait()
    deferred.defer(gradient)
    return gradient.incomplete()
