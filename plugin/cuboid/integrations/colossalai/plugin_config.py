"""The keys beside Cuboid's own that the Booster plugin reads from the config, with DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, ValidationError

from cuboid.config.compatibility import check_layout
from cuboid.config.config_file import ConfigSource, load_config
from cuboid.config.schema import CuboidConfig, Section, require_config, suggestion
from cuboid.distributed.mesh import Mesh
from cuboid.errors import ConfigError
from cuboid.failures.rank_agreement import gather_objects

#: Sections of a DeepSpeed config that a Booster gets in another way, and which.
_ELSEWHERE = {
    "optimizer": "give the optimizer to booster.boost",
    "scheduler": "give the schedule to booster.boost, as lr_scheduler",
    "train_batch_size": "it follows from the data loader; leave it out",
    "fp16": 'loss scaling isn\'t supported; write "bf16": {"enabled": true}, or train in fp32',
}


class _Bf16(Section):
    enabled: bool = Field(False, description="Weights in bfloat16, with masters and sums of gradients in float32.")


class _Zero(Section):
    stage: Literal[0, 1] = Field(
        0, description="1: each replica of the mesh holds only its share of the optimizer's state."
    )


class BoosterConfig(Section):
    """Keys beside Cuboid's own."""

    train_micro_batch_size_per_gpu: int | None = Field(
        None, ge=1, description="Rows of a micro-batch: a pipeline cuts each batch of the data loader into these."
    )
    gradient_accumulation_steps: int | None = Field(
        None,
        ge=1,
        description="Micro-batches that a pipeline cuts each batch into, where their rows aren't given; if they are, "
        "the most that there may be.",
    )
    gradient_clipping: float = Field(
        0.0, ge=0.0, strict=False, description="Largest norm of the gradient in a step; 0 for any."
    )
    bf16: _Bf16 = Field(default_factory=lambda: _Bf16.model_validate({}))
    zero_optimization: _Zero = Field(default_factory=lambda: _Zero.model_validate({}))

    @property
    def precision(self) -> Literal["bf16", "fp32"]:
        """The precision, by ColossalAI's name for it."""
        return "bf16" if self.bf16.enabled else "fp32"


@dataclass(frozen=True)
class PluginConfig:
    """A config, checked: Cuboid's own sections, the other keys, and all of it as the user wrote it."""

    cuboid: CuboidConfig
    booster: BoosterConfig
    source: dict[str, Any]

    @classmethod
    def read(cls, source: ConfigSource, world_size: int) -> PluginConfig:
        """Read a config, and check that every key in it has a meaning here.

        Args:
            source: a path to a .json or .yaml file, or a mapping.
            world_size: ranks of the world.

        Raises:
            ConfigError: an unknown key, a wrong value, or values that contradict each other.
            MeshError: the mesh doesn't divide the world.
        """
        full_config = load_config(source)
        config, framework_config = require_config(full_config)
        try:
            booster = BoosterConfig.model_validate(framework_config)
        except ValidationError as error:
            raise ConfigError("\n".join(map(_explain, error.errors()))) from None
        check_layout(config, framework_config, world_size)
        # Only to check it now: scripts may read sizes before they boost a model.
        config.topology(world_size)
        return cls(config, booster, full_config)

    def values(self) -> dict[str, Any]:
        """All values by their keys, such as ``tensor_parallel.mesh``, with defaults."""
        # As the user wrote them first: Cuboid's part has a summary of the others.
        return {**_flattened(self.booster.model_dump()), **_flattened(self.cuboid.model_dump())}

    def flat(self, replicas: int) -> str:
        """The reason why the optimizer gets parameters laid end to end in flat tensors; empty if it doesn't."""
        if self.booster.precision == "bf16":
            return "with bf16, masters are laid end to end"
        if self.booster.zero_optimization.stage == 1 and replicas > 1:
            return "zero_optimization.stage 1 lays tensors end to end and cuts them between replicas"
        return ""

    def rows_of(self, batch_rows: int, *, training: bool) -> int:
        """Rows of the micro-batches that a pipeline cuts a batch into; in evaluation, a batch may have any number.

        Raises:
            ConfigError: such a batch can't be cut as the config's numbers demand.
        """
        rows, count = self.booster.train_micro_batch_size_per_gpu, self.booster.gradient_accumulation_steps
        if rows is not None:
            if training and count is not None and batch_rows > rows * count:
                raise ConfigError(
                    f"the data loader gave a batch of {batch_rows} rows, more than train_micro_batch_size_per_gpu × "
                    f"gradient_accumulation_steps = {rows} × {count}; give the loader a batch_size of {rows * count}, "
                    "or leave gradient_accumulation_steps out"
                )
            return rows
        count = 1 if count is None else count
        if not training:
            return -(-batch_rows // count)
        if batch_rows % count:
            raise ConfigError(
                f"the data loader gave a batch of {batch_rows} rows, which gradient_accumulation_steps = {count} "
                f"micro-batches can't share; give it a multiple of {count}, or drop_last=True"
            )
        return batch_rows // count


def check_alike(values: Mapping[str, Any], mesh: Mesh) -> None:
    """Check that all ranks have the same values, by which they would do different things; collective.

    Raises:
        ConfigError: on all ranks; names the first that differs.
    """
    texts = {key: repr(value) for key, value in values.items()}
    gathered = gather_objects(texts, mesh, what="comparison of the configs")
    for key in gathered[0]:
        other = next((rank for rank, theirs in enumerate(gathered) if theirs.get(key) != gathered[0][key]), None)
        if other is not None:
            raise ConfigError(
                f"{key} is {gathered[0][key]} on rank 0, but {gathered[other].get(key)} on rank {other}; give all "
                "ranks the same"
            )


def _flattened(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in section.items():
        flat.update(_flattened(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value})
    return flat


def _explain(error: Any) -> str:
    keys = ".".join(map(str, error["loc"]))
    if error["type"] != "extra_forbidden":
        return f"{keys}: {error['msg']} (given: {error['input']!r})"
    if keys in _ELSEWHERE:
        return f"{keys} isn't read by the Booster plugin: {_ELSEWHERE[keys]}"
    known = sorted(
        [*BoosterConfig.model_fields, "tensor_parallel", "pipeline", "activation_checkpointing", "checkpoint"]
    )
    return f"{keys} isn't a key that the Booster plugin reads; {suggestion(keys, known)}"
