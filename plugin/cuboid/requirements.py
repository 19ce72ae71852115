"""Supported versions of the packages whose internals Cuboid uses, checked before any of them is imported."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

from cuboid.version import __version__

#: What setup.py asks of Python, and the version that the tests run with.
PYTHON, TESTED_PYTHON = ">=3.11", "3.11"
#: setup.py asks for the same. The minor versions that the tests were run with are in .ci/versions.
RANGES = {
    "torch": ">=2.9,<2.16",
    "transformers": ">=5.16,<5.25",
    "deepspeed": ">=0.19.8,<0.20",
    "accelerate": ">=1.10,<1.16",
}
#: Packages that only some scripts use, checked when Cuboid meets them.
OPTIONAL = {"peft": ">=0.20,<0.22", "colossalai": ">=0.5,<0.6", "bitsandbytes": ">=0.48,<0.51"}


def check_installed() -> None:
    """Reject unsupported versions.

    Raises:
        ImportError: a package is missing or unsupported; names the versions that work.
    """
    for package in RANGES:
        check_version(package)


def versions(*packages: str) -> dict[str, str]:
    """The versions of installed packages, by name. Cuboid's is known without an installation, from its source."""
    return {package: __version__ if package == "cuboid" else version(package) for package in packages}


def check_version(package: str) -> None:
    """Reject an unsupported version of one package.

    Raises:
        ImportError: it is missing or unsupported; names the versions that work.
    """
    known = {**RANGES, **OPTIONAL}[package]
    try:
        installed = version(package)
    except PackageNotFoundError:
        raise ImportError(f"cuboid needs {package} {known}, which is not installed", name=package) from None
    # A build from source has the next release's number and a local suffix, such as 2.13.0a0+git1234567.
    if not SpecifierSet(known).contains(installed.partition("+")[0], prereleases=True):
        raise ImportError(
            f"cuboid works with {package} {known}, but {installed} is installed: pip install '{package}{known}'",
            name=package,
        )
