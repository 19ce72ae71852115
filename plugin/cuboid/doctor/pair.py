"""A script: one of two processes that add their numbers over gloo, as ranks do. Started by its path (``child``)."""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta


def main(rank: int, port: int, seconds: float) -> None:
    """Meet at a port of this host, and report {"sum": …, "seconds": …}."""
    import torch
    import torch.distributed as dist

    timeout = timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=timeout)
    began = time.perf_counter()
    # Larger than what gloo sends with its header, so that it is really sent.
    numbers = torch.full((1 << 16,), rank + 1, dtype=torch.int64)
    dist.all_reduce(numbers)
    (total,) = numbers.unique().tolist()
    print(json.dumps({"sum": total, "seconds": time.perf_counter() - began}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
