"""A script: import packages one after the other, and report on each, then on the devices that torch sees.

It is started by its path (``child``), and imports nothing else: whatever is broken must be seen here alone.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any


def main(packages: list[str]) -> None:
    """Report {"begun": package} and {"package": …, "error": …} for each, and {"devices": …} after torch."""
    # What packages print goes elsewhere.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as output:
        os.dup2(2, 1)

        def report(**entry: Any) -> None:
            print(json.dumps(entry), file=output, flush=True)

        for package in packages:
            report(begun=package)
            try:
                importlib.import_module(package)
            except BaseException as error:
                report(package=package, error=_first_line(error))
            else:
                report(package=package, error="")
                if package == "torch":
                    try:
                        report(devices=_devices())
                    except Exception as error:
                        report(devices={"failure": _first_line(error)})
        # Some packages' threads keep an interpreter from ending.
        output.flush()
        os._exit(0)


def _devices() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    is_built = torch.version.cuda is not None or torch.version.hip is not None
    devices: dict[str, Any] = {
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": None,
        "failure": "",
        "found": [],
    }
    if not is_built:
        return devices
    if dist.is_available() and dist.is_nccl_available():
        devices["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    try:
        torch.cuda.init()
    except Exception as error:
        devices["failure"] = _first_line(error)
        return devices
    for number in range(torch.cuda.device_count()):
        device: dict[str, Any] = {"name": torch.cuda.get_device_name(number), "failure": ""}
        try:
            free, total = torch.cuda.mem_get_info(number)
            device |= {"free": free, "total": total}
            # A build of torch without this device's architecture has no kernel for it.
            if (torch.ones(2, device=f"cuda:{number}") * 2).sum().item() != 4:
                device["failure"] = "computes wrongly"
        except Exception as error:
            device["failure"] = _first_line(error)
        devices["found"].append(device)
    return devices


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


if __name__ == "__main__":
    main(sys.argv[1:])
