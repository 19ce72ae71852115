"""Parity tests: the same batches through plain transformers and through Cuboid, compared tensor by tensor.

The library behind ``cuboid verify``; see :func:`verify`.
"""

from cuboid.models.architectures.small_model_names import ARCHITECTURES, Architecture
from cuboid.verify.plan import Plan
from cuboid.verify.report import PassReport, Report
from cuboid.verify.run import verify
from cuboid.verify.small_models import SmallModel
from cuboid.verify.workers.pool import WorkerError, WorkerPool

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "PassReport",
    "Plan",
    "Report",
    "SmallModel",
    "WorkerError",
    "WorkerPool",
    "verify",
]
