"""``Booster(plugin=CuboidPlugin(config))``: ColossalAI's interfaces around sharded models."""
