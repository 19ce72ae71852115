"""The number of this version: setup.py reads it here, so that a source tree that was never installed has it too."""

__version__ = "0.1.0"
