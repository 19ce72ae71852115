"""Versions of the packages that Cuboid reaches into, found out before any of them is imported."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

#: setup.py asks for the same. The minor versions that the tests were run with are in .ci/versions.
RANGES = {
    "torch": ">=2.9,<2.14",
    "transformers": ">=5.21,<5.24",
    "deepspeed": ">=0.19.8,<0.20",
    "accelerate": ">=1.10,<1.16",
}


def check_installed() -> None:
    """Refuse versions that Cuboid doesn't know its way about in.

    Raises:
        ImportError: one sentence, with the versions that work.
    """
    for package, versions in RANGES.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            raise ImportError(f"cuboid needs {package} {versions}, which is not installed", name=package) from None
        # A build of one's own has the number of the version to come, and a suffix.
        if not SpecifierSet(versions).contains(found.partition("+")[0], prereleases=True):
            raise ImportError(
                f"cuboid works with {package} {versions}, but {found} is installed: pip install '{package}{versions}'",
                name=package,
            )
