"""The version has one source, which a tree that was never installed has too."""

from distutils.core import run_setup
from importlib.metadata import PackageNotFoundError, version

import cuboid
from cuboid import requirements
from cuboid.integrations.run_report import schema as report
from launching import ROOT


def test_the_package_is_installed_with_the_version_of_its_source():
    assert run_setup(ROOT / "setup.py", stop_after="init").metadata.version == cuboid.__version__


def test_what_is_recorded_needs_no_installation_of_cuboid(monkeypatch):
    def installed(name):
        if name == "cuboid":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(requirements, "version", installed)
    assert requirements.versions("cuboid", "torch") == {"cuboid": cuboid.__version__, "torch": version("torch")}
    assert report.versions()["cuboid"] == cuboid.__version__
