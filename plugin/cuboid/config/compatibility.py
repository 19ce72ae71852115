"""Check that DeepSpeed's own settings are compatible with Cuboid's, before anything is allocated."""

from __future__ import annotations

from typing import Any

from cuboid.config.deepspeed_config import DeepSpeedPart
from cuboid.config.schema import CuboidConfig
from cuboid.distributed.topology import MeshShape, divisors
from cuboid.errors import ConfigError, MeshError
from cuboid.seq1f1b.schedule.choice import NAMES

#: Keys of features that haven't been adapted to sharded models, with the reason or the alternative.
_INCOMPATIBLE = {
    "hybrid_engine": "it runs inference on unsplit layers",
    "sequence_parallel_size": "use mesh.sequence",
    "data_parallel_size": "it follows from the world and the mesh",
    "expert_parallel": "the mesh splits every expert, and hands whole ones out over mesh.batch",
    "torch_autocast": "use bf16",
    "compression_training": "it replaces layers that are sharded here",
    "sparse_attention": "attention runs through transformers",
    "quantize_training": "it quantises whole weights",
    "data_efficiency": "it changes batches and layers between the data and the model",
    "bfloat16": 'that is an old name; write "bf16"',
}


def check_framework_config(
    config: CuboidConfig, framework_config: dict[str, Any], world_size: int, *, is_complete: bool = False
) -> None:
    """Reject settings that are incompatible with Cuboid's, or that DeepSpeed can't read.

    Args:
        config: Cuboid's part.
        framework_config: DeepSpeed's part.
        world_size: number of ranks.
        is_complete: whether DeepSpeed reads the config next; if not, ``"auto"`` values are accepted, because the HF
            Trainer and accelerate will fill them in.

    Raises:
        ConfigError: names the key and suggests what would work.
        MeshError: the mesh doesn't divide the world size.
    """
    _check_world(config, world_size)
    mode = "tensor_parallel.mode 3d_tensor" if config.pipeline is None else "pipeline.engine seq1f1b"
    for key, reason in _INCOMPATIBLE.items():
        value = framework_config.get(key)
        # A section counts unless it is disabled; a size of 1 is the same as none.
        enabled = value.get("enabled", True) if isinstance(value, dict) else value and value != 1
        if enabled:
            raise ConfigError(f"{key} can't be combined with {mode}: {reason}")
    if framework_config.get("compile") is not None:
        _check_compile(framework_config["compile"], mode)
    part = DeepSpeedPart(framework_config, is_complete=is_complete)
    rows = [framework_config.get(key) for key in ("train_batch_size", "train_micro_batch_size_per_gpu")]
    if is_complete and rows == [None, None]:
        raise ConfigError("train_micro_batch_size_per_gpu is missing; DeepSpeed needs the rows of a micro-batch")
    _check_schedule_and_batch(config, framework_config, world_size)
    _check_zero(config, part, mode)


def _check_compile(section: Any, mode: str) -> None:
    """Reject what DeepSpeed's own ``compile`` section turns on."""
    instead = 'write "compile": true under tensor_parallel, which compiles the layers'
    if not isinstance(section, dict):
        raise ConfigError(f"compile at the top level is DeepSpeed's section, and not {section!r}; {instead}")
    for name in ("deepcompile", "autoep_non_moe"):
        if section.get(name):
            raise ConfigError(
                f"compile.{name} can't be combined with {mode}: DeepSpeed compiles models or parts of them whose "
                f"collectives it knows; {instead}"
            )


def check_layout(config: CuboidConfig, framework_config: dict[str, Any], world_size: int) -> None:
    """Check world size, schedule and batch sizes, for any framework; raises as :func:`check_framework_config`.

    The types of the values in ``framework_config`` must have been checked.
    """
    _check_world(config, world_size)
    _check_schedule_and_batch(config, framework_config, world_size)


def _check_world(config: CuboidConfig, world_size: int) -> None:
    if not config.tensor_parallel.is_sized:
        if world_size % config.stages:
            raise MeshError(
                f"pipeline.stages = {config.stages} doesn't divide the world of {world_size}; numbers of stages that "
                f"do: {', '.join(map(str, divisors(world_size)))}"
            )
        return
    if world_size % config.ranks == 0:
        return
    size, mesh = config.tensor_parallel.mesh_size, config.tensor_parallel.mesh
    name = f"size = {size} ranks" if mesh == "auto" else f"mesh {mesh.shape}, {size} ranks,"
    hint = ""
    if config.pipeline is not None:
        name += f" for each of pipeline.stages = {config.stages}, {config.ranks} in all,"
        counts = [count for count in divisors(world_size) if world_size % (count * size) == 0]
        hint = f"; numbers of stages that do with that mesh: {', '.join(map(str, counts)) or 'none'}"
    elif mesh != "auto":
        hint = "; nearest meshes that do: " + ", ".join(str(shape) for shape in _nearest(mesh.shape, world_size))
    raise MeshError(
        f"tensor_parallel.{name} doesn't divide the world of {world_size} (sizes that do: "
        f"{', '.join(map(str, divisors(world_size)))}){hint}"
    )


def _nearest(shape: MeshShape, world_size: int) -> list[MeshShape]:
    meshes = [mesh for size in divisors(world_size) for mesh in MeshShape.of_size(size)]

    def difference(mesh: MeshShape) -> tuple[int, int]:
        apart = abs(mesh.batch - shape.batch) + abs(mesh.sequence - shape.sequence) + abs(mesh.hidden - shape.hidden)
        return apart, -mesh.size

    return sorted(meshes, key=difference)[:4]


def _check_zero(config: CuboidConfig, part: DeepSpeedPart, mode: str) -> None:
    """Reject combinations of ZeRO's stage, precisions, offloading and stages of a pipeline that have no rule."""
    stage, pipeline = part.zero_stage, config.pipeline
    one_or_two = "use stage 1" + ("" if pipeline else " or 2")
    of_one_rank = config.tensor_parallel.is_sized and config.ranks == 1
    reasons: list[tuple[object, str]] = [
        (
            part.fp16 and stage == 0,
            f"zero_optimization.stage 0 with fp16 has no rule with {mode}: whether gradients overflowed is "
            f"agreed on by the ranks of ZeRO's optimizer; {one_or_two}",
        ),
        (
            part.fp16 and config.tensor_parallel.fp8 is not None,
            "tensor_parallel.fp8 is for weights in bf16, and fp16 is enabled; enable bf16 instead",
        ),
        (
            part.fp16_masters,
            "fp16.fp16_master_weights_and_grads keeps the optimizer's weights in fp16, which checkpoints have no rule "
            "for; leave it out",
        ),
        (
            stage == 3,
            "zero_optimization.stage 3 would split parameters that the mesh splits already; "
            f"{one_or_two}, and tensor_parallel.mesh.batch for what stage 3 does",
        ),
        (
            stage == 0 and part.bf16 and pipeline and of_one_rank,
            "zero_optimization.stage 0 with bf16: DeepSpeed can't accumulate the gradients of a pipeline's units in "
            "float32 there; use stage 1",
        ),
        (
            stage == 0 and part.bf16 and not of_one_rank,
            "zero_optimization.stage 0 with bf16: DeepSpeed computes a wrong gradient norm there for any tensor "
            f"or pipeline parallelism, and clips by it; {one_or_two}",
        ),
        (
            pipeline and stage == 2,
            "zero_optimization.stage 2 would give away gradients that the next unit of a pipeline adds to; use stage 1",
        ),
        (
            pipeline and not part.counts_micro_steps,
            "managed_gradient_accumulation false lets a script's step() end a step, and a pipeline has train_batch, "
            "which makes a whole one; leave it out, and change the number of micro-batches by set_train_batch_size",
        ),
    ]
    for key, device in part.offloads.items():
        reasons += [
            (
                pipeline,
                f"zero_optimization.{key} with pipeline.engine seq1f1b: DeepSpeed moves a gradient to the host when a "
                "backward ends, and each of a pipeline's units has one; leave it out. A mesh without stages takes "
                'offload_optimizer, and in a pipeline "activation_checkpointing": {"mode": "attention", '
                '"cpu_checkpointing": true} moves what layers keep',
            ),
            (
                key == "offload_param",
                "zero_optimization.offload_param is for stage 3, which a mesh takes the place of; leave it out. "
                "offload_optimizer with stage 1 or 2 moves masters and moments",
            ),
            (
                device != "cpu",
                f'zero_optimization.{key}.device is "{device}", which DeepSpeed has for stage 3 only; write "cpu"',
            ),
            (stage == 0, f"zero_optimization.{key} needs a stage, and stage is 0; use stage 1 or 2"),
        ]
    for is_so, reason in reasons:
        if is_so:
            raise ConfigError(reason)


def _check_schedule_and_batch(config: CuboidConfig, framework_config: dict[str, Any], world_size: int) -> None:
    if config.pipeline is not None and config.pipeline.schedule not in NAMES:
        raise ConfigError(f"pipeline.schedule is {config.pipeline.schedule!r}; known: {', '.join(NAMES)}")
    micro, total = framework_config.get("train_micro_batch_size_per_gpu"), framework_config.get("train_batch_size")
    steps: Any = framework_config.get("gradient_accumulation_steps") or 1
    if not config.tensor_parallel.is_sized:
        # There is no mesh yet; the planner will choose one that fits the batch.
        return
    replicas = world_size // config.ranks
    if micro is None and isinstance(total, int) and isinstance(steps, int):
        # DeepSpeed rejects a remainder too.
        micro, _ = config.framework.per_replica(replicas)
        if micro is None:
            raise ConfigError(
                f"train_batch_size is {total}, which {steps} gradient_accumulation_steps × {replicas} replicas of the "
                f"mesh don't divide; use a multiple of {replicas * steps}"
            )
    mesh = config.tensor_parallel.mesh
    if isinstance(micro, int) and mesh != "auto" and micro % mesh.batch:
        raise ConfigError(
            f"train_micro_batch_size_per_gpu is {micro}, the micro-batch of a mesh, which mesh.batch = {mesh.batch} "
            f"ranks share; use a multiple of {mesh.batch}, such as {(micro // mesh.batch + 1) * mesh.batch}, or a "
            f"mesh.batch of {' or '.join(map(str, divisors(micro)))}"
        )
    if not (isinstance(micro, int) and isinstance(steps, int) and isinstance(total, int)):
        return
    if framework_config.get("gradient_accumulation_steps") is None and total % (micro * replicas) == 0:
        # DeepSpeed derives the steps from the two numbers.
        return
    # The product with the world size is accepted too: accelerate computes that, since it doesn't know the mesh.
    if total not in (micro * steps * replicas, micro * steps * world_size):
        raise ConfigError(
            f"train_batch_size is {total}, but train_micro_batch_size_per_gpu × gradient_accumulation_steps × replicas "
            f"of the mesh = {micro} × {steps} × {replicas} = {micro * steps * replicas}; leave train_batch_size out"
        )
