"""How a model is laid out over the ranks, and how the framework that runs it behaves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from cuboid.distributed.topology import MeshShape
from cuboid.seq1f1b.schedule.choice import CHUNKED, is_generated, place_stages
from cuboid.seq1f1b.schedule.schedules import SCHEDULES

#: What is recomputed in backward: nothing; whole layers; layers without attention, which is kept, as the config's key
#: has it; and, in other frameworks, attention's scores, or the MLP's product before its nonlinearity and the norm
#: before that.
CheckpointingMode = Literal["none", "layers", "attention", "scores", "mlp_up"]


@dataclass(frozen=True)
class Layout:
    """How the ranks share the work of a step.

    Args:
        mesh: b × s × h. Megatron's tensor parallelism is 1×t×1, FSDP is b×1×1.
        stages: P, ranks of the pipeline.
        micro_batch: rows that the mesh works on together.
        micro_batches: M, micro-batches of each replica in a step.
        replicas: data-parallel copies of the mesh and all its stages.
        segments: k, segments of each sequence.
        chunks: v, chunks of layers on each pipeline rank. With a schedule that isn't in
            :data:`~cuboid.seq1f1b.schedule.choice.CHUNKED` they are interleaved as in other frameworks, and a closed
            form gives the time.
        schedule: a name in :data:`~cuboid.seq1f1b.schedule.choice.NAMES`.
        memory_limit: the config's, in sequences of a rank's share.
        spreads_head: whether every stage has a share of the head; needs a generated schedule.
        stage_layers: layers of each of :attr:`parts`, in order, of which two may share one; () for a balanced cut.
        lengths: tokens of each segment; () for a cut by cost.
        key_value_gradient_bytes: size of a number in which segments accumulate gradients of keys and values.
        gradient_bytes: bytes of a weight's gradient, with the sum over units; None for the framework's default.
        zero_stage: ZeRO stage over the replicas.
        checkpointing: what is recomputed.
        weight_gather, gradient_sync: how long gathered weights are kept, and when a stage's gradients are reduced over
            the mesh; see docs/config.md.
        context: ranks that share each sequence in attention too (only in layouts of other frameworks).
        expert_ranks: ranks among which whole experts are divided (likewise).
        on_host: whether what checkpointed layers keep waits in host memory; without checkpointing nothing does.
        optimizer_on_host: whether masters and moments are in host memory, which the optimizer updates them in.
        offload: fraction of the activations that is offloaded to the host's memory (in layouts of other frameworks).
        compiled: whether layers are compiled, as far as its schedule lets them be.
        fp8_min_dimension: the fewest rows and columns of a block of weights that is multiplied in 8 bits; None for 16
            bits.
    """

    mesh: MeshShape
    stages: int = 1
    micro_batch: int = 1
    micro_batches: int = 1
    replicas: int = 1
    segments: int = 1
    chunks: int = 1
    schedule: str = "seq1f1b"
    memory_limit: float | None = None
    spreads_head: bool = False
    stage_layers: tuple[float, ...] = ()
    lengths: tuple[int, ...] = ()
    key_value_gradient_bytes: int = 4
    gradient_bytes: int | None = None
    zero_stage: int = 1
    checkpointing: CheckpointingMode = "none"
    weight_gather: Literal["layer", "step"] = "layer"
    gradient_sync: Literal["unit", "step"] = "unit"
    context: int = 1
    expert_ranks: int = 1
    on_host: bool = False
    optimizer_on_host: bool = False
    offload: float = 0.0
    compiled: bool = False
    fp8_min_dimension: int | None = None

    @property
    def ranks(self) -> int:
        """Number of ranks of all replicas."""
        return self.mesh.size * self.context * self.stages * self.replicas

    @property
    def parts(self) -> int:
        """Number of parts that the layers are cut into."""
        return len(self.rank_of)

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """The pipeline rank of each part."""
        if self.schedule in CHUNKED:
            return place_stages(self.schedule, self.stages, self.chunks)
        return tuple(range(self.stages))

    @property
    def recomputes(self) -> bool:
        """Whether layers are recomputed in backward, with or without attention."""
        return self.checkpointing in ("layers", "attention")

    @property
    def moves(self) -> bool:
        """Whether anything is moved to the host and back."""
        return self.on_host and self.recomputes

    @property
    def may_split(self) -> bool:
        """Whether its schedule is generated from the costs of units, and may split backwards into two actions."""
        return is_generated(self.schedule)

    @property
    def head_ranks(self) -> int:
        """Number of ranks that share the head; 0 if the last stage has it. Only generated schedules place shares."""
        return self.stages if self.spreads_head and self.may_split else 0

    @property
    def without_chunks(self) -> Layout:
        """The same with a fixed schedule and one part on each rank; the number of segments is chosen with this."""
        if self.schedule in SCHEDULES:
            return self
        layers: list[float] = [0] * self.stages
        for rank, count in zip(self.rank_of, self.stage_layers, strict=bool(self.stage_layers)):
            layers[rank] += count
        rank_layers = tuple(layers) if self.stage_layers else ()
        return replace(
            self, schedule="seq1f1b", chunks=1, memory_limit=None, spreads_head=False, stage_layers=rank_layers
        )

    @property
    def gathers_once(self) -> bool:
        """Whether a step's first unit gathers weights for all units: only a pipeline's stages keep them that long."""
        return self.weight_gather == "step" and self.stages > 1

    @property
    def splits_experts(self) -> bool:
        """Whether a mesh splits each expert, as Cuboid does, so that every rank has rows of all of them."""
        return self.mesh.size > 1 and self.expert_ranks == 1

    @property
    def rows(self) -> int:
        """Rows of all micro-batches and replicas in a step."""
        return self.micro_batch * self.micro_batches * self.replicas

    def __str__(self) -> str:
        parts = [f"{self.mesh}"]
        parts += [f"{self.stages} stages × {self.segments} segments"] if self.stages > 1 else []
        if self.schedule != "seq1f1b":
            parts.append(self.schedule + (f" of {self.chunks} chunks" if self.chunks > 1 else ""))
        parts += ["head spread"] if self.spreads_head else []
        parts += [f"layers {', '.join(map(str, self.stage_layers))}"] if self.stage_layers else []
        parts += [f"{self.replicas} replicas"] if self.replicas > 1 else []
        parts += [f"{self.micro_batches} micro-batches of {self.micro_batch}", f"ZeRO {self.zero_stage}"]
        parts += ["checkpointing"] if self.recomputes else []
        parts += ["attention kept"] if self.checkpointing == "attention" else []
        parts += ["on the host"] if self.moves else []
        parts += ["optimizer on the host"] if self.optimizer_on_host else []
        parts += ["weights kept"] if self.weight_gather == "step" else []
        parts += ["gradients reduced once"] if self.gradient_sync == "step" else []
        parts += ["compiled"] if self.compiled else []
        parts += ["fp8"] if self.fp8_min_dimension is not None else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Software:
    """What a framework does with any layout. The defaults are Cuboid's under DeepSpeed.

    Args:
        attention: "flash" keeps no scores; "scores" writes, masks and drops out the whole matrix of them.
        loss: "chunked" computes logits in chunks; "fused" keeps them once, in 16 bits; "whole" in 32 bits as well.
        gradient_bytes: size of a number in which gradients are accumulated.
        reduce_bytes: size of a number in which gradients are reduced between replicas.
        sequence_parallel: whether the residual stream is cut over the `sequence` axis, as it always is in Cuboid.
        regathers: second all-gathers of a block's input in backward; less than 1 if they are partly hidden.
        hides_exchange: fraction of the communication over `sequence` that products hide.
        overlaps_reduction: whether the reduction of gradients between replicas, and the gather of new weights, overlap
            with computation; else they follow the last backward.
        overlaps_messages: whether a stage computes while messages to its neighbours are in flight.
        dropout: whether there are dropout masks to draw, apply and keep.
        fused_weight_gradients: whether the product that computes a weight's gradient also adds it to its buffer.
        buffers_weight_gradients: whether a 16-bit gradient of each shape of weight stays allocated (TransformerEngine).
        fused_nonlinearity: whether only the results of the MLP's products are saved, and nothing between them.
        counted: whether what layers save is counted by running their own code, as Cuboid runs it, or by formulas.
        shares_keys: whether segments of a micro-batch share one KV cache.
        keeps_prefixes: whether each segment saves a copy of all keys and values up to its end.
        balances_context: whether the ranks that share a sequence have equal parts of causal attention.
        shards_over_context: whether the ranks that share a sequence divide weights among them too.
        keeps_whole_gradients: whether gradients stay unsharded over a step's micro-batches if weights do.
        own_bytes: size of the framework's and libraries' own buffers on a GPU.
        passes: memory traffic of elementwise kernels, relative to fused ones.
        is_eager: whether they are launched one by one, as Hugging Face's code says; then :attr:`Gpu.eager_traffic
            <cuboid.planner.description.cluster.Gpu.eager_traffic>` multiplies their traffic.
        host_s: host time of a layer's forward; a backward takes twice that, of a frozen layer 4/3. The device waits if
            it is faster.
        host_update_s: host time of an adapter's update of one weight, in a forward and again in a backward.
        host_collective_s: host time of each collective over `sequence`.
        products_speed: speed of products with weights, relative to 16 bits: more than 1 in 8 or 4 bits.
        unsplit_head: fraction of their usual rate that the head's products reach if its vocabulary isn't cut.
    """

    attention: Literal["flash", "scores"] = "flash"
    loss: Literal["chunked", "fused", "whole"] = "chunked"
    gradient_bytes: int = 2
    reduce_bytes: int = 2
    sequence_parallel: bool = True
    regathers: float = 1.0
    hides_exchange: float = 0.0
    overlaps_reduction: bool = False
    overlaps_messages: bool = True
    dropout: bool = False
    fused_weight_gradients: bool = False
    buffers_weight_gradients: bool = False
    fused_nonlinearity: bool = False
    counted: bool = False
    shares_keys: bool = True
    keeps_prefixes: bool = False
    balances_context: bool = True
    shards_over_context: bool = False
    keeps_whole_gradients: bool = False
    own_bytes: int = 2**30
    passes: float = 1.0
    is_eager: bool = False
    host_s: float = 0.0
    host_update_s: float = 0.0
    host_collective_s: float = 0.0
    products_speed: float = 1.0
    unsplit_head: float = 1.0


#: The host's time was measured beside an H200; that of an update relative to it, on a CPU.
CUBOID = Software(host_s=1.8e-3, host_update_s=0.4e-3, counted=True, is_eager=True)
