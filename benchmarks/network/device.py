"""One network thread for each rank, instead of one for each of its process groups.

Every gloo process group has a thread of its own that looks for messages, and looks a hundred times a second also when
it has nothing to wait for. A rank on a mesh has ten groups and more. On a machine of its own that is nothing; where 64
ranks share two cores it is 100 000 awakenings a second, which took three quarters of both cores.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

#: Of a process group, to run its collectives; as gloo has by default.
_THREADS = 2


def share_one_device(interface: str) -> None:
    """Let all gloo process groups that this process makes from now on use one device.

    It connects a group when that is made, which without all those threads is fast enough. (Connecting lazily, gloo
    knows peers by their rank alone, so that groups on one device take one another's connections.) PyTorch takes no
    options for gloo, so its class is replaced; in the rig's own processes alone.

    Args:
        interface: what the device binds to.
    """
    device = dist.ProcessGroupGloo.create_device(interface=interface, lazy_init=False)

    class SharedDeviceGloo(dist.ProcessGroupGloo):  # type: ignore[misc, name-defined]
        def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices, options._timeout, options._threads = [device], timeout, _THREADS
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = SharedDeviceGloo  # type: ignore[misc]
