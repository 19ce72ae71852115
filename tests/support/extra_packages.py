"""Packages that the tests of an integration need, and that aren't among those that the tests install."""

import os
import subprocess
import sys
from importlib.util import find_spec

from launching import ROOT


def search_path_with(name, packages):
    """``PYTHONPATH`` of processes that import ``name``: where it is missing, with those in ``build``, installed once.

    ``packages`` are all that ``.venv`` lacks for it, so that they replace nothing there.
    """
    paths = [os.environ.get("PYTHONPATH", "")]
    if find_spec(name) is None:
        # dill, which hashes data sets for TRL, takes only modules in a folder of this name for installed ones.
        folder = ROOT / "build" / name / "site-packages"
        if not folder.is_dir():
            partial = folder.with_suffix(".part")
            install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--upgrade"]
            subprocess.run([sys.executable, *install, "--target", partial, *packages], check=True)
            partial.rename(folder)
        paths.append(str(folder))
    return os.pathsep.join(filter(None, paths))
