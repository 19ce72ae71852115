"""Imports that all workers need, made once by the fork server of :mod:`cuboid.verify.workers.pool`."""

import deepspeed  # noqa: F401
import torch  # noqa: F401
import transformers  # noqa: F401

import cuboid
import cuboid.verify.workers.worker  # noqa: F401
