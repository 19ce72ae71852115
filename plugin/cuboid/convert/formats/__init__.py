"""Tensors of other checkpoint formats, read block by block."""
