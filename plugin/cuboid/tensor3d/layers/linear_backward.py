"""The backward of a multiplication, dx = Gᵀ(Rᵀ(dy) W) and dW = Rᵀ(dy)ᵀ G(x), its collectives behind its products."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from cuboid.distributed.async_result import Pending
from cuboid.distributed.axis_collectives import SEQUENCE_DIM, scatter_dim
from cuboid.tensor3d.layers.input_gather import WholeSequence
from cuboid.tensor3d.layers.linear_op import Multiplication
from cuboid.tensor3d.layers.matmul import Pieces, weight_gradient
from cuboid.tensor3d.layers.norm import statistics_dtype
from cuboid.tensor3d.layers.output_reduce import Exchange
from cuboid.tensor3d.sharding.bucketing import start_reductions
from cuboid.tensor3d.sharding.deferred_reduce import Carry


class WayBack:
    """One backward.

    Args:
        own: the multiplication.
        needs_x: whether the input's gradient is wanted.
        needs_weights: which of the weights' are.
    """

    def __init__(self, own: Multiplication, needs_x: bool, needs_weights: Sequence[bool]) -> None:
        self._own = own
        self._needs_x = needs_x
        self._wanted = [number for number, needed in enumerate(needs_weights) if needed]
        self._dtypes: list[torch.dtype] = []
        self._dx: list[Pending[Sequence[torch.Tensor]]] = []
        self._blocks: dict[int, torch.Tensor] = {}

    def run(
        self,
        gathering: Sequence[Pending[Pieces]],
        weights: Sequence[torch.Tensor],
        dy: Sequence[torch.Tensor],
        parts: int,
        begin_next: Callable[[], None],
    ) -> tuple[torch.Tensor | None, dict[int, Pending[torch.Tensor]]]:
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
            own.start_weights(weights)
        by_part = list(zip(*(each.tensor_split(parts) for each in dy), strict=True))
        transposing = [
            [exchange.start_transpose([part[number] for number in numbers]) for exchange, numbers in own.groups]
            for part in by_part
        ]
        for index, part in enumerate(transposing):
            whole = own.in_order([each.wait() for each in part])
            # What is to be reduced comes first, and what isn't last: dW needs no weights, which may be on their way.
            if self._needs_x and own.source.reduces:
                self._dx.append(self._input_gradient(whole))
            if index == parts - 1:
                begin_next()
            if self._wanted:
                self._add_block_gradients(whole, gathering[index].wait(), parts)
            if self._needs_x and not own.source.reduces:
                self._dx.append(self._input_gradient(whole))
        reducing = self._reductions()
        dx = [each.wait()[0] for each in self._dx]
        for product in own.products:
            product.weight.discard()
        return (torch.cat(dx) if len(dx) > 1 else dx[0]) if dx else None, reducing

    def scatter_input(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of a gathered input that was used elsewhere too, to that of the rank's own part."""
        assert isinstance(self._own.source, WholeSequence)
        return scatter_dim(gradient, SEQUENCE_DIM, self._own.source.mesh, ("sequence",))

    def _input_gradient(self, dy: Sequence[Pieces]) -> Pending[Sequence[torch.Tensor]]:
        """dy W, summed over the products, on its way to the rank's own part."""
        pieces: list[torch.Tensor] = []
        rows: list[torch.Tensor] = []
        for exchange, numbers in self._own.groups:
            for place, number in enumerate(numbers):
                product = self._own.products[number]
                own = exchange.rows(product.out_in(product.weight.block()), place)
                pieces += dy[number]
                rows += [each.t() for each in own]
        return self._own.source.transpose.start(pieces, [rows])

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
        exchange, place = self._exchange_of(number)
        shape, some = product.weight.layout.block_shape(product.weight.mesh.shape), x[0]
        whole = some.new_empty(shape) if product.rows is None else some.new_zeros(shape)
        by_column = self._own.source.columns(product.out_in(whole))
        for index, piece in enumerate(dy):
            for features, columns in zip(x, by_column, strict=True):
                for part, out in exchange.put_rows(columns, place, index):
                    weight_gradient(piece[..., part], features, out)
        return whole

    def _exchange_of(self, number: int) -> tuple[Exchange, int]:
        return next((e, numbers.index(number)) for e, numbers in self._own.groups if number in numbers)

    def _reductions(self) -> dict[int, Pending[torch.Tensor]]:
        gathers = [self._own.products[number].weight for number in self._wanted]
        # The sums of several parts may have another dtype than the weights.
        blocks = [self._blocks[number].to(self._dtypes[number]) for number in self._wanted]
        return dict(zip(self._wanted, start_reductions(gathers, blocks), strict=True))


def leave_or_wait(gradient: Pending[torch.Tensor] | None, carry: Carry | None) -> torch.Tensor | None:
    """A shard's gradient, which may still be on its way if there is somebody who waits for it later."""
    if gradient is None:
        return None
    if carry is None:
        return gradient.wait()
    carry.leave(gradient)
    return gradient.incomplete()
