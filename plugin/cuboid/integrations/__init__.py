"""Adapters that run Cuboid inside training frameworks."""
