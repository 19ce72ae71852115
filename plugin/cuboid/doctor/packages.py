"""Python and the packages: their versions, and whether they can be imported."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.specifiers import SpecifierSet

from cuboid.doctor.child import run_script
from cuboid.doctor.finding import Finding, note, problem, right
from cuboid.requirements import OPTIONAL, PYTHON, RANGES, TESTED_PYTHON, check_version

#: For all imports together; a few seconds on an idle machine, and much longer from a cold network file system.
_PATIENCE_S = 180.0
_USED_FOR = {"peft": "LoRA", "colossalai": "ColossalAI's Booster", "bitsandbytes": "QLoRA"}


class Installation:
    """The packages of this interpreter, imported once by another process when that is first asked for."""

    def __init__(self) -> None:
        self._errors: dict[str, str] | None = None
        #: What torch says of the devices, as ``imports`` reports it; None if torch can't be imported.
        self.devices: dict[str, Any] | None = None

    @property
    def errors(self) -> dict[str, str]:
        """Why each installed package can't be imported; "" where it can."""
        if self._errors is None:
            self._errors = {}
            # A package that ends the process is reported, and the others are tried without it.
            left = [name for name in RANGES | OPTIONAL if _is_installed(name)]
            while left:
                left = self._import(left)
        return self._errors

    @property
    def has_torch(self) -> bool:
        """Whether torch can be imported."""
        return self.errors.get("torch") == ""

    def _import(self, names: Sequence[str]) -> list[str]:
        """Import packages; those that are left when one of them ended the process."""
        assert self._errors is not None
        ending = run_script("imports", *names, seconds=_PATIENCE_S)
        for report in ending.reports:
            if "package" in report:
                self._errors[report["package"]] = report["error"]
            elif "devices" in report:
                self.devices = report["devices"]
        begun = [report["begun"] for report in ending.reports if "begun" in report] or list(names[:1])
        self._errors.setdefault(begun[-1], f"its import {ending.cause or 'ended the process'}")
        return [name for name in names if name not in self._errors]


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def python() -> Iterator[Finding]:
    """Whether this Python is supported."""
    number = platform.python_version()
    if not SpecifierSet(PYTHON).contains(number, prereleases=True):
        yield problem("python", f"{number} is too old", f"make an environment with Python {PYTHON}")
    elif not number.startswith(f"{TESTED_PYTHON}."):
        yield note("python", f"{number}; Cuboid's tests run with {TESTED_PYTHON}")
    else:
        yield right("python", number)


def installed(installation: Installation) -> Iterator[Finding]:
    """For each package, whether its version is supported, and whether it can be imported."""
    for package, known in (RANGES | OPTIONAL).items():
        if package in OPTIONAL and not _is_installed(package):
            yield right(package, f"not installed; needed for {_USED_FOR[package]} alone")
            continue
        try:
            check_version(package)
        except ImportError as error:
            yield problem(package, str(error).partition(": pip install")[0], f"pip install '{package}{known}'")
            continue
        error_text = installation.errors[package]
        if error_text:
            yield problem(
                package,
                f"{version(package)} can't be imported: {error_text}",
                f"`python -c 'import {package}'` shows all of it; pip install --force-reinstall '{package}{known}'",
            )
        else:
            yield right(package, version(package))
