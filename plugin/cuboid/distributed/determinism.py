"""``"deterministic": true``: the same bits from run to run on the same layout.

Cuboid's own sums have a fixed order: that of ranks, of units in the schedule, of parameters. What is left are kernels
that add in whatever order their threads arrive. torch knows them, and takes others or raises an error that names them.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

import torch
import torch.distributed as dist

from cuboid.errors import ConfigError

_CUBLAS, _NCCL = "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"
#: The values with which cuBLAS is deterministic; the first one is faster and takes 8 MiB more.
_WORKSPACES = (":4096:8", ":16:8")
#: In-switch reductions (NVLS) and CollNet add in the order in which messages arrive.
_ALGORITHMS = ("Ring", "Tree", "^NVLS", "^NVLS,CollnetDirect,CollnetChain")
#: Read by transformers, for flash attention's own package.
_FLASH = "FLASH_ATTENTION_DETERMINISTIC"


def use_deterministic(environment: MutableMapping[str, str] = os.environ) -> None:
    """Switch torch to deterministic algorithms, for this process and until it ends.

    Environment variables that CUDA's libraries read once are set, unless they are set already.

    Raises:
        ConfigError: a variable has another value, or would be set too late to be read.
    """
    if torch.cuda.is_available():
        _set(environment, _CUBLAS, _WORKSPACES, is_late=torch.cuda.is_initialized(), late="CUDA is in use")
        uses_nccl = dist.is_available() and dist.is_initialized() and "nccl" in str(dist.get_backend())
        _set(environment, _NCCL, _ALGORITHMS, is_late=uses_nccl, late="the process group was made")
    environment[_FLASH] = "1"
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)
    # torch would fill all new tensors, which takes up to 8 % of a step. Cuboid's are written before they are read, as
    # tests prove with NaN.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _set(environment: MutableMapping[str, str], name: str, known: tuple[str, ...], *, is_late: bool, late: str) -> None:
    value = environment.get(name)
    if value is None and not is_late:
        environment[name] = known[0] if name == _CUBLAS else "^NVLS"
        return
    if value is None:
        raise ConfigError(
            f'"deterministic": true needs the environment variable {name}, which isn\'t set, and {late} already; '
            f"start the job with {name}={known[0] if name == _CUBLAS else '^NVLS'}"
        )
    if value not in known:
        raise ConfigError(
            f'"deterministic": true: the environment variable {name} is {value!r}, with which sums may have another '
            f"order in each run; set it to one of {', '.join(known)}"
        )
