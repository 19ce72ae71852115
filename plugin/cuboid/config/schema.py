"""Cuboid's sections of the framework's config, validated into one frozen object.

Cuboid's keys are in DeepSpeed's own sections. :func:`split_config` takes them out, validates them, and returns the rest
unchanged. Nothing here allocates memory or communicates.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.json_schema import SkipJsonSchema

from cuboid.config.config_file import ConfigSource, checked_copy, config_text, read_config
from cuboid.distributed.topology import MeshShape, Topology
from cuboid.errors import ConfigError
from cuboid.seq1f1b.schedule.choice import (
    AUTO,
    CHUNKED,
    COMPARED_CHUNKS,
    NAMES,
    check_chunks,
    check_spread,
    is_generated,
    place_stages,
)
from cuboid.seq1f1b.schedule.partition import whole_if_integer


class Section(BaseModel):
    """A section of a config. Unknown keys are errors, types aren't converted, and values can't be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


#: Limits far above any real job. Without them, searching or simulating a config with a typo would take forever.
_MOST_RANKS = 2**20
_MOST_PARTS = 2**16
_MOST_TOKENS = 2**30


class MeshConfig(Section):
    """Sizes of the mesh axes. They may be any sizes that divide the model; the mesh needn't be a cube."""

    batch: int = Field(1, ge=1, le=_MOST_RANKS, description="Ranks that share the batch dim of every activation.")
    sequence: int = Field(
        1, ge=1, le=_MOST_RANKS, description="Ranks that share the sequence dim of the residual stream."
    )
    hidden: int = Field(1, ge=1, le=_MOST_RANKS, description="Ranks that share the hidden dim of the residual stream.")

    @property
    def shape(self) -> MeshShape:
        """The same sizes as a :class:`~cuboid.distributed.topology.MeshShape`."""
        return MeshShape(self.batch, self.sequence, self.hidden)


class Fp8Config(Section):
    """The ``tensor_parallel.fp8`` section."""

    recipe: Literal["rowwise_with_gw_hp"] = Field(
        description="How linear layers multiply in fp8. "
        '"rowwise_with_gw_hp": torchao\'s, in which activations, weights and gradients of activations are rounded to '
        "e4m3 with a scale for each row, and gradients of weights are computed in bf16.",
    )
    min_dimension: int = Field(
        2048,
        ge=1,
        description="The fewest rows and columns of a rank's block of a weight that is multiplied in fp8. Smaller "
        "products lose more by the rounding than they gain.",
    )


class TensorParallelConfig(Section):
    """The ``tensor_parallel`` section."""

    mode: Literal["3d_tensor"] = Field(description="Selects Cuboid's 3-D tensor parallelism.")
    mesh: MeshConfig | Literal["auto"] = Field(
        description='Axis sizes, or "auto" to take the fastest mesh that fits, as the planner predicts.'
    )
    size: int | None = Field(
        None,
        ge=1,
        le=_MOST_RANKS,
        description='Number of ranks in the mesh, only with `"mesh": "auto"`. Without it the planner chooses the '
        "number too, from `train_batch_size`; the other ranks are replicas.",
    )
    gather_logits: Literal["auto"] | bool = Field(
        "auto",
        description="Whether the forward returns whole logits `[batch, sequence, vocabulary]` beside a loss. "
        '"auto": in evaluation only. Without labels they are always returned.',
    )
    weight_gather: Literal["layer", "step"] = Field(
        "layer",
        description="How long weights stay gathered (unsharded). "
        '"layer": while the layer runs, and again in its backward; "step": from the first forward of an optimizer step '
        "to the last backward that needs them, which sends a third less over `batch` and takes the memory of all of "
        "the mesh's layers, divided by sequence × hidden.",
    )
    gradient_reduce: Literal["auto", "fp32", "backend"] = Field(
        "auto",
        description="How gradients of weights in bf16 or fp16 are reduced over the ranks that share them. "
        '"fp32": ranks exchange slices and each sums its own in fp32, which sends as many bytes as a reduce-scatter '
        'and takes the memory of one more gradient of a weight; "backend": the backend\'s reduce-scatter, which under '
        'NCCL rounds to bf16 once for each rank but the first; "auto": "fp32" on a mesh within one node, "backend" '
        "on several nodes, between which NCCL's rings send fewer bytes than an exchange.",
    )
    gradient_sync: Literal["unit", "step"] = Field(
        "unit",
        description="When the ranks that share a weight reduce its gradient; with a pipeline only. "
        '"unit": after the backward of each segment of a micro-batch; "step": once per optimizer step. Until then '
        "each rank accumulates the gradients of whole blocks in fp32, which takes four bytes for each parameter of the "
        "stage, divided by sequence × hidden.",
    )
    compile: bool = Field(
        False,
        description="Whether torch.compile makes each kind of layer one graph, with the layer's collectives over "
        "`sequence` and `hidden` in it. A model whose layers aren't one graph keeps uncompiled layers, and a warning "
        "says why.",
    )
    fp8: Fp8Config | None = Field(
        None,
        description="Multiply in fp8 in the linear layers of a model in bf16; see [fp8.md](fp8.md). Embeddings, norms "
        "and the head stay in bf16. By default everything does.",
    )
    autotp_size: int | None = Field(
        None,
        description="Written by Cuboid for accelerate and the HF Trainer: the ranks that share their data. If given, "
        "it must equal the mesh's size, times the stages of a pipeline.",
    )

    @model_validator(mode="after")
    def _check_size(self) -> TensorParallelConfig:
        if self.mesh != "auto" and self.size is not None and self.size != self.mesh.shape.size:
            raise ValueError(
                f'"size" is {self.size}, but mesh {self.mesh.shape} has {self.mesh_size} ranks; leave "size" out'
            )
        return self

    @property
    def fp8_min_dimension(self) -> int | None:
        """The fewest rows and columns of a block of weights that is multiplied in fp8; None if none is."""
        return None if self.fp8 is None else self.fp8.min_dimension

    @property
    def mesh_size(self) -> int:
        """Number of ranks of the mesh, which may be known even if its shape is ``"auto"``.

        Raises:
            ConfigError: the planner will choose it, once there is a model.
        """
        if self.mesh != "auto":
            return self.mesh.shape.size
        if self.size is None:
            raise ConfigError(
                'tensor_parallel.size is missing: with "mesh": "auto" alone, the mesh has its size once the model is '
                "loaded, and the Hugging Face Trainer, accelerate, ColossalAI, cuboid verify and convert need it before"
            )
        return self.size

    @property
    def is_sized(self) -> bool:
        """Whether :attr:`mesh_size` is known."""
        return self.mesh != "auto" or self.size is not None


#: Layers of a stage, which may have half of one.
_LayerNumber = Annotated[float, Field(ge=1, multiple_of=0.5)]


class PipelineConfig(Section):
    """The ``pipeline`` section."""

    engine: Literal["seq1f1b"] = Field(description="Selects Cuboid's sequence-level pipeline.")
    stages: int = Field(
        ge=1,
        le=_MOST_PARTS,
        description="Stages that the layers are cut into, one for each pipeline rank; with `chunks`, the pipeline "
        "ranks, each of which has several.",
    )
    chunks: Annotated[int, Field(ge=1, le=_MOST_PARTS)] | Literal["auto"] = Field(
        1,
        description="Chunks of layers on each pipeline rank, for the schedules `…-interleaved` and `zero_bubble-v`: "
        "the layers are cut into stages × chunks parts. With the schedule `auto`, a rank may get one part instead; "
        '"auto" compares 1 to 4.',
    )
    segments: Annotated[int, Field(ge=1, le=_MOST_PARTS)] | Literal["auto"] = Field(
        "auto",
        description="Segments that each sequence is cut into. 1 is the ordinary pipeline; "
        '"auto" takes the number that the planner predicts to be the fastest that fits, for the first batch.',
    )
    partition: Literal["flops", "even", "measured"] | tuple[Annotated[int, Field(ge=1)], ...] = Field(
        "flops",
        description="Where sequences are cut. "
        '"flops": into segments of equal cost, later ones being shorter for what they attend to; "even": into equal '
        'lengths; "measured": by the times of the first steps; or a list of lengths, for sequences of just that sum.',
    )
    stage_balance: Literal["flops", "halves", "schedule", "layers"] | tuple[_LayerNumber, ...] = Field(
        "flops",
        description="How many layers each stage has. "
        '"flops": such that the most expensive stage, head included, is as cheap as possible; "halves": the same, and '
        "stages may begin between a layer's attention and its MLP, where that makes the most expensive one at least "
        '2 % cheaper; "schedule": such that the simulated step is short, for the batch size in the config, with halves '
        'where they make it at least 2 % shorter; "layers": as equal as possible; or a list of numbers, one for each '
        "stage, in which 4.5 is four layers and a half; with `chunks`, stages × chunks numbers in the order of the "
        "layers. With the schedule `auto`, a list limits the choice to schedules with as many parts.",
    )
    schedule: str = Field(
        "seq1f1b",
        description="Order of the units: `seq1f1b`, `gpipe`, or, with one segment, `1f1b`, which is then the same as "
        "`seq1f1b`; `zero_bubble`, which computes weight gradients when a stage would be idle, under a memory limit; "
        "or `auto`: `seq1f1b` or `zero_bubble`, whichever has the shorter simulated step. With `chunks`: "
        "`seq1f1b-interleaved` or `zero_bubble-interleaved`, which place stages on the ranks round-robin; "
        "`auto-interleaved`, whichever of these two has the shorter simulated step; or `zero_bubble-v`, which places "
        "them in a V; `auto` compares all of these, for the batch size in the config.",
    )
    memory_limit: float | None = Field(
        None,
        ge=1,
        allow_inf_nan=False,
        description="With `zero_bubble`, `zero_bubble-…` and `auto`: the most activations that a pipeline rank may "
        "hold for backward, in sequences, at least 1. By default those of `seq1f1b`, (stages - 1) / segments + 1, and "
        '3 / (segments · chunks) more with `"head": "spread"`.',
    )
    head: Literal["last", "spread"] = Field(
        "last",
        description="Where the language model's head and the loss are computed in training. "
        '"last": on the last stage; "spread": every pipeline rank computes the logits of an equal part of the '
        "vocabulary, so that a large one doesn't make the last stage slower than the others. It needs `zero_bubble`, "
        "`zero_bubble-…` or `auto`.",
    )
    kv_gradients: Literal["fp32", "parameter"] = Field(
        "fp32",
        description="The precision in which gradients of keys and values are accumulated over the segments: at least "
        "fp32, or that of the parameters, which takes half the memory under bf16.",
    )
    certification: Literal["probed", "verified"] = Field(
        "probed",
        description="How the architecture is certified for a pipeline. "
        '"probed": a small model of the same class and config is run in stages and compared with itself in one piece, '
        'before weights are read, unless the result is known; "verified": you have passed `cuboid verify` on the real '
        "weights, for the few models of which no small one can be made.",
    )
    trace: bool | Annotated[str, Field(pattern=r"^[^\x00]+$")] = Field(
        False,
        description="Write the measured schedule of a step as a Perfetto trace and a picture: into this folder, or "
        "with `true` into `cuboid_trace`.",
    )
    trace_step: int = Field(3, ge=1, description="The optimizer step to trace, counted from 1; early ones warm up.")

    @field_validator("partition", "stage_balance", mode="before")
    @classmethod
    def _list_to_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("stage_balance")
    @classmethod
    def _whole_counts(cls, value: Any) -> Any:
        return tuple(map(whole_if_integer, value)) if isinstance(value, tuple) else value

    @model_validator(mode="after")
    def _check_counts(self) -> PipelineConfig:
        self._check_chunks()
        if self.spreads_head:
            check_spread(self.schedule)
        if isinstance(self.stage_balance, tuple):
            self._check_balance(len(self.stage_balance))
        if isinstance(self.partition, tuple) and self.segments != len(self.partition):
            raise ValueError(
                f'"partition" has {len(self.partition)} lengths, but "segments" is {self.segments!r}; '
                f'write "segments": {len(self.partition)}'
            )
        if self.memory_limit is not None and not is_generated(self.schedule):
            raise ValueError(
                '"memory_limit" is for the schedules "zero_bubble", "zero_bubble-…" and "auto"; '
                f'"{self.schedule}" keeps what it keeps'
            )
        if self.schedule == "1f1b" and self.segments != 1:
            raise ValueError('"schedule": "1f1b" has whole sequences: write "segments": 1, or take "seq1f1b"')
        return self

    def _check_chunks(self) -> None:
        if self.chunks == "auto":
            if self.schedule != AUTO:
                raise ValueError(
                    f'"chunks": "auto" is for "schedule": "auto", and the schedule is "{self.schedule}"; give a number'
                )
            return
        if self.parts > _MOST_PARTS:
            raise ValueError(f'"stages" × "chunks" is {self.parts}; {_MOST_PARTS} at most')
        if self.schedule in NAMES:
            check_chunks(self.schedule, self.chunks)

    def _check_balance(self, count: int) -> None:
        if self.chunks == "auto":
            if count % self.stages:
                raise ValueError(
                    f'"stage_balance" has {count} numbers for {self.stages} stages; with "chunks": "auto" give '
                    f"{self.stages}, or for each chunk as many"
                )
        elif count != self.parts:
            chunks = f" of {self.chunks} chunks" if self.chunks > 1 else ""
            raise ValueError(
                f'"stage_balance" has {count} numbers for {self.stages} stages{chunks}; give one for each'
                + (f" chunk, {self.parts} in all" if chunks else "")
            )

    @property
    def spreads_head(self) -> bool:
        """Whether there are several ranks, and each has a share of the head."""
        return self.head == "spread" and self.stages > 1

    @property
    def may_cut_layers(self) -> bool:
        """Whether stages may begin inside a layer."""
        if isinstance(self.stage_balance, tuple):
            return any(isinstance(count, float) for count in self.stage_balance)
        return self.stage_balance in ("halves", "schedule")

    @property
    def is_settled(self) -> bool:
        """Whether nothing about the stages is left to be chosen by simulating steps."""
        return self.is_placed and self.stage_balance != "schedule"

    @property
    def with_balanced_stages(self) -> PipelineConfig:
        """The same config with the stages that a search by simulated steps starts with."""
        searched = self.stage_balance == "schedule"
        return self.model_copy(update={"stage_balance": "halves"}) if searched else self

    @property
    def is_placed(self) -> bool:
        """Whether the schedule determines the placement of stages; with ``"auto"`` and chunks, the model does too."""
        return self.schedule != AUTO or self.chunks == 1

    @property
    def compared_chunks(self) -> int | tuple[int, ...]:
        """Numbers of stages per rank that ``"auto"`` has to compare, besides 1."""
        return COMPARED_CHUNKS if self.chunks == "auto" else self.chunks

    @property
    def parts(self) -> int:
        """Number of parts that the layers are cut into: ``stages`` × ``chunks``.

        If the number of chunks is still to be chosen, the largest possible one.
        """
        return self.stages * (max(COMPARED_CHUNKS) if self.chunks == "auto" else self.chunks)

    @property
    def placement(self) -> tuple[int, ...]:
        """The pipeline rank of each part, in the order of the layers.

        Raises:
            ConfigError: it depends on the model, and there is none yet.
        """
        if self.is_placed:
            assert self.chunks != "auto"
            return place_stages(self.schedule, self.stages, self.chunks)
        raise ConfigError(
            'with "schedule": "auto", where the chunks are is known once the model is loaded, and is needed before; '
            f"name the schedule, one of {', '.join(CHUNKED)}"
        )

    def allows(self, placement: tuple[int, ...]) -> bool:
        """Whether the config permits this placement: the pipeline rank of each stage."""
        if self.is_placed:
            return placement == self.placement
        chunks, remainder = divmod(len(placement), self.stages)
        if remainder or (self.chunks != "auto" and chunks not in (1, self.chunks)):
            return False
        return placement in {place_stages(name, self.stages, chunks) for name in CHUNKED}

    @property
    def without_chunks(self) -> PipelineConfig:
        """The same config with one stage per rank; a ``stage_balance`` list is summed over consecutive parts."""
        balance = self.stage_balance
        if isinstance(balance, tuple):
            parts = len(balance) // self.stages
            balance = tuple(sum(balance[first : first + parts]) for first in range(0, len(balance), parts))
        return self.on_ranks(AUTO, 1).model_copy(update={"stage_balance": balance})

    def on_ranks(self, schedule: str, chunks: int) -> PipelineConfig:
        """The same config with the chosen schedule and number of chunks, which determine the placement of stages."""
        return self.model_copy(update={"schedule": schedule, "chunks": chunks})


#: Default maximum size of a weights file, as recommended for the Hugging Face hub.
MAX_FILE_BYTES = 5_000_000_000


class CheckpointConfig(Section):
    """The ``checkpoint`` section: how checkpoints are written and read."""

    keep_last: int | None = Field(
        None,
        ge=1,
        description="Checkpoints to keep in a folder: those written last. Older ones are removed when a new one is "
        "complete. By default all are kept.",
    )
    asynchronous: bool = Field(
        False,
        description="Return from `save_checkpoint` as soon as this rank's part is copied, and write while training "
        "continues. Takes the host memory of the checkpoint, divided by the number of ranks.",
    )
    on_failure: Literal["raise", "warn"] = Field(
        "raise",
        description='What happens if a checkpoint can\'t be written: `"raise"` an error, or `"warn"` and continue.',
    )
    verify: bool = Field(
        True,
        description="Compare checksums of files: read back from the disk after writing, and before loading.",
    )
    max_file_bytes: int = Field(
        MAX_FILE_BYTES, ge=1, description="Size limit of a weights file, unless a single tensor is larger."
    )


#: What is recomputed in backward; see :class:`ActivationCheckpointingConfig`.
ActivationCheckpointingMode = Literal["none", "layers", "attention"]


class ActivationCheckpointingConfig(Section):
    """The ``activation_checkpointing`` section: what forward keeps for backward, which computes the rest again."""

    mode: ActivationCheckpointingMode = Field(
        description="What is recomputed in backward. "
        '"none": nothing, unless the script enables checkpointing itself; "layers": each layer, of which the forward '
        'keeps only the input; "attention": the same without attention, whose output and log-sum-exp are kept too, so '
        "that its kernel runs once.",
    )
    cpu_checkpointing: bool = Field(
        False,
        description="Keep what the layers keep in pinned host memory: it is copied there beside the computation, and "
        "comes back one layer ahead of its backward. DeepSpeed's key.",
    )

    @model_validator(mode="after")
    def _check_there_is_something(self) -> ActivationCheckpointingConfig:
        if self.cpu_checkpointing and self.mode == "none":
            raise ValueError(
                'cpu_checkpointing is true, but mode "none" keeps nothing that could be in host memory; write "mode": '
                '"layers" or "attention"'
            )
        return self


class LoraSection(Section):
    """The ``lora`` section: the adapter that PEFT will put on the model, whose own parameters are frozen then."""

    r: int = Field(
        ge=1,
        le=_MOST_PARTS,
        description="Rank of the updates, as in PEFT's `LoraConfig`. The section says that the script will train LoRA, "
        'so that `"auto"` values are decided for that; `get_peft_model` makes the adapter.',
    )
    target_modules: Annotated[str, Field(min_length=1)] | Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        "all-linear",
        description='Which layers have updates, as in `LoraConfig`: "all-linear", a regular expression, or a list of '
        "names.",
    )
    load_in_4bit: bool = Field(
        False,
        description="Whether the frozen linear layers are in bitsandbytes' 4 bits. Loading knows it of its "
        "`quantization_config` and of the checkpoint, and raises an error if they aren't though this is `true`; "
        "`cuboid estimate` and `cuboid convert` know it only from here.",
    )

    @field_validator("target_modules", mode="before")
    @classmethod
    def _list_to_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value


#: Bytes of the dtypes that gradients may be summed in, by DeepSpeed's names for them.
_SUM_BYTES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), 4),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16", "bf16", "bfloat16", "torch.bfloat16"), 2),
}


class FrameworkNumbers(Section):
    """Numbers from the framework's part of a config that a layout depends on; None if absent or ``"auto"``.

    Attributes:
        micro_batch: ``train_micro_batch_size_per_gpu``.
        accumulation: ``gradient_accumulation_steps``.
        batch: ``train_batch_size``.
        zero_stage: the ``stage`` of ``zero_optimization``.
        bf16: ``enabled`` of ``bf16``, by which weights become bf16 later.
        fp16: ``enabled`` of ``fp16``.
        sum_bytes: size of a number of ``data_types.grad_accum_dtype``.
    """

    micro_batch: int | None = None
    accumulation: int | None = None
    batch: int | None = None
    zero_stage: int | None = None
    bf16: bool = False
    fp16: bool = False
    sum_bytes: int | None = None

    @classmethod
    def of(cls, framework_config: Mapping[str, Any]) -> FrameworkNumbers:
        """Read them from the framework's part of a config."""
        zero, types = framework_config.get("zero_optimization"), framework_config.get("data_types")
        sums = types.get("grad_accum_dtype") if isinstance(types, Mapping) else None
        numbers = {
            "micro_batch": framework_config.get("train_micro_batch_size_per_gpu"),
            "accumulation": framework_config.get("gradient_accumulation_steps"),
            "batch": framework_config.get("train_batch_size"),
            "zero_stage": zero.get("stage") if isinstance(zero, Mapping) else None,
            "sum_bytes": _SUM_BYTES.get(sums) if isinstance(sums, str) else None,
        }
        sections = {name: framework_config.get(name) for name in ("bf16", "fp16")}
        enabled = {
            name: isinstance(section, Mapping) and section.get("enabled") is True for name, section in sections.items()
        }
        known = {name: value for name, value in numbers.items() if type(value) is int}
        return cls.model_validate({**enabled, **known})

    def gradient_bytes(self, *, is_pipeline: bool) -> int | None:
        """Bytes of a weight's gradient with the sum over a step; None for the framework's default."""
        if self.sum_bytes == 4:
            # Without stages DeepSpeed keeps the 16-bit gradient beside the sum.
            return 4 if is_pipeline else 6
        # Only under ``bf16`` does a pipeline sum in float32 by default.
        return 2 if self.sum_bytes is None and self.fp16 and is_pipeline else self.sum_bytes

    def per_replica(self, replicas: int) -> tuple[int | None, int]:
        """Rows of a micro-batch and micro-batches of a step, as DeepSpeed derives them.

        The rows are None if the config has none, or if those of a step don't divide evenly.
        """
        if self.micro_batch is not None and self.batch is not None and self.accumulation is None:
            return self.micro_batch, max(1, self.batch // (self.micro_batch * replicas))
        steps = self.accumulation or 1
        if self.micro_batch is not None or self.batch is None:
            return self.micro_batch, steps
        rows, remainder = divmod(self.batch, replicas * steps)
        return (None if remainder else rows), steps


_NO_MESH = {"mode": "3d_tensor", "mesh": {}}


def _stages(count: int) -> str:
    return f"{count} pipeline stage{'' if count == 1 else 's'}"


class CuboidConfig(Section):
    """All of Cuboid's settings in a config, with one section for each feature that it adds to the framework."""

    tensor_parallel: TensorParallelConfig = Field(default_factory=lambda: TensorParallelConfig.model_validate(_NO_MESH))
    pipeline: PipelineConfig | None = None
    activation_checkpointing: ActivationCheckpointingConfig | None = None
    checkpoint: CheckpointConfig = Field(default_factory=lambda: CheckpointConfig.model_validate({}))
    lora: LoraSection | None = None
    cluster: str | None = Field(
        default=None,
        description='GPUs for which `"auto"` is decided: nodes x GPUs x kind, such as "8x8xH100-80GB", or a profile '
        "that `cuboid profile` wrote. By default those that the job sees.",
    )
    sequence_length: int | None = Field(
        default=None,
        ge=1,
        le=_MOST_TOKENS,
        description='Tokens of a sequence, for `"mesh": "auto"` and for `"schedule": "auto"` with chunks, which are '
        "decided before there is data. By default 4096, or as many as the model has positions.",
    )
    deterministic: bool = Field(
        default=False,
        description="Give the same bits in each run on the same layout and machines, resumed or not: torch takes "
        "deterministic algorithms, for the whole process, and raises an error where a kernel has none.",
    )
    #: Copied from the framework's part; not a key.
    framework: SkipJsonSchema[FrameworkNumbers] = FrameworkNumbers()

    @model_validator(mode="after")
    def _check_together(self) -> CuboidConfig:
        autotp_size = self.tensor_parallel.autotp_size
        if autotp_size and autotp_size != self.ranks:
            raise ValueError(
                f"autotp_size is {autotp_size}, but {self.ranks} ranks hold one copy of the model; leave autotp_size "
                "out"
            )
        if not self.tensor_parallel.is_sized and self.framework.batch is None:
            raise ValueError(
                '"mesh": "auto" needs "train_batch_size", the rows of a step, since it may leave ranks to data '
                'parallelism; or "size", the ranks of the mesh'
            )
        if self.deterministic and self.pipeline is not None and self.pipeline.partition == "measured":
            raise ValueError(
                'pipeline.partition is "measured", which cuts sequences by the times of this run, so that sums have '
                'another order in each; with "deterministic": true take "flops", "even" or a list of lengths'
            )
        if self.tensor_parallel.gradient_sync == "step" and self.pipeline is None:
            raise ValueError(
                'tensor_parallel.gradient_sync is "step", which is for the units of a pipeline, and there is none; '
                "leave it out, or lower gradient_accumulation_steps for larger micro-batches"
            )
        return self

    @property
    def keeps_on_host(self) -> bool:
        """Whether what checkpointed layers keep waits in host memory."""
        return self.activation_checkpointing is not None and self.activation_checkpointing.cpu_checkpointing

    @property
    def stages(self) -> int:
        """Pipeline stages; 1 without a pipeline."""
        return 1 if self.pipeline is None else self.pipeline.stages

    @property
    def parts(self) -> int:
        """Number of parts that the layers are cut into; the largest possible if it is still to be chosen."""
        return 1 if self.pipeline is None else self.pipeline.parts

    @property
    def placement(self) -> tuple[int, ...]:
        """The pipeline rank of each part of the layers; one part without a pipeline."""
        return (0,) if self.pipeline is None else self.pipeline.placement

    @property
    def stages_in_words(self) -> str:
        """The number of stages on all ranks as text, and their placement if ranks have several."""
        if self.pipeline is not None and not self.pipeline.is_placed:
            return f'{_stages(self.stages)}, or with "chunks": {self.pipeline.chunks!r} as many on each rank'
        places, where = self.placement, ""
        if len(places) > self.stages:
            where = f" on the pipeline's ranks {', '.join(map(str, places))}"
        return _stages(len(places)) + where

    @property
    def ranks(self) -> int:
        """Number of ranks of one replica of the model: mesh size × stages."""
        return self.stages * self.tensor_parallel.mesh_size

    def on_mesh(self, shape: MeshShape) -> CuboidConfig:
        """The same config with the chosen mesh."""
        axes = MeshConfig(batch=shape.batch, sequence=shape.sequence, hidden=shape.hidden)
        section = self.tensor_parallel.model_copy(update={"mesh": axes, "size": None})
        return self.model_copy(update={"tensor_parallel": section})

    def with_pipeline(self, pipeline: PipelineConfig) -> CuboidConfig:
        """The same config with another pipeline."""
        return self.model_copy(update={"pipeline": pipeline})

    def topology(self, world_size: int) -> Topology:
        """The topology of stages and replicas. The mesh is a single axis in it, as its shape may still be unknown."""
        # That is enough, because the ranks of a mesh are consecutive for every shape.
        return Topology(MeshShape(sequence=self.tensor_parallel.mesh_size), world_size, self.stages)


def split_config(source: ConfigSource) -> tuple[CuboidConfig | None, dict[str, Any]]:
    """Separate Cuboid's keys from the framework's.

    Returns:
        The validated config (None if there is no key of Cuboid's), and the framework's part.

    Raises:
        ConfigError: it can't be read, or has an unknown key, a wrong type or inconsistent sizes.
    """
    config = read_config(source)
    return own_config(config) or (None, copy.deepcopy(dict(config)))


def own_config(source: Any) -> tuple[CuboidConfig, dict[str, Any]] | None:
    """Like :func:`split_config`, but returns None for a config that the framework should read and validate itself.

    Such a config has no key of Cuboid's, or it can't be read and doesn't seem to have one.

    Raises:
        ConfigError: as :func:`split_config`.
    """
    try:
        config = read_config(source)
    except ConfigError:
        if _names_us(source):
            raise
        return None
    if any(_is_ours(name, section) for name, section in config.items()):
        return _split(config)
    section = config.get("activation_checkpointing")
    if isinstance(section, Mapping) and section.get("mode") in get_args(ActivationCheckpointingMode):
        # DeepSpeed would ignore it.
        raise ConfigError(
            'activation_checkpointing.mode is for models that Cuboid shards, and the config has no "tensor_parallel": '
            '{"mode": "3d_tensor", "mesh": {…}} and no "pipeline": {"engine": "seq1f1b", …}; add one of them, or call '
            "model.gradient_checkpointing_enable() instead"
        )
    return None


def _split(config: Mapping[str, Any]) -> tuple[CuboidConfig, dict[str, Any]]:
    framework_config = checked_copy(config)
    sections = {}
    for name in _KEYS_OF:
        # Beside a mesh, a pipeline section can only be meant for Cuboid, even if its "engine" was forgotten.
        if name in framework_config and ("tensor_parallel" in sections or _is_ours(name, framework_config[name])):
            sections[name] = framework_config.pop(name)
    autotp = framework_config.get("tensor_parallel")
    if "pipeline" in sections and isinstance(autotp, Mapping) and list(autotp) == ["autotp_size"]:
        # Cuboid itself wrote this section, for accelerate.
        sections["tensor_parallel"] = {**_NO_MESH, **framework_config.pop("tensor_parallel")}
    for name, section in {**sections, **framework_config}.items():
        if name in ("tensor_parallel", "pipeline", "checkpoint", "activation_checkpointing"):
            if not isinstance(section, dict):
                raise ConfigError(f"{name} is {section!r}; it is a section of keys, or left out")
        elif _is_ours(name, section):
            raise ConfigError(
                f"{name} is not a section of Cuboid's: tensor_parallel has the mode 3d_tensor, and pipeline the engine "
                f"seq1f1b; {suggestion(name, ['tensor_parallel', 'pipeline'])}"
            )
    if "tensor_parallel" in framework_config:
        raise ConfigError(
            'pipeline.engine "seq1f1b" goes together with tensor_parallel.mode "3d_tensor", not with the '
            "tensor_parallel section of AutoTP"
        )
    if "checkpoint" in framework_config:
        _take_checkpoint(framework_config, sections)
    if "activation_checkpointing" in framework_config:
        _take_activation_checkpointing(framework_config, sections)
    try:
        own_values = {name: framework_config.pop(name) for name in _OWN_KEYS if name in framework_config}
        return CuboidConfig.model_validate(
            {**sections, **own_values, "framework": FrameworkNumbers.of(framework_config)}
        ), framework_config
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None


def _take_checkpoint(framework_config: dict[str, Any], sections: dict[str, Any]) -> None:
    """Move Cuboid's keys out of the ``checkpoint`` section, in which DeepSpeed has keys of its own.

    A key of DeepSpeed's that doesn't apply to Cuboid's checkpoints is an error.
    """
    section = framework_config["checkpoint"]
    for key, reason in _NO_CHECKPOINT_KEYS.items():
        if section.get(key):
            raise ConfigError(f"checkpoint.{key}: {reason}; leave it out")
    deepspeed_section = {key: section[key] for key in (*_NO_CHECKPOINT_KEYS, "tag_validation") if key in section}
    sections["checkpoint"] = {key: value for key, value in section.items() if key not in deepspeed_section}
    framework_config.pop("checkpoint")
    if deepspeed_section:
        framework_config["checkpoint"] = deepspeed_section


def _take_activation_checkpointing(framework_config: dict[str, Any], sections: dict[str, Any]) -> None:
    """Move Cuboid's key out of the ``activation_checkpointing`` section, in which DeepSpeed has keys of its own.

    Raises:
        ConfigError: a key isn't known, or is one of DeepSpeed's that would have no effect.
    """
    section = framework_config["activation_checkpointing"]
    known = [*ActivationCheckpointingConfig.model_fields, *_DEEPSPEED_CHECKPOINTING]
    for key, value in section.items():
        # JSON has no comments, so people write them as keys with such prefixes.
        if key not in known and not key.startswith(("_", "#", "//")):
            raise ConfigError(f"activation_checkpointing.{key} is not a known key; {suggestion(key, known)}")
        # Scripts may call DeepSpeed's own function, which reads its keys.
        if value and key in _DEEPSPEED_CHECKPOINTING and "mode" in section:
            raise ConfigError(f"activation_checkpointing.{key}: {_DEEPSPEED_CHECKPOINTING[key]}; leave it out")
    own_keys = ActivationCheckpointingConfig.model_fields
    if "mode" in section:
        sections["activation_checkpointing"] = {key: section.pop(key) for key in own_keys if key in section}
    elif section.get("cpu_checkpointing"):
        raise ConfigError(
            'activation_checkpointing.cpu_checkpointing needs "mode": "layers" or "attention" beside it, which say '
            "what is kept in host memory"
        )
    if not any(key in _DEEPSPEED_CHECKPOINTING or key in own_keys for key in section):
        framework_config.pop("activation_checkpointing")


def parse_config(source: ConfigSource | CuboidConfig) -> CuboidConfig:
    """Cuboid's part of :func:`require_config`; a config that has been parsed already is returned as it is.

    Raises:
        ConfigError: as :func:`require_config`.
    """
    return source if isinstance(source, CuboidConfig) else require_config(source)[0]


def require_config(source: ConfigSource) -> tuple[CuboidConfig, dict[str, Any]]:
    """Like :func:`split_config`, for callers that need Cuboid to be enabled.

    Raises:
        ConfigError: as :func:`split_config`, and if the config doesn't enable Cuboid.
    """
    parts = own_config(read_config(source))
    if parts is None:
        raise ConfigError(
            'the config has no key of Cuboid\'s; add "tensor_parallel": '
            '{"mode": "3d_tensor", "mesh": {"batch": 1, "sequence": 1, "hidden": 1}} or '
            '"pipeline": {"engine": "seq1f1b", "stages": 2}'
        )
    return parts


#: Cuboid's keys outside of the sections, in a config that has a section of Cuboid's.
_OWN_KEYS = ("lora", "cluster", "sequence_length", "deterministic")
#: Values that identify a section as Cuboid's.
_MARKS = ("3d_tensor", "seq1f1b")
#: Keys that identify a section as Cuboid's. Any of them is enough, so that a section whose ``mode`` or ``engine`` was
#: forgotten or misspelt is diagnosed instead of being passed on. This matters for the pipeline section in particular:
#: DeepSpeed silently ignores unknown keys there.
_KEYS_OF = {
    "tensor_parallel": (
        *("mode", "mesh", "size", "gather_logits", "weight_gather", "gradient_reduce", "gradient_sync", "fp8"),
    ),
    "pipeline": (
        *("engine", "chunks", "segments", "stage_balance", "schedule", "memory_limit", "kv_gradients", "trace"),
        "trace_step",
    ),
}


def _is_ours(name: object, section: object) -> bool:
    """Whether a section is Cuboid's: by a key or value; under another name, by having Cuboid's mode or engine."""
    if not isinstance(section, Mapping):
        return isinstance(section, str) and section in _MARKS
    marked = [str(key) for key, value in section.items() if isinstance(value, str) and value in _MARKS]
    if name in _KEYS_OF:
        return bool(marked) or any(key in section for key in _KEYS_OF[name])
    # The name is misspelt.
    return any(difflib.get_close_matches(key, ("mode", "engine")) for key in marked)


def _names_us(source: Any) -> bool:
    """Whether the text of an unreadable config contains one of Cuboid's values."""
    try:
        _, text = config_text(source)
    except ConfigError:
        return False
    return any(mark in text for mark in _MARKS)


def _explain(error: ValidationError) -> str:
    messages: dict[str, list[str]] = {}
    values: dict[str, str] = {}
    for item in error.errors():
        path, text, value = _explain_one(item["loc"], what_is_wrong(item), item["type"], item.get("input"))
        messages.setdefault(path, []).append(text)
        values[path] = value
    # pydantic reports one error per member of a union. If there is an error inside a section, the user meant the member
    # that is a section, and the errors of the other members are dropped.
    outer = {path for path in messages if any(other.startswith(f"{path.removesuffix(': ')}.") for other in messages)}
    messages = {path: texts for path, texts in messages.items() if path not in outer}
    return "\n".join(f"{path}{', or '.join(texts)}{values[path]}" for path, texts in messages.items())


def what_is_wrong(item: Any) -> str:
    """pydantic's message for an error, without the names of internal classes."""
    if item["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return "it is a section of keys"
    return str(item["msg"]).removeprefix("Value error, ")


def suggestion(unknown: str, known: Sequence[str]) -> str:
    """What to write instead of an unknown key."""
    near = difflib.get_close_matches(unknown, known, n=1)
    return f'did you mean "{near[0]}"?' if near else f"known keys: {', '.join(known)}"


def _explain_one(location: tuple[int | str, ...], message: str, kind: str, value: object) -> tuple[str, str, str]:
    """The key's path, the message, and the given value, as parts of a sentence."""
    # pydantic's location includes the tried member of a union, which isn't a key of the config.
    keys = [str(part) for part in location if str(part) in _KNOWN_KEYS or isinstance(part, int)]
    if kind == "extra_forbidden":
        # A key of another section, which is unknown in this one, comes last in the location already.
        keys = keys[:-1] if str(location[-1]) in _KNOWN_KEYS else keys
        inner = next((name for name in ("mesh", "fp8") if name in location[:-1]), str(location[0]))
        section = _SECTION_MODELS[inner]
        unknown = str(location[-1])
        known = sorted(name for name in section.model_fields if name != "autotp_size")
        return ".".join([*keys, unknown]), f" is not a known key; {suggestion(unknown, known)}", ""
    path = ".".join(keys) or "config"
    if kind == "missing":
        return path, " is missing", ""
    return f"{path}: ", message, f" (given: {value!r})"


#: Keys of DeepSpeed's checkpoint section that affect its own checkpoints only, with the reason to leave them out.
_NO_CHECKPOINT_KEYS = {
    "load_universal": "every checkpoint loads on any layout",
    "use_node_local_storage": "all ranks write into one folder, which they all have to see",
    "parallel_write": "all ranks always write in parallel",
    "writer": "files are written by Cuboid itself",
}
#: Keys of DeepSpeed's own ``deepspeed.checkpointing.checkpoint``, with the reason why they mean nothing here.
_DEEPSPEED_CHECKPOINTING = {
    "partition_activations": "a layer's input is a rank's part of it on every mesh",
    "contiguous_memory_optimization": "it is for deepspeed.checkpointing.checkpoint, which isn't used",
    "number_checkpoints": "every layer is checkpointed",
    "synchronize_checkpoint_boundary": "it is for deepspeed.checkpointing.checkpoint, which isn't used",
    "profile": "it is for deepspeed.checkpointing.checkpoint, which isn't used",
}
_SECTION_MODELS: dict[str, type[Section]] = {
    "mesh": MeshConfig,
    "fp8": Fp8Config,
    "tensor_parallel": TensorParallelConfig,
    "pipeline": PipelineConfig,
    "activation_checkpointing": ActivationCheckpointingConfig,
    "checkpoint": CheckpointConfig,
    "lora": LoraSection,
}
_SECTION_KEYS = {name for model in _SECTION_MODELS.values() for name in model.model_fields}
_KNOWN_KEYS = {*_SECTION_MODELS, *_OWN_KEYS, *_SECTION_KEYS}
