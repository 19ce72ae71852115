"""Errors that are the user's to mend. Each message says which key or tensor, why, and what would work."""

from __future__ import annotations


class CuboidError(ValueError):
    """Base class. Raised before any process group or allocation wherever the cause can be known then."""


class ConfigError(CuboidError):
    """A key of the configuration is unknown, malformed, or doesn't fit the world or the framework."""


class MeshError(CuboidError):
    """The mesh doesn't divide the model or the world."""


class UnsupportedModelError(CuboidError):
    """A module, an option of the model, or an argument of its forward has no rule yet."""


class CheckpointError(CuboidError):
    """A checkpoint lacks a tensor, or holds one that doesn't fit."""
