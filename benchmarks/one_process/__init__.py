"""Cuboid where there is nothing to split: one process, beside the same training without it."""
