"""A pipeline rank's share of a language model's head: the logits of a part of the vocabulary, their loss and gradients.

As in vocabulary parallelism for pipelines (arXiv 2411.05288), every rank computes the logits of an equal part of the
vocabulary, for each unit that leaves the last stage. Two exchanges make the loss of them: each rank's sum of
exponentials and its logits of the labels go to all ranks, and the gradients of the hidden states are summed on the last
stage.

The parameters stay the last stage's, and so do their optimizer states and checkpoints: at the beginning of a step each
rank receives its rows of the head's weight, beside the first units up to its first logits, and the last stage receives
the gradients of all rows beside the backwards that follow the last of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from cuboid.distributed.axis_collectives import all_reduce, own_slice
from cuboid.distributed.mesh import Mesh
from cuboid.errors import ConfigError, UnsupportedModelError
from cuboid.models.autograd_graph import IS_OUTPUT
from cuboid.models.batch.local_batch import IGNORE_INDEX
from cuboid.models.cross_entropy.chunked import head_chunks
from cuboid.models.cross_entropy.lm_head import Head
from cuboid.models.stages.outline import Outline
from cuboid.models.stages.stage_model import StageModel
from cuboid.models.stages.units import SegmentedBatch
from cuboid.seq1f1b.runtime.pipe_collectives import Joined, PipeCollectives
from cuboid.seq1f1b.schedule.partition import even_cut
from cuboid.seq1f1b.schedule.unit_costs import ends_of
from cuboid.tensor3d.layers.fused_projections import FusedProjections
from cuboid.tensor3d.layers.linear import ShardedLinear
from cuboid.tensor3d.layers.norm import statistics_dtype
from cuboid.tensor3d.layers.vocab_cross_entropy import sum_over_mesh
from cuboid.tensor3d.unshard import UnshardedParam, unsplit_head

#: Dtypes that a head may have, to tell one by its number.
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
#: Features of the hidden states that a model's head is tried with, and their number.
_TRIED_WIDTH, _TRIED_TOKENS = 4, 3


def check_spread_head(model: PreTrainedModel, outline: Outline, stages: int, pieces: int) -> None:
    """Check that a model's head can be computed by parts of its vocabulary.

    The model's own code computes the logits, which may do more than multiply: it is run with a small random head, in
    one piece and in parts, and must give the same.

    Args:
        model: the whole model, on any device; left as it is.
        outline: of the model.
        stages: pipeline ranks that share the vocabulary.
        pieces: parts that a mesh's `sequence` axis cuts it into before.

    Raises:
        UnsupportedModelError: there is no rule for this head, or its parts give something else.
    """
    cls = type(model).__name__
    if outline.runs_own_head:
        raise _refused(cls, "its own forward computes the loss")
    if outline.router_loss is not None:
        raise _refused(cls, "its routers' loss (output_router_logits) is added on the last stage")
    if outline.dtype is not None:
        raise _refused(cls, "its residual stream has another dtype than its weights")
    head = model.get_output_embeddings()
    if len(outline.head) != 1 or type(head) is not nn.Linear or model.get_submodule(outline.head[0]) is not head:
        raise _refused(cls, f"its head isn't one nn.Linear, but {', '.join(outline.head)}")
    if head.out_features < stages * pieces:
        cut = f" × {pieces} parts that `sequence` cuts it into" if pieces > 1 else ""
        raise _refused(cls, f"it has {head.out_features} outputs for {stages} stages{cut}")
    try:
        _try_parts(model, outline, head, stages * pieces)
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise _refused(cls, f"its logits can't be tried: {type(error).__name__}: {error}") from error


def _refused(cls: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f'the head of {cls} can\'t be spread over the stages: {reason}; write "head": "last"')


def _try_parts(model: PreTrainedModel, outline: Outline, head: nn.Linear, ranks: int) -> None:
    generator = torch.Generator().manual_seed(0)
    options: Any = {"generator": generator, "dtype": torch.float64, "device": "cpu"}
    weight = torch.randn((head.out_features, _TRIED_WIDTH), **options)
    bias = None if head.bias is None else torch.randn(head.out_features, **options)
    hidden = torch.randn((1, _TRIED_TOKENS, _TRIED_WIDTH), **options)

    def logits(start: int, stop: int) -> torch.Tensor:
        part = linear(weight[start:stop], None if bias is None else bias[start:stop])
        with _in_place_of(model, outline.head[0], part), torch.no_grad():
            return Head(model, outline).logits(hidden)

    full_logits = logits(0, head.out_features)
    parts = [logits(*ends) for ends in parts_of(head.out_features, ranks)]
    if not torch.allclose(torch.cat(parts, -1), full_logits, rtol=1e-5, atol=0):
        raise _refused(type(model).__name__, "the logits of one entry of the vocabulary depend on others or its number")


def parts_of(rows: int, ranks: int) -> list[tuple[int, int]]:
    """The first row and the end of each rank's part of the head's weight: contiguous parts, as equal as possible."""
    return ends_of(even_cut(rows, ranks))


def linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    trains: Sequence[bool] = (False, False),
    mesh: Mesh | None = None,
) -> nn.Linear:
    """A linear layer with these tensors as its parameters, of which ``trains`` says whether they require gradients.

    On a mesh of several ranks, they are parts of the rank's block.
    """
    parameter = nn.Parameter(weight, requires_grad=trains[0])
    added = None if bias is None else nn.Parameter(bias, requires_grad=trains[1])
    if mesh is not None and mesh.shape.size > 1:
        return unsplit_head(parameter, added, mesh)
    rows, width = weight.shape
    module = nn.Linear(width, rows, bias=bias is not None, device="meta")
    module.weight = parameter
    module.register_parameter("bias", added)
    return module


@contextmanager
def _in_place_of(model: PreTrainedModel, name: str, module: nn.Module) -> Iterator[None]:
    parent, _, child = name.rpartition(".")
    owner = model.get_submodule(parent)
    before = owner._modules[child]
    owner._modules[child] = module
    try:
        yield
    finally:
        owner._modules[child] = before


class HeadRows:
    """A rank's rows of the head's parameters during one step.

    Making them and :meth:`start_return` are collective over the pipeline, :meth:`give_back` over the last stage's mesh.
    On a mesh they are rows of the rank's block ``[⌈V/s⌉, H/h]``, unsharded over `batch`.
    """

    def __init__(self, model: StageModel, device: torch.device, collectives: PipeCollectives) -> None:
        stages: Any = model
        self._collectives = collectives
        outline, mesh = model.staging.plan.outline, stages.cuboid.mesh
        self._mesh, self._group, self._device, self._name = mesh, mesh.pipe_group, device, outline.head[0]
        self._root, self._is_root = mesh.peer(mesh.placement[-1]), mesh.has_last_stage
        #: Computes logits with the model's own code.
        self.head = Head(stages, outline, stages.cuboid.base.forward)
        #: The whole head, or its shard; on the last stage only.
        self._module: Any = stages.get_submodule(self._name) if self._is_root else None
        self._names = ["weight"] if model.staging.ends["head"].bias is None else ["weight", "bias"]
        #: Sums of the rows' gradients in float32 at least, by name.
        self._sums: dict[str, torch.Tensor] = {}
        #: Rows on their way here, and gradients on their way to the last stage, by name.
        self._arriving: list[Joined] = []
        self._returning: dict[str, Joined] = {}
        with self.head.unsharded() if self._is_root else nullcontext([]) as unsharded:
            blocks = self._named(unsharded)
            (self.hidden_dtype, self.dtype), self._shape, trains = self._agreed(blocks)
            self.parts = parts_of(self._shape[0], mesh.topology.pipe)
            rows = {name: self._scattered(name, blocks) for name in self._names}
        #: This rank's rows of the head.
        self.part = linear(rows["weight"], rows.get("bias"), trains=trains, mesh=mesh)

    @property
    def local_rows(self) -> tuple[int, int]:
        """The first of this rank's rows, and the end of them, in its block."""
        return self.parts[self._mesh.coordinate.pipe]

    @property
    def most(self) -> int:
        """Rows of the largest part."""
        return max(stop - start for start, stop in self.parts)

    @property
    def first_column(self) -> int:
        """The entry of the vocabulary that this rank's first row is of."""
        return int(self._mesh.index("sequence")) * self._shape[0] + self.local_rows[0]

    def placed_in(self, model: PreTrainedModel) -> Any:
        """In the ``with`` block, the model has these rows, which have arrived, as its head."""
        while self._arriving:
            self._arriving.pop().wait()
        return _in_place_of(model, self._name, self.part)

    def take_gradients(self) -> None:
        """Add the rows' gradients to their sums."""
        for name, parameter in self.part.named_parameters():
            if parameter.grad is not None:
                gradient, parameter.grad = parameter.grad, None
                if name in self._sums:
                    self._sums[name] += gradient
                else:
                    self._sums[name] = gradient.to(statistics_dtype(gradient.dtype))

    def start_return(self) -> None:
        """Start to send the gradients of this rank's rows to the last stage. There are no more to be added."""
        for name in self._names:
            if getattr(self.part, name).requires_grad:
                sums = self._padded(self._sums.pop(name).to(self.dtype))
                self._returning[name] = self._collectives.gather(sums)

    def give_back(self) -> None:
        """Accumulate the gradients of all rows, once they have arrived, in the parameters of the last stage."""
        if not self._is_root or not self._returning:
            return
        with self.head.unsharded() as unsharded:
            by_name = self._named(unsharded)
            for name, returning in self._returning.items():
                by_name[name].add(self._joined(returning.wait()), alone=True)
            gradients = [(by_name[name].parameter, by_name[name].gradient()) for name in self._returning]
        self._returning.clear()
        for parameter, gradient in gradients:
            if gradient is not None:
                torch.autograd.backward(parameter, gradient)

    def _named(self, unsharded: Sequence[UnshardedParam]) -> dict[str, UnshardedParam]:
        """The head's parameters by name, on the last stage."""
        named = {}
        for name in self._names if unsharded else ():
            # Inside ``unsharded``, the module has the blocks as its parameters.
            block = getattr(self._module, name)
            named[name] = next(param for param in unsharded if param.block is block)
        return named

    def _agreed(
        self, blocks: dict[str, UnshardedParam]
    ) -> tuple[tuple[torch.dtype, torch.dtype], tuple[int, int], list[bool]]:
        """Of the head of the last stage, on all ranks: the dtypes of its parameters and of their blocks, which autocast
        may change; the shape of the weight's block; and whether weight and bias are trained.

        Raises:
            ConfigError: on all ranks, if a script has made another module of the head, or has hooked it.
        """
        flags = torch.zeros(4 + len(self._names), dtype=torch.int64, device=self._device)
        # Stages of one rank whose layers are stored in 4 bits have a mesh of one.
        kinds = (nn.Linear, ShardedLinear) if self._mesh.shape.size == 1 else (ShardedLinear,)
        if self._is_root and type(self._module) in kinds and not _is_hooked(self._module):
            dtypes = {(blocks[name].parameter.dtype, blocks[name].block.dtype) for name in self._names}
            if len(dtypes) == 1 and dtypes <= set(product(_DTYPES, _DTYPES)):
                numbers = [1 + _DTYPES.index(dtype) for dtype in dtypes.pop()]
                trained = [blocks[name].parameter.requires_grad for name in self._names]
                flags += torch.tensor([*numbers, *blocks["weight"].block.shape, *trained], device=flags.device)
        dist.broadcast(flags, self._root, group=self._group)
        number, of_block, rows, width, *trains = flags.tolist()
        if not number:
            raise ConfigError(
                f'pipeline.head is "spread", and {self._name} of the last stage is no longer a plain nn.Linear of one '
                "dtype (but has an adapter or a hook, or is another module): its parts would compute something else; "
                'write "head": "last", or leave the head alone (in LoRA\'s target_modules, for example)'
            )
        return (_DTYPES[number - 1], _DTYPES[of_block - 1]), (rows, width), [bool(flag) for flag in trains]

    def _scattered(self, name: str, blocks: dict[str, UnshardedParam]) -> torch.Tensor:
        """This rank's rows of a parameter, on their way."""
        rows = torch.empty((self.most, *self._widths(name)), dtype=self.dtype, device=self._device)
        pieces = []
        if self._is_root:
            block = blocks[name].block.detach()
            pieces = [self._padded(block[start:stop]) for start, stop in self.parts]
        self._arriving.append(self._collectives.scatter(pieces, rows))
        start, stop = self.local_rows
        return rows[: stop - start]

    def _joined(self, pieces: torch.Tensor) -> torch.Tensor:
        """All rows, of the ranks' ``[P, rows of the largest part, …]``."""
        if pieces.shape[0] * pieces.shape[1] == self._shape[0]:
            return pieces.flatten(0, 1)
        return torch.cat([piece[: stop - start] for piece, (start, stop) in zip(pieces, self.parts, strict=True)])

    def _widths(self, name: str) -> tuple[int, ...]:
        return (self._shape[1],) if name == "weight" else ()

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows, and as many more as the largest part has."""
        missing = self.most - len(rows)
        return torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))]) if missing else rows.contiguous()


def _is_hooked(module: nn.Module) -> bool:
    """Whether anything but Cuboid itself looks at a module's calls: a mesh gathers the head's input by a hook."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = [hook for name in names for hook in getattr(module, name).values()]
    return any(not isinstance(hook, FusedProjections) for hook in hooks) or "forward" in vars(module)


@dataclass
class _Chunk:
    """Some positions of a unit between H and G.

    Attributes:
        positions: which of the rank's.
        hidden: of these, a leaf.
        logits: of the positions of this share; on a mesh those that the head computes for this rank.
        labels: of the same positions.
    """

    positions: slice
    hidden: torch.Tensor
    logits: torch.Tensor
    labels: torch.Tensor


class VocabularyShare:
    """One step of a rank's share; implements :class:`cuboid.seq1f1b.runtime.executor.HeadPart`.

    Between the two parts of a unit, the share's logits are kept in the dtype in which the model computes them; what is
    computed of them in float32 exists for one chunk of tokens only. Methods are collective over the mesh.
    """

    def __init__(self, model: StageModel, rows: HeadRows, batches: Sequence[SegmentedBatch], scale: float) -> None:
        self._model: Any = model
        self._rows, self._batches, self._scale = rows, batches, scale
        self._mesh: Mesh = self._model.cuboid.mesh
        self._width = model.staging.plan.outline.final_width // self._mesh.size("hidden")
        head: Any = model.staging.ends["head"]
        self._vocabulary: int = head.weight.shape[0]
        self._chunk_bytes: int | None = self._model.cuboid.state.chunk_bytes
        self._open: dict[tuple[int, int], list[_Chunk]] = {}
        #: The sum of the scaled losses of all units' tokens; on a mesh, of this rank's tokens.
        self.loss: torch.Tensor | None = None

    def buffer(self, micro_batch: int, segment: int) -> torch.Tensor:
        """``[B, L, H]``, on a mesh ``[B/b, L/s, H/h]``, empty."""
        batch = self._batches[micro_batch]
        length = batch.segment_length(segment) // self._mesh.size("sequence")
        size = (batch.ids.shape[0], length, self._width)
        return torch.empty(size, dtype=self._rows.hidden_dtype, device=batch.ids.device)

    def forward(self, micro_batch: int, segment: int, hidden: torch.Tensor) -> torch.Tensor:
        """``[2, B, L]``: for each token the logarithm of the share's exponentials, and the label's logit or 0.

        On a mesh ``[2, B/b, L/h]``, of the rank's part of the vocabulary.
        """
        chunks: list[_Chunk] = []
        self._open[micro_batch, segment] = chunks
        statistics = []
        # Hide what is saved here for backward from outer hooks, such as activation offloading: it is used soon.
        hiding = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda saved: saved)
        with torch.enable_grad(), hiding, self._rows.placed_in(self._model):
            for positions, labels in self._chunks(self._batches[micro_batch], segment, hidden):
                part = hidden[:, positions].detach().requires_grad_()
                chunk = _Chunk(positions, part, self._rows.head.logits(part), labels)
                chunks.append(chunk)
                wide, (local, elsewhere) = self._wide(chunk), self._local(labels)
                label_logits = wide.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0)
                statistics.append(torch.stack([wide.logsumexp(-1), label_logits]))
        return torch.cat(statistics, -1)

    def backward(self, micro_batch: int, segment: int, statistics: torch.Tensor) -> torch.Tensor:
        """``[B, L, H]``: this share's part of the hidden states' gradient, given all ranks' ``[P, 2, B, L]``."""
        chunks = self._open.pop((micro_batch, segment))
        log_total, label_logits = statistics[:, 0].logsumexp(0), statistics[:, 1].sum(0)
        if self._mesh.size("sequence") > 1:
            # The mesh cuts the vocabulary, too.
            along = self._mesh.along("sequence")
            maximum = all_reduce(log_total.clone(), along, dist.ReduceOp.MAX)
            total, label_logits = all_reduce(torch.stack([(log_total - maximum).exp(), label_logits]), along)
            log_total = maximum + total.log()
        labels = torch.cat([chunk.labels for chunk in chunks], -1)
        loss = (log_total - label_logits).masked_fill(labels == IGNORE_INDEX, 0).sum() * self._scale
        self.loss = loss if self.loss is None else self.loss + loss
        gradient = self.buffer(micro_batch, segment)
        for log_sum in log_total.split([chunk.labels.shape[-1] for chunk in chunks], -1):
            # Each is freed before the next.
            chunk = chunks.pop(0)
            local, elsewhere = self._local(chunk.labels)
            softmax = (self._wide(chunk) - log_sum.unsqueeze(-1)).exp_()
            softmax.scatter_add_(-1, local.unsqueeze(-1), -(~elsewhere).to(softmax.dtype).unsqueeze(-1))
            softmax *= ((chunk.labels != IGNORE_INDEX).to(softmax.dtype) * self._scale).unsqueeze(-1)
            root: Any = chunk.logits.grad_fn
            root.metadata[IS_OUTPUT] = True
            torch.autograd.backward(chunk.logits, softmax.to(chunk.logits.dtype))
            assert chunk.hidden.grad is not None
            gradient[:, chunk.positions] = chunk.hidden.grad
            self._rows.take_gradients()
        return gradient

    def finish(self) -> None:
        """Start to send the gradients of the head's rows to the last stage."""
        self._rows.start_return()

    def total(self) -> torch.Tensor:
        """The loss of all units, on a mesh of all of its ranks' tokens."""
        assert self.loss is not None
        return self.loss if self._mesh.shape.size == 1 else sum_over_mesh(self.loss, self._mesh)

    def _wide(self, chunk: _Chunk) -> torch.Tensor:
        """A chunk's logits in the dtype of statistics; columns that pad a mesh's blocks have the lowest number."""
        logits = chunk.logits.detach()
        real = max(0, self._vocabulary - self._rows.first_column)
        wide = logits.to(statistics_dtype(logits.dtype))
        if real < wide.shape[-1]:
            wide = wide.clone() if wide is logits else wide
            wide[..., real:] = torch.finfo(wide.dtype).min
        return wide

    def _local(self, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Labels as rows of this share, 0 for others; and which those are."""
        start, stop = self._rows.local_rows
        local = labels - self._rows.first_column
        elsewhere = (local < 0) | (local >= stop - start)
        return local.masked_fill(elsewhere, 0), elsewhere

    def _chunks(
        self, batch: SegmentedBatch, segment: int, hidden: torch.Tensor
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """As of :func:`head_chunks`, with the labels of this rank's part of the logits alone."""
        assert batch.labels is not None
        labels, is_split = batch.cut(batch.labels, segment), self._mesh.size("hidden") > 1
        # Columns of the largest part, not of this rank's: a mesh's head takes positions of each chunk in its own order,
        # so all ranks of the pipeline must cut alike, or they exchange statistics of different positions.
        for positions, by_rank in head_chunks(hidden, labels, self._mesh, self._rows.most, self._chunk_bytes):
            yield positions, own_slice(by_rank, 1, self._mesh.along("hidden")) if is_split else by_rank
