"""The computation of one stage, unit by unit, as the interpreter of a schedule calls it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from cuboid.distributed.mesh import Mesh
from cuboid.errors import CuboidError
from cuboid.models.attention.forward_context import Lengths, Packing, RunningHead, knowing
from cuboid.models.attention.whole_sequence import WholeSequence
from cuboid.models.autograd_graph import IS_OUTPUT
from cuboid.models.batch.broadcast import MicroBatch
from cuboid.models.batch.generator_check import StepGenerators
from cuboid.models.cross_entropy.chunked import chunked_loss
from cuboid.models.cross_entropy.lm_head import Head
from cuboid.models.cross_entropy.score_recorder import ScoreRecorder
from cuboid.models.cross_entropy.token_recorder import TokenRecorder
from cuboid.models.kinds.forward import whole_for_head
from cuboid.models.kinds.model_kind import TARGETS
from cuboid.models.routers.router_loss import AddGradient, RouterSums
from cuboid.models.stages.stage_cut import Chunk
from cuboid.models.stages.stage_model import StageModel
from cuboid.models.stages.units import SegmentedBatch
from cuboid.seq1f1b.attention.kv_cache import KVCache
from cuboid.tensor3d.layers.dropout import compared_by
from cuboid.tensor3d.running_forward import begin_forward, end_forward
from cuboid.tensor3d.sharding.gradient_sync import GradientSync
from cuboid.tensor3d.sharding.weight_gradients import WeightGradientStore

UnitKey = tuple[int, int]
Recorder = TokenRecorder | ScoreRecorder


class _Entrance(torch.autograd.Function):
    """A unit's input. Its gradient goes to a list: a leaf with a ``.grad`` would keep the input on the device."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, hidden: torch.Tensor, received: list[torch.Tensor]) -> torch.Tensor:
        ctx.received = received
        return hidden.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        ctx.received.append(gradient.contiguous())
        return None, None, None


class _Root(torch.autograd.Function):
    """A scalar that keeps a hidden state's autograd graph alive, so that the hidden state can be freed once sent.

    Its backward ignores the scalar's gradient and continues with the one in ``received``.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, received: list[torch.Tensor]) -> torch.Tensor:
        ctx.received = received
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.received.pop(), None


@dataclass
class _Pending:
    """A unit between its forward and its backward.

    Attributes:
        root: scalar at the end of the unit's graph.
        gradient: receives the output's gradient before the root's backward.
        of_input: receives the input's gradient from the root's backward, except on the first stage.
    """

    root: torch.Tensor
    gradient: list[torch.Tensor]
    of_input: list[torch.Tensor]


class StageRunner:
    """One step of one stage; implements :class:`cuboid.seq1f1b.runtime.executor.Stage`.

    Args:
        model: this rank's model.
        chunk: the stage.
        batches: the step's micro-batches.
        stores: for each micro-batch, the KV cache of this stage's layers.
        scale: multiplies each token's loss.
        micro_batch_scale: multiplies a loss that is computed once for a micro-batch.
        training: whether units run backward.
        splits: whether the schedule splits backwards into input gradients (I) and weight gradients (W).
        recorder: records what the head says on the last stage; None if nobody asks for it.
    """

    def __init__(
        self,
        model: StageModel,
        chunk: Chunk,
        batches: Sequence[SegmentedBatch],
        stores: Sequence[KVCache],
        *,
        scale: float,
        micro_batch_scale: float,
        training: bool,
        splits: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        self._model: Any = model
        self._chunk, self._cut = chunk, chunk.cut
        self._staging = model.staging
        self._mesh: Mesh = model.cuboid.mesh
        self._batches, self._stores = batches, stores
        self._scale, self._micro_batch_scale = scale, micro_batch_scale
        self._training = training
        self._head = Head(self._model, self._staging.plan.outline, self._model.cuboid.base.forward)
        #: Open during forwards of a schedule that splits backwards.
        self._weight_gradients: WeightGradientStore = model.staging.weight_gradients
        self._splits = splits
        self._recorder = recorder
        pipeline = self._staging.plan.config.pipeline
        assert pipeline is not None
        #: Whether the head and the loss are computed here, rather than by all ranks' shares of them.
        self._has_head = chunk.cut.is_last and not (training and pipeline.spreads_head)
        self._gradient_sync: GradientSync | None = model.staging.gradient_sync
        units = sum(len(batch.bounds) - 1 for batch in batches)
        #: Units that have yet to run each part that produces parameter gradients: the head, the backward (or I), and W.
        self._left = {"head": units, "backward": units, "weights": units}
        self._pending: dict[UnitKey, _Pending] = {}
        draws = model.cuboid.draws
        self._generators = None if draws is None else StepGenerators(self._mesh, self.device, draws.libraries)
        #: On the last stage: the sum of all units' scaled losses, and that of each micro-batch's.
        self.loss: torch.Tensor | None = None
        self.loss_parts: dict[int, torch.Tensor] = {}

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self._batches[0].ids.device

    @property
    def hidden_dtype(self) -> torch.dtype:
        """Dtype of hidden states between stages."""
        residual_dtype = self._staging.plan.outline.dtype
        # Some models keep the residual stream in float32; with float64 weights it is float64.
        return self._model.dtype if residual_dtype is None else torch.promote_types(residual_dtype, self._model.dtype)

    def message_shape(self, micro_batch: int, segment: int) -> tuple[int, ...]:
        """``[B/b, L/s, H/h]``: the shape of a unit's hidden state on this rank."""
        batch = self._batches[micro_batch]
        length = batch.segment_length(segment) // self._mesh.size("sequence")
        return batch.ids.shape[0], length, self._staging.plan.outline.width // self._mesh.size("hidden")

    def forward(self, micro_batch: int, segment: int, hidden: torch.Tensor | None) -> torch.Tensor | None:
        """A unit's forward; for shapes see :meth:`message_shape`.

        On the last stage it includes the head, the loss, and their backward, unless the head is spread.
        """
        with torch.set_grad_enabled(self._training):
            hidden, of_input = self._enter(hidden)
            output = self._run_layers(micro_batch, segment, hidden)
            if self._has_head:
                gradient = self._run_head(micro_batch, segment, output)
            elif self._cut.is_last:
                self._check_dtype(output)
            if self._training:
                received: list[torch.Tensor] = []
                root = _Root.apply(output, received)
                self._pending[micro_batch, segment] = _Pending(root, received, of_input)
                if self._has_head and gradient is not None:
                    # There is none if all in front of the head is frozen, which then isn't run backward.
                    received.append(gradient)
        if not self._training:
            self._free_after(micro_batch, segment)
        return None if self._has_head else output.detach()

    def backward(self, micro_batch: int, segment: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """See :class:`cuboid.seq1f1b.runtime.executor.Stage`."""
        if not self._splits:
            return self._backward(micro_batch, segment, gradient)
        # Generated schedules contain whole backwards too. The forward deferred weight gradients all the same.
        result = self.input_gradient(micro_batch, segment, gradient)
        self.weight_gradients(micro_batch, [segment])
        return result

    def input_gradient(self, micro_batch: int, segment: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """See :class:`cuboid.seq1f1b.runtime.executor.Stage`."""
        with self._weight_gradients.filling((self._cut.stage, micro_batch, segment)):
            return self._backward(micro_batch, segment, gradient)

    def weight_gradients(self, micro_batch: int, segments: Sequence[int]) -> None:
        """See :class:`cuboid.seq1f1b.runtime.executor.Stage`."""
        self._count("weights", len(segments))
        self._weight_gradients.run([(self._cut.stage, micro_batch, segment) for segment in segments])

    def _backward(self, micro_batch: int, segment: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        pending = self._pending.pop((micro_batch, segment))
        if gradient is not None:
            pending.gradient.append(gradient)
        self._count("backward")
        # A root that requires no gradient means that everything up to this stage's end is frozen. `running` is for
        # forwards that activation checkpointing recomputes.
        if pending.root.requires_grad:
            with self._staging.slot.running(self._batches[micro_batch].unit(segment, self._stores[micro_batch])):
                root: Any = pending.root.grad_fn
                if root is not None:
                    # No loss of a script, which would be checked.
                    root.metadata[IS_OUTPUT] = True
                torch.autograd.backward(pending.root)
        # Segments run backward in reverse order, so the first one is the last to read the cache.
        if segment == 0:
            self._stores[micro_batch].free()
        return pending.of_input.pop() if pending.of_input else None

    def _enter(self, hidden: torch.Tensor | None) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """A unit's input as its layers take it, and the list that receives its gradient."""
        of_input: list[torch.Tensor] = []
        if hidden is None or not self._training:
            return hidden, of_input
        anchor = hidden.new_empty((), requires_grad=True)
        return _Entrance.apply(anchor, hidden, of_input), of_input

    def _run_layers(self, micro_batch: int, segment: int, hidden: torch.Tensor | None) -> torch.Tensor:
        batch = self._batches[micro_batch]
        sees_later = self._mesh.shape.size > 1 and not self._staging.plan.outline.is_causal
        options: dict[str, Any] = batch.whole_inputs() if sees_later else self._positions_and_mask(batch, segment)
        if self._cut.is_first:
            ids = batch.cut(batch.ids, segment)
            if self._mesh.shape.size > 1 and self._model.cuboid.verdict.inputs == "embeddings":
                # A sharded embedding takes the whole segment's ids and returns the rank's part. Given ids, the model's
                # own code would derive all later shapes from theirs, so give it embeddings instead.
                token = begin_forward(True)
                try:
                    options["inputs_embeds"] = self._model.get_input_embeddings()(ids)
                finally:
                    end_forward(token)
            else:
                options["ids"] = ids
        elif self._model.cuboid.late is not None:
            assert hidden is not None
            options["shape"] = self._model.cuboid.late.whole_shape(hidden)
        deferring = self._weight_gradients.open() if self._splits else nullcontext()
        lengths = Lengths(batch.length, batch.bounds[-1]) if sees_later else None
        known = knowing(packing=Packing(batch.positions, batch.packed), lengths=lengths)
        draws = self._model.cuboid.draws
        if draws is not None:
            draws.begin(batch.ids.shape[0], [batch.segment_length(segment) // self._mesh.size("sequence")])
        slot, unit = self._staging.slot, batch.unit(segment, self._stores[micro_batch])
        with known, slot.running(unit), deferring, compared_by(self._generators):
            output = self._run_chunk(hidden=hidden, **options)
        if self._model.cuboid.late is not None and not self._cut.is_last:
            # The output is this rank's part: the last layer, whose hook gathers, is a placeholder on this stage.
            self._model.cuboid.late.is_whole = False
        return output

    def _run_chunk(self, **options: Any) -> Any:
        output, late = self._chunk.run(self._model, **options), self._model.cuboid.late
        # Some models call the module with the layers directly, so that the base model's hook, which would do this,
        # doesn't run.
        return late.own_part(output) if late is not None and self._cut.is_last else output

    def _positions_and_mask(self, batch: SegmentedBatch, segment: int) -> dict[str, torch.Tensor]:
        if not batch.is_cut and self._mesh.shape.size == 1:
            # Whole sequences on one rank: pass the user's own arguments to the model's code.
            return dict(batch.optional_inputs)
        if batch.whole_sequence is None:
            batch.whole_sequence = self._whole_of_others(batch)
        if batch.whole_sequence is None:
            # Record the sequence as the user gave it, without the padding that segments or the mesh need.
            uncut = {name: x[:, : batch.length] for name, x in batch.optional_inputs.items()}
            positions, mask = uncut.get("position_ids"), uncut.get("attention_mask")
            with knowing(packing=Packing(positions, batch.packed)):
                batch.whole_sequence = self._staging.recorded(
                    batch.ids.shape[0], batch.length, self.device, positions, mask
                )
        return {
            name: batch.cut(x, segment)
            for name, x in {**batch.optional_inputs, "position_ids": batch.positions}.items()
        }

    def _whole_of_others(self, batch: SegmentedBatch) -> WholeSequence | None:
        """The recorded whole sequence of another micro-batch of this shape, if neither has a mask or positions."""
        if batch.optional_inputs:
            return None
        size = batch.ids.shape[0], batch.length
        alike = (
            other for other in self._batches if not other.optional_inputs and (other.ids.shape[0], other.length) == size
        )
        return next((other.whole_sequence for other in alike if other.whole_sequence is not None), None)

    def _run_head(self, micro_batch: int, segment: int, output: torch.Tensor) -> torch.Tensor | None:
        self._count("head")
        batch = self._batches[micro_batch]
        assert batch.labels is not None
        labels, weights = batch.cut(batch.labels, segment), batch.weights
        recorder = self._recorder
        loss, gradient = chunked_loss(
            self._head,
            output,
            labels,
            scale=self._scale if weights is None else self._micro_batch_scale,
            vocabulary=self._model.config.get_text_config().vocab_size,
            mesh=self._mesh if self._mesh.shape.size > 1 else None,
            chunk_bytes=self._model.cuboid.state.chunk_bytes,
            observe=recorder.of_segment(micro_batch) if isinstance(recorder, TokenRecorder) else None,
            weights=None if weights is None else batch.cut(weights, segment),
        )
        self._add_loss(micro_batch, loss)
        return gradient

    def _add_loss(self, micro_batch: int, loss: torch.Tensor) -> None:
        self.loss = loss if self.loss is None else self.loss + loss
        # Not summed up to ``loss``: the order of a sum decides its last digits.
        part = self.loss_parts.get(micro_batch)
        self.loss_parts[micro_batch] = loss if part is None else part + loss

    def _check_dtype(self, output: torch.Tensor) -> None:
        """Check that the output has the dtype in which the other ranks expect it, for their shares of the head."""
        weight = self._model.get_submodule(self._staging.plan.outline.head[0]).weight
        if output.dtype != weight.dtype:
            raise CuboidError(
                f'pipeline.head is "spread", but the last stage\'s output is in {output.dtype} and the head in '
                f'{weight.dtype}; write "head": "last"'
            )

    def _count(self, part: str, units: int = 1) -> None:
        """Count units down before a part of them runs, so that the last one reduces the step's gradients."""
        self._left[part] -= units
        if self._gradient_sync is not None:
            self._gradient_sync.is_last = self._left[part] == 0

    def _free_after(self, micro_batch: int, segment: int) -> None:
        if self._batches[micro_batch].ends_with(segment):
            self._stores[micro_batch].free()


class OwnHeadRunner(StageRunner):
    """The last stage of a classifier or a question-answering model: the model's own forward computes the loss.

    The loss is of a whole sequence, and its backward is part of the unit's backward.
    """

    def forward(self, micro_batch: int, segment: int, hidden: torch.Tensor | None) -> None:
        """A unit's forward, including the loss."""
        batch = self._batches[micro_batch]
        with torch.set_grad_enabled(self._training):
            hidden, of_input = self._enter(hidden)
            output: Any = self._run_layers(micro_batch, segment, hidden)
            # Without labels, the mean would be NaN, and so would its gradient.
            if batch.weights is not None or self._recorder is not None:
                loss = self._score(output, batch, micro_batch)
            else:
                loss = self._own_loss(output, batch) if batch.items else output[0].sum() * 0
        if self._training:
            self._pending[micro_batch, segment] = _Pending(loss, [], of_input)
        else:
            self._free_after(micro_batch, segment)
        # Reported in float32 at least, even if the model computes its loss in 16 bits.
        value = loss.detach().to(torch.promote_types(loss.dtype, torch.float32))
        self._add_loss(micro_batch, value)

    def _run_chunk(self, **options: Any) -> Any:
        output, late = self._chunk.call(self._model, **options), self._model.cuboid.late
        return output if late is None else late.end(self._model, None, output)

    def _own_loss(self, output: Any, batch: SegmentedBatch) -> torch.Tensor:
        loss: torch.Tensor = self._whole_output(output, batch, batch.arguments).loss
        return loss * (batch.items * self._scale)

    def _score(self, output: Any, batch: SegmentedBatch, micro_batch: int) -> torch.Tensor:
        """A loss that a script computes of the head's outputs, or 0 where they are only recorded."""
        # Without labels: the model's own loss isn't wanted, and some set ``problem_type`` in the config by them.
        arguments = {name: x for name, x in batch.arguments.items() if name not in TARGETS}
        scores: torch.Tensor = self._whole_output(output, batch, arguments).logits
        if isinstance(self._recorder, ScoreRecorder):
            self._recorder.add(micro_batch, scores)
        weights = torch.zeros_like(scores) if batch.weights is None else batch.weights
        return (scores * weights).sum() * self._micro_batch_scale

    def _whole_output(self, output: Any, batch: SegmentedBatch, arguments: MicroBatch) -> Any:
        assert batch.local is not None
        if self._mesh.shape.size > 1:
            whole_for_head(self._model.cuboid, output, batch.local)
        with knowing(head=RunningHead(arguments, batch.local)):
            return self._head.run(output, **arguments, return_dict=True)


class RoutedStageRunner(StageRunner):
    """A stage of a model with a router loss; see :mod:`cuboid.models.routers.router_loss`.

    In each message, the routers' sums precede the hidden state or its gradient.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        loss = self._staging.plan.outline.router_loss
        assert loss is not None
        self._sums = RouterSums(
            loss, self._model, self._mesh, self.hidden_dtype, self._micro_batch_scale, training=self._training
        )
        outline = self._staging.plan.outline
        absent = self._cut.absent_branches(outline)
        self._routers = self._sums.routers_in(self._model, self._cut.first, self._cut.stop, outline.layers, absent)
        #: The sums of the current unit's layers.
        self._own = self._sums.none(self.device)
        #: Receives the gradient of a unit's probabilities before its backward.
        self._probable: dict[UnitKey, list[torch.Tensor]] = {}

    def message_shape(self, micro_batch: int, segment: int) -> tuple[int, ...]:
        """A flat message: the routers' sums, then the hidden state."""
        return (self._sums.extra + math.prod(super().message_shape(micro_batch, segment)),)

    def forward(self, micro_batch: int, segment: int, message: torch.Tensor | None) -> torch.Tensor | None:
        """As on any stage, with packed messages; the last stage adds the router loss after the last segment."""
        hidden, sums = self._unpacked(micro_batch, segment, message)
        output = super().forward(micro_batch, segment, hidden)
        total = self._own if sums is None else sums + self._own
        if output is not None:
            return self._sums.pack(output, total)
        self._sums.add(micro_batch, total)
        if self._batches[micro_batch].ends_with(segment):
            self._add_loss(micro_batch, self._sums.finish(micro_batch))
        return None

    def _run_layers(self, micro_batch: int, segment: int, hidden: torch.Tensor | None) -> torch.Tensor:
        with self._sums.collecting(self._routers) as logits:
            output = super()._run_layers(micro_batch, segment, hidden)
        chosen, probable = self._sums.of(logits, self._batches[micro_batch].token_weights(segment, self._mesh))
        self._own = torch.stack([chosen, probable.detach()])
        if not probable.requires_grad:
            return output
        slot = self._probable[micro_batch, segment] = []
        with_gradient: torch.Tensor = AddGradient.apply(output, probable, slot)
        return with_gradient

    def _backward(self, micro_batch: int, segment: int, message: torch.Tensor | None) -> torch.Tensor | None:
        gradient, sums = self._unpacked(micro_batch, segment, message)
        total = self._sums.whole(micro_batch) if sums is None else sums
        slot = self._probable.pop((micro_batch, segment), None)
        if slot is not None:
            slot.append(self._sums.gradient(total))
        result = super()._backward(micro_batch, segment, gradient)
        return None if result is None else self._sums.pack(result, total)

    def _unpacked(
        self, micro_batch: int, segment: int, message: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if message is None:
            return None, None
        return self._sums.unpack(message, super().message_shape(micro_batch, segment))


def make_runner(model: StageModel, chunk: Chunk, *args: Any, **options: Any) -> StageRunner:
    """Create the kind of runner that a model needs; the arguments are those of :class:`StageRunner`."""
    outline = model.staging.plan.outline
    if outline.runs_own_head and chunk.cut.is_last:
        return OwnHeadRunner(model, chunk, *args, **options)
    kind = StageRunner if outline.router_loss is None else RoutedStageRunner
    return kind(model, chunk, *args, **options)
