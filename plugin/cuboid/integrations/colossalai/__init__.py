"""``Booster(plugin=CuboidPlugin(config))``: ColossalAI's interfaces for sharded models."""
