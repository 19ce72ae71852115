"""Cuboid inside training frameworks."""
