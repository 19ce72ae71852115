"""What axolotl loads by ``plugins: [cuboid.integrations.axolotl.AxolotlPlugin]`` in its YAML."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from axolotl.integrations.base import BasePlugin

from cuboid.config.schema import split_config
from cuboid.errors import ConfigError
from cuboid.weights.api import scope


class AxolotlPlugin(BasePlugin):  # type: ignore[misc]
    """Shards the model as axolotl loads it, before it gets adapters, by Cuboid's sections of its DeepSpeed config.

    Nothing changes without such sections.
    """

    def __init__(self) -> None:
        super().__init__()
        self._loading = ExitStack()

    def pre_model_load(self, cfg: Any) -> None:
        """Let ``from_pretrained`` shard.

        Raises:
            ConfigError: the DeepSpeed config is invalid, or asks for a pipeline.
        """
        config = split_config(cfg.deepspeed)[0] if cfg.deepspeed else None
        if config is None:
            return
        if config.pipeline is not None and config.pipeline.stages > 1:
            raise ConfigError(
                "pipeline.stages: axolotl's trainers call the model's forward, which stages of a pipeline don't have; "
                "use tensor_parallel without pipeline, or cuboid.CuboidTrainer in a script"
            )
        # Each rank loads its shards to its own device.
        cfg.device_map = None
        self._loading.enter_context(scope(config))

    def post_model_build(self, cfg: Any, model: Any) -> None:
        """End what :meth:`pre_model_load` began: other models of the run are plain."""
        self._loading.close()
