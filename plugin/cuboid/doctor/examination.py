"""All checks, in the order in which a run needs what they look at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from cuboid.doctor import all_reduce, devices, launchers, network, packages, resources
from cuboid.doctor.finding import Finding, note, problem
from cuboid.doctor.hostfile import Hostfile, hosts
from cuboid.doctor.links import between_ranks
from cuboid.doctor.run_folder import run_folder


def examine(
    *,
    out: Path | None,
    hostfile: Path | None,
    port: int | None,
    say: Callable[[str], object],
    links: bool = False,
) -> Iterator[Finding]:
    """Look at everything; each finding comes as soon as it is known.

    Args:
        out: a run's folder, if one is to be looked at.
        hostfile: likewise.
        port: where ranks are to meet; by default MASTER_PORT or the launchers' default.
        say: called with a line before a long wait.
        links: whether to look at the links between a launcher's ranks instead.
    """
    installation = packages.Installation()
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "python": packages.python,
        "packages": lambda: packages.installed(installation),
        "devices": lambda: devices.visible(installation),
        "launchers": launchers.on_path,
        "shared memory": resources.shared_memory,
        "host name": lambda: network.host_name(has_peers=_has_peers(hostfile)),
        "interfaces": network.interfaces,
        "ports": lambda: network.ports(port),
        "all-reduce": lambda: _all_reduce(installation),
        "limits": resources.limits,
        "temporary folder": resources.temporary_folder,
        "folder": lambda: resources.disk(Path.cwd()) if out is None else run_folder(out, say),
    }
    if hostfile is not None:
        checks["hostfile"] = lambda: hosts(hostfile)
    if links:
        # The rest would be looked at once for each rank, and the launcher has the port.
        checks = {"links": between_ranks}
    for name, check in checks.items():
        try:
            yield from check()
        # One look that fails, on a host that is unlike others, mustn't hide what the others see.
        except Exception as error:
            yield problem(name, f"couldn't be looked at: {type(error).__name__}: {error}", "report this line to Cuboid")


def _has_peers(hostfile: Path | None) -> bool:
    return hostfile is not None and len(Hostfile.read(hostfile).slots) > 1


def _all_reduce(installation: packages.Installation) -> Iterator[Finding]:
    if installation.has_torch:
        yield from all_reduce.two_processes()
    else:
        yield note("all-reduce", "not tried, since torch can't be imported")
