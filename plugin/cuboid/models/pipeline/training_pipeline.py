"""A step of a pipeline: micro-batches in, gradients and the loss out. Framework adapters and tests call this."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cuboid.distributed.mesh import Mesh
from cuboid.errors import ConfigError, CuboidError
from cuboid.failures.rank_agreement import StepGuard, raise_on_all_ranks
from cuboid.models.architectures.transformers_names import recomputes
from cuboid.models.attention.interface import check_reached
from cuboid.models.batch.batch_check import Limits, lost_boundaries
from cuboid.models.batch.broadcast import MicroBatch, ReplicasInStep, StepCall, share_micro_batches
from cuboid.models.cross_entropy.score_recorder import ScoreRecorder
from cuboid.models.cross_entropy.token_recorder import TokenRecorder
from cuboid.models.kinds.label_heads import RowClassifier
from cuboid.models.pipeline.given_loss import GivenLoss, check_same_values, total_sums
from cuboid.models.pipeline.head_share import HeadRows, VocabularyShare
from cuboid.models.pipeline.sequence_cut import Cutter
from cuboid.models.pipeline.stage_randomness import draw_seed, random_numbers_of_stages
from cuboid.models.pipeline.step_schedule import StepSchedules
from cuboid.models.pipeline.step_trace import StepTrace
from cuboid.models.pipeline.tied_copies import check_ties
from cuboid.models.pipeline.units_in_step import observer_of
from cuboid.models.sharded.sharded_model import unwrap
from cuboid.models.stages.stage_cut import shared_names
from cuboid.models.stages.stage_model import StageModel
from cuboid.models.stages.stage_runner import Recorder, StageRunner, make_runner
from cuboid.models.stages.units import SegmentedBatch
from cuboid.optim.grad_buffer import float32_sums, gradient_of
from cuboid.seq1f1b.attention.kv_cache import KVCache, KVCachePool
from cuboid.seq1f1b.runtime.executor import Interpreter, SpreadHead
from cuboid.seq1f1b.runtime.p2p import Channel
from cuboid.seq1f1b.runtime.pipe_collectives import PipeCollectives
from cuboid.seq1f1b.runtime.profiler import UnitProfiler
from cuboid.seq1f1b.schedule.actions import Op, Program
from cuboid.seq1f1b.schedule.lowering import lower
from cuboid.seq1f1b.schedule.schedules import PipelineShape, forwards_only
from cuboid.tensor3d.sharding.bucketing import reduce_rest


@dataclass(frozen=True)
class _Step:
    """A step's inputs: this replica's micro-batches, their segment lengths, and the number of items of all replicas.

    Items are label tokens, or rows if each has one label.
    """

    shape: PipelineShape
    batches: list[SegmentedBatch]
    lengths: list[tuple[int, ...]]
    items: int = 0


class Pipeline:
    """Runs the stages of one model over all ranks. All methods are collective over the world.

    Args:
        model: this rank's stages, or an engine around them.
        sums: whether to sum gradients of bf16 or fp16 parameters in float32 over a step's units, and round once into
            ``.grad``. False for a framework whose hooks take each unit's gradient and sum them itself.
    """

    def __init__(self, model: nn.Module, *, sums: bool = True) -> None:
        stage = unwrap(model)
        if not isinstance(stage, StageModel):
            raise CuboidError("the model isn't cut into stages; load it with a config that has pipeline.engine")
        self._model: Any = stage
        self._staging, self._stages = stage.staging, stage.staging.plan
        assert self._stages.config.pipeline is not None
        self._config = self._stages.config.pipeline
        self.mesh: Mesh = stage.cuboid.mesh
        self.mesh.connect()
        tiles = self._device.type != "cpu"
        if self._config.segments == "auto":
            self._check_same_cluster()
        self._cutter = Cutter(self._config, self._stages.sizes, self.mesh, self._choose_segments, tiles=tiles)
        #: Buffers of the KV caches; also read by memory reports.
        self.pool = KVCachePool()
        self._schedules = StepSchedules(stage.staging.plan)
        self._shared_names = shared_names(self._stages.outline)
        self._channels = open_channels(self.mesh, self._device)
        if self._config.spreads_head:
            self._collectives = PipeCollectives(
                self.mesh.pipe_group,
                self.mesh.peer(self.mesh.placement[-1]),
                functools.partial(self.mesh.comm_counter.record_send, "pipe"),
            )
        self._sums = sums
        #: What the replica does in the step that runs, as all of its ranks have it.
        self._call = StepCall(trains=False)
        #: Whether gradients of tied parameters in ``.grad`` are sums over both stages already.
        self._has_complete_gradients = False
        self._step = 0
        #: Called on every rank after the units of a step, before :meth:`train` or :meth:`evaluate` returns, with the
        #: values of each of this replica's micro-batches: ``[5, B, S]`` (``TOKEN_VALUES``) of the label tokens, or
        #: ``[B, outputs]`` of a head that labels rows.
        self.observe_outputs: Callable[[list[torch.Tensor]], None] | None = None
        #: For each micro-batch of this replica in the next :meth:`train`, the loss to train in place of the model's.
        self.given_losses: Sequence[GivenLoss] | None = None
        #: What the next :meth:`train` divides the sum of all items' losses by, if not by their number.
        self.given_items: int | None = None
        #: Rows of this replica in the last step.
        self.rows = 0
        #: On ranks with the last stage: the parts of this replica's micro-batches in the last step's loss, which is
        #: their sum over all replicas. Empty if ranks share the head.
        self.loss_parts: list[torch.Tensor] = []
        #: With ``"partition": "measured"``, if the last step was measured: the new segment lengths of its longest
        #: sequence.
        self.recut: tuple[int, ...] | None = None

    def train(
        self,
        batches: Iterator[Any] | None,
        count: int | None,
        *,
        gradient_scale: float = 1.0,
        complete: bool = True,
    ) -> torch.Tensor:
        """Forward and backward of ``count`` micro-batches of each replica; gradients add up in ``.grad``.

        Args:
            batches: yields micro-batches (:func:`cuboid.models.batch.broadcast.read_micro_batch`); read only on the
                first rank of each replica.
            count: number of micro-batches of each replica; None for all in ``batches``.
            gradient_scale: multiplies the gradients, but not the loss.
            complete: whether these gradients are complete after this call. If not, call :meth:`add_shared_gradients`
                once they are.

        Returns:
            The mean loss over the label tokens (or rows, if each has one label) of all micro-batches of all replicas: a
            scalar tensor, the same on every rank. Gradients in ``.grad`` are not yet summed over the replicas.

        Raises:
            StopIteration: on every rank, if ``batches`` ends too early.
            CuboidError: on every rank, if a micro-batch is malformed.
        """
        self._step += 1
        with StepGuard(self.mesh, f"step {self._step} of the pipeline"):
            return self._train(batches, count, gradient_scale, complete=complete)

    def _train(
        self, batches: Iterator[Any] | None, count: int | None, gradient_scale: float, *, complete: bool
    ) -> torch.Tensor:
        step = self._prepare(batches, count, gradient_scale, training=True)
        self._begin_gradients()
        traces = self._config.trace is not False and self._step == self._config.trace_step
        measures = self._cutter.measures(self._step)
        profiler = UnitProfiler(self._device) if traces or measures else None
        schedule, programs = self._schedules.of(
            step.shape, max(step.lengths, key=sum), recomputes=self._call.recomputes
        )
        with float32_sums(self._model.parameters()) if self._sums else nullcontext():
            loss = self._run(programs, step, gradient_scale, profiler)
        if self.given_losses is not None:
            count = self._micro_batches(step)
            loss = self._checked(loss, self.given_losses, gradient_scale / count)
            self.loss_parts = [given_loss.loss.detach().to(self._device) / count for given_loss in self.given_losses]
        if complete:
            self.add_shared_gradients()
            self._has_complete_gradients = True
        self.recut = None
        if profiler is not None:
            trace = StepTrace.gather(profiler, step.shape, schedule, self.mesh, self._device)
            if measures:
                self._cutter.note(trace, step.lengths)
                self.recut = self._cutter.lengths(max(map(sum, step.lengths)), step.shape.micro_batches)
            if traces:
                trace.write(self._trace_folder(), self._step, step.lengths, self._staging.plan)
        return self._total(loss) / gradient_scale

    def evaluate(self, batches: Iterator[Any] | None, count: int | None, *, scale: float = 1.0) -> torch.Tensor:
        """The loss of ``count`` micro-batches of each replica, without gradients; otherwise as :meth:`train`.

        ``scale`` is what the caller multiplies it with, which must be the same on all ranks.
        """
        with StepGuard(self.mesh, "an evaluation of the pipeline"):
            step = self._prepare(batches, count, scale, training=False)
            programs = _evaluation(step.shape, self.mesh.placement)
            return self._total(self._run(programs, step, 1.0, None, training=False))

    def _prepare(self, batches: Iterator[Any] | None, count: int | None, scale: float, *, training: bool) -> _Step:
        self._model.check_settings()
        check_reached()
        with ReplicasInStep(self.mesh, self._device) as replicas:
            self._model.cuboid.state.made.check(self._model)
            check_ties(self._shared_names, self._staging.shared, self.mesh, self._device, training=training)
            seed = draw_seed(self.mesh) if self._model.training else 0
            call = StepCall(training, recomputes(self._model), seed, scale)
            shared, self._call = share_micro_batches(batches, count, self.limits, self.mesh, self._device, call)
            if self._model.cuboid.state.virtual_tokens is not None:
                shared = list(map(self._model.cuboid.state.virtual_tokens.before, shared))
            step, replicas.items = self._prepare_own(shared, training=training)
            replicas.out_of_range = self._out_of_range(shared)
            replicas.lost_boundaries = lost_boundaries(shared)
            replicas.scale = scale
        if replicas.total_out_of_range:
            # Only the ranks of the replica that has such numbers can say where they are.
            raise_on_all_ranks(self._range_error(shared), self.mesh, what="a check of the micro-batches")
        if replicas.total_lost_boundaries and self.mesh.rank == 0:  # they may be another replica's
            self.limits.warn_of_lost_boundaries(self.mesh)
        items = self.given_items if training and self.given_items is not None else replicas.total_items
        return dataclasses.replace(step, items=items)

    def _prepare_own(self, shared: list[MicroBatch], *, training: bool) -> tuple[_Step, torch.Tensor]:
        """This replica's part of a step, and its number of label tokens."""
        count, self.rows = len(shared), sum(batch["input_ids"].shape[0] for batch in shared)
        kind, shifts = self._stages.outline.kind, self._stages.shifts_labels
        inputs = self._model.cuboid.verdict.inputs
        micro_batches = [kind.for_stages(batch, shifts=shifts) for batch in shared]
        for batch in micro_batches:
            self._check_length(batch["input_ids"].shape[1])
            self.limits.warn_of_length(batch, self.mesh)
        lengths = [self._cutter.lengths(batch["input_ids"].shape[1], count) for batch in micro_batches]
        for batch, segment_lengths in zip(micro_batches, lengths, strict=True):
            self._check_kind(batch, segment_lengths)
        cut = [
            SegmentedBatch.of(batch, segment_lengths, self._model.config, self.mesh, kind, inputs)
            for batch, segment_lengths in zip(micro_batches, lengths, strict=True)
        ]
        if training and self.given_losses is not None:
            for micro_batch, loss in zip(cut, self.given_losses, strict=True):
                loss.weigh(micro_batch, self.mesh)
        # Evaluation computes the head on the last stage: nothing runs backward that all others would wait for.
        head_ranks = self._config.stages if self._config.spreads_head and training else 0
        shape = PipelineShape(self._stages.layout.stages, count, len(lengths[0]), head_ranks)
        return _Step(shape, cut, lengths), torch.stack([kind.items(batch) for batch in micro_batches]).sum()

    def _choose_segments(self, length: int, micro_batches: int) -> int:
        """Choose the number of segments with ``"segments": "auto"``, given the first sequences' padded length."""
        choice = self._stages.segment_choice
        assert choice is not None, "a stage that was planned without one"
        rows = max(1, self.rows // micro_batches)
        return choice(length, rows, micro_batches, recomputes=self._call.recomputes)

    def _check_same_cluster(self) -> None:
        """Check that all ranks see the same cluster. Otherwise they would cut sequences differently, and deadlock."""
        choice, world_size = self._stages.segment_choice, self.mesh.topology.world_size
        if choice is None or self.mesh.in_threads or world_size == 1:
            return
        seen = [""] * world_size
        dist.all_gather_object(seen, repr(choice.cluster))
        if len(set(seen)) > 1:
            raise ConfigError(
                '"segments": "auto" is decided by the GPUs, and ranks see different ones: '
                f'{" and ".join(sorted(set(seen)))}; name the "cluster", or the number of segments'
            )

    def _check_length(self, length: int) -> None:
        longest = self._stages.outline.longest
        first = self.limits.first_position
        if longest is not None and first + length > longest:
            raise CuboidError(
                f"a micro-batch has sequences of {length} tokens, but the model has learned {longest - first} "
                "positions (max_position_embeddings"
                + (f", of which it uses none below {first}" if first else "")
                + "); give shorter ones"
            )

    def _check_kind(self, batch: MicroBatch, lengths: tuple[int, ...]) -> None:
        certificate, name = self._stages.certificate, self._model.cuboid.base.__name__
        counts = self.limits.counts or self._model.cuboid.verdict.inputs == "only ids"
        self.limits.check_filled(batch["input_ids"].shape[1], sum(lengths), counts=counts)
        is_filled = sum(lengths) != batch["input_ids"].shape[1] and self._stages.outline.is_causal
        modes = certificate.modes(is_cut=len(lengths) > 1, is_filled=is_filled)
        certificate.check_batch(batch, modes, name)
        self._model.cuboid.verdict.check_batch(batch, name)

    @property
    def limits(self) -> Limits:
        """The valid ranges of a micro-batch's numbers."""
        limits: Limits = self._model.cuboid.whole_model.limits
        return limits

    @property
    def layers(self) -> tuple[float, ...]:
        """Number of layers of each stage, over all ranks."""
        return self._stages.layout.counts

    def segment_lengths(self, length: int, micro_batches: int) -> tuple[int, ...]:
        """Segment lengths of a sequence of ``length`` tokens at present, including padding for mesh and segments."""
        return self._cutter.lengths(length, micro_batches)

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    def _out_of_range(self, micro_batches: list[MicroBatch]) -> torch.Tensor:
        """Count, as a scalar tensor, the numbers out of range in this replica's micro-batches.

        It stays on the device, to be all-reduced together with the number of label tokens.
        """
        limits = self.limits
        out_of_range = [limits.out_of_range(name, x) for batch in micro_batches for name, x in batch.items()]
        return torch.stack([outside.sum() for outside in out_of_range if outside is not None]).sum()

    def _range_error(self, micro_batches: list[MicroBatch]) -> CuboidError | None:
        limits = self.limits
        for number, batch in enumerate(micro_batches):
            for name, x in batch.items():
                outside = limits.out_of_range(name, x)
                if outside is not None and bool(outside.any()):
                    return limits.error(name, x, where=f" of micro-batch {number}")
        return None

    def _run(
        self,
        programs: tuple[Program, ...],
        step: _Step,
        gradient_scale: float,
        profiler: UnitProfiler | None,
        *,
        training: bool = True,
    ) -> torch.Tensor | None:
        """Run this rank's program, and return the loss if this rank has the last stage."""
        program = programs[self.mesh.coordinate.pipe]
        splits = any(action.op is Op.WEIGHT_GRADIENT for action in program)
        # A failed step may have left entries behind.
        self._staging.weight_gradients.clear()
        if self._staging.gradient_sync is not None:
            self._staging.gradient_sync.clear()
        runners: dict[int, StageRunner] = {}
        # Without any item, gradients are 0.
        scale = gradient_scale / max(step.items, 1)
        recorder = None if self.observe_outputs is None else self._recorder()
        if step.shape.head_ranks and (recorder is not None or (training and self.given_losses is not None)):
            raise ConfigError(
                'pipeline.head is "spread", and a trainer reports values of the label tokens (entropy, accuracy), or '
                'computes a loss of them, which no rank computes then; write "head": "last"'
            )
        for chunk in self._staging.chunks:
            stores = [self._store(sum(segment_lengths)) for segment_lengths in step.lengths]
            runners[chunk.cut.stage] = make_runner(
                self._model,
                chunk,
                step.batches,
                stores,
                scale=scale,
                micro_batch_scale=gradient_scale / self._micro_batches(step),
                training=training,
                splits=splits,
                recorder=recorder,
            )
        store = self._model.cuboid.state.host_store if training else None
        observe = observer_of(program, lambda unit: step.lengths[unit.micro_batch][unit.segment], store, profiler)
        rows = HeadRows(self._model, self._device, self._collectives) if step.shape.head_ranks else None
        share = None if rows is None else VocabularyShare(self._model, rows, step.batches, scale)
        head = None if share is None else SpreadHead(share, self._collectives)
        interpreter = Interpreter(runners, self._channels, observe, head)
        draws = (
            random_numbers_of_stages(self.mesh, self._device, self._call.seed)
            if self._model.training
            else nullcontext()
        )
        try:
            with draws:
                interpreter.run(program, step.shape)
        except Exception as error:
            error.add_note(f"in {interpreter.running} on rank {self.mesh.rank}")
            raise
        finally:
            self._staging.held_weights.clear()
        self._staging.weight_gradients.check_empty()
        if rows is not None:
            if self._staging.gradient_sync is not None:
                self._staging.gradient_sync.is_last = True
            rows.give_back()
        if training and self._staging.gradient_sync is not None:
            reduce_rest(self._model)
        if self.observe_outputs is not None:
            self.observe_outputs([] if recorder is None else self._told(recorder, step))
        last = runners.get(step.shape.stages - 1)
        parts = {} if last is None else last.loss_parts
        self.loss_parts = [parts[number] / gradient_scale for number in sorted(parts)]
        loss = None if last is None else last.loss if share is None else share.total()
        if step.items or self.given_losses is not None:
            return loss
        # As plain cross_entropy has it: the mean over no item is NaN.
        self.loss_parts = [part * math.nan for part in self.loss_parts]
        return None if loss is None else loss * math.nan

    def _recorder(self) -> Recorder | None:
        kind = self._stages.outline.kind
        if isinstance(kind, RowClassifier):
            return ScoreRecorder(kind.outputs)
        vocabulary = self._model.config.get_text_config().vocab_size
        return TokenRecorder(self.mesh, vocabulary) if kind.is_language_model else None

    def _micro_batches(self, step: _Step) -> int:
        """Micro-batches of all replicas."""
        return step.shape.micro_batches * self.mesh.topology.data

    def _checked(self, loss: torch.Tensor | None, losses: Sequence[GivenLoss], scale: float) -> torch.Tensor | None:
        """The losses that the script computed, on the ranks that have the last stage."""
        total, expected, magnitude = total_sums(losses).to(self._device) * scale
        actual = None if loss is None else loss.detach()
        check_same_values(*(self._total(None if loss is None else x) for x in (expected, actual, magnitude)))
        return None if loss is None else total

    def _told(self, recorder: Recorder, step: _Step) -> list[torch.Tensor]:
        """The values of each micro-batch's label tokens or rows, on every rank of the replica."""
        sizes_of = [(batch.local.rows, batch.local.length) for batch in step.batches if batch.local is not None]
        shapes = [recorder.shape(*size) for size in sizes_of]
        sizes = [math.prod(shape) for shape in shapes]
        dtype = torch.float64 if self._model.dtype == torch.float64 else torch.float32
        flat = torch.zeros(sum(sizes), dtype=dtype, device=self._device)
        parts = [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
        if self.mesh.has_last_stage:
            for index, (part, (rows, length)) in enumerate(zip(parts, sizes_of, strict=True)):
                part.copy_(recorder.whole(index, rows=rows, length=length))
        if self.mesh.topology.pipe > 1:
            dist.broadcast(flat, self.mesh.peer(self.mesh.placement[-1]), group=self.mesh.pipe_group)
        return parts

    def _trace_folder(self) -> Path:
        return Path("cuboid_trace" if self._config.trace is True else str(self._config.trace))

    def _store(self, length: int) -> KVCache:
        return KVCache(length, self.pool, self._config.kv_gradients)

    def add_shared_gradients(self) -> None:
        """All-reduce the gradients of tied parameters, which the ranks of the first and the last stage both have."""
        if not self._staging.shared:
            return
        group = self.mesh.channel(0, self._stages.layout.stages - 1)
        for parameter in self._staging.shared.values():
            gradient = gradient_of(parameter)
            # Both ranks have one, or neither has: each step begins with ``check_ties``.
            if gradient is not None:
                dist.all_reduce(gradient, group=group)

    def _begin_gradients(self) -> None:
        """Let a script that accumulates over several calls, each of which completes its gradients, count these once.

        Both stages of a tied parameter have the sum of its gradients then. The copy that is counted on another stage
        starts again from zero, or the next sum over the stages would count what is there twice.
        """
        if self._has_complete_gradients and self._sums:
            for parameter in self._staging.repeated_parameters():
                if parameter.grad is not None:
                    parameter.grad = torch.zeros_like(parameter.grad)
        self._has_complete_gradients = False

    def _total(self, loss: torch.Tensor | None) -> torch.Tensor:
        """The sum of the last stages' losses over the replicas, broadcast to every rank."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        if loss is not None:
            total += loss.detach()
            if self.mesh.topology.data > 1:
                dist.all_reduce(total, group=self.mesh.data_parallel_group)
        if self.mesh.topology.pipe > 1:
            dist.broadcast(total, self.mesh.peer(self.mesh.placement[-1]), group=self.mesh.pipe_group)
        return total.to(torch.float32 if self._model.dtype != torch.float64 else torch.float64)


def open_channels(mesh: Mesh, device: torch.device) -> dict[tuple[int, int], Channel]:
    """Open channels from this rank's stages to their neighbours on other ranks, and back. Collective."""
    mesh.meet(device)
    here = mesh.coordinate.pipe
    count = functools.partial(mesh.comm_counter.record_send, "pipe")
    channels = {}
    # All ranks go through the pairs in the same order, since each channel's set-up blocks until both ends have come.
    for first, second in pairwise(range(len(mesh.placement))):
        for ends in ((first, second), (second, first)):
            sender, receiver = (mesh.placement[stage] for stage in ends)
            if sender != receiver and here in (sender, receiver):
                peer = mesh.peer(receiver if here == sender else sender)
                channels[ends] = Channel(mesh.channel(*ends), peer, count)
                channels[ends].meet(device, sends=here == sender)
    return channels


@functools.cache
def _evaluation(shape: PipelineShape, placement: tuple[int, ...]) -> tuple[Program, ...]:
    return lower(forwards_only(shape, placement), shape)
