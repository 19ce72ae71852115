"""What axolotl loads by ``plugins: [cuboid.integrations.axolotl.AxolotlPlugin]`` in its YAML."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from axolotl.integrations.base import BasePlugin
from transformers import TrainerCallback, set_seed

from cuboid.config.schema import CuboidConfig, LoraSection, split_config
from cuboid.errors import ConfigError
from cuboid.weights.api import scope

#: Options of axolotl for kernels of its own that compute with a matrix and its adapter.
_LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")


class AxolotlPlugin(BasePlugin):  # type: ignore[misc]
    """Shards the model as axolotl loads it, before it gets adapters, by Cuboid's sections of its DeepSpeed config.

    What the YAML says of sequences, micro-batches and LoRA, ``"auto"`` values of these sections are decided for.
    Nothing changes without such sections.
    """

    def __init__(self) -> None:
        super().__init__()
        self._loading = ExitStack()

    def pre_model_load(self, cfg: Any) -> None:
        """Let ``from_pretrained`` shard.

        Raises:
            ConfigError: the DeepSpeed config is invalid, or asks for a pipeline; or the YAML for kernels that have no
                rule.
        """
        config = _config_of(cfg)
        if config is None:
            return
        if config.pipeline is not None and config.pipeline.stages > 1:
            raise ConfigError(
                "pipeline.stages: axolotl's trainers call the model's forward, which stages of a pipeline don't have; "
                "use tensor_parallel without pipeline, or cuboid.CuboidTrainer in a script"
            )
        kernels = [key for key in _LORA_KERNELS if cfg.get(key)]
        if kernels:
            raise ConfigError(
                f"{', '.join(kernels)}: these compute with a whole matrix and its adapter, of which a rank has shards; "
                "set them to false in axolotl's YAML. Without a line there, axolotl turns them on where it can"
            )
        # The Trainer's seed comes after adapters are made, of which each rank makes its own shards.
        set_seed(cfg.seed or 42)
        self._loading.enter_context(scope(_with_recipe(config, cfg)))

    def add_callbacks_post_trainer(self, cfg: Any, _: Any) -> list[TrainerCallback]:
        """What the Trainer tells when it has trained."""
        return [] if _config_of(cfg) is None else [_SaveTogether(cfg)]

    def post_model_build(self, *_: Any) -> None:
        """End what :meth:`pre_model_load` began: other models of the run are plain."""
        self._loading.close()


def _config_of(cfg: Any) -> CuboidConfig | None:
    return split_config(cfg.deepspeed)[0] if cfg.deepspeed else None


def _with_recipe(config: CuboidConfig, cfg: Any) -> CuboidConfig:
    """A config with what axolotl's YAML says of the training, where the JSON leaves it open."""
    known: dict[str, Any] = {"sequence_length": config.sequence_length or cfg.sequence_len}
    numbers = config.framework
    if numbers.batch is None:
        of_yaml = {"micro_batch": cfg.micro_batch_size, "accumulation": cfg.gradient_accumulation_steps}
        missing = {name: value for name, value in of_yaml.items() if getattr(numbers, name) is None}
        known["framework"] = numbers.model_copy(update=missing)
    # Loading knows of 4 bits by itself. Without a rank, the adapter is one that axolotl reads from a folder.
    if config.lora is None and cfg.adapter in ("lora", "qlora") and cfg.lora_r:
        section: dict[str, Any] = {"r": cfg.lora_r}
        if cfg.lora_target_modules and not cfg.lora_target_linear:
            section["target_modules"] = cfg.lora_target_modules
        known["lora"] = LoraSection.model_validate(section)
    return config.model_copy(update=known)


class _SaveTogether(TrainerCallback):
    """Lets all ranks save the trained model, of which each has shards."""

    def __init__(self, cfg: Any) -> None:
        self._cfg = cfg

    def on_train_end(self, *_: Any, **__: Any) -> None:
        # Which ranks save is decided by this number alone, after training.
        self._cfg.local_rank = 0
