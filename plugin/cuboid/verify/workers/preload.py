"""Imports that all workers need, made once by the fork server of :mod:`cuboid.verify.workers.pool`."""

import contextlib

import deepspeed
import torch  # noqa: F401
import transformers  # noqa: F401

import cuboid
import cuboid.verify.workers.worker  # noqa: F401

# DeepSpeed imports these for its first engine; without this, each worker would spend a fifth of a second on that.
with contextlib.suppress(ImportError):
    import deepspeed.module_inject.auto_ep_layer
    import deepspeed.ops.op_builder.all_ops
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    import setuptools  # type: ignore[import-untyped]  # noqa: F401
