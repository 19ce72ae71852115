"""``.ci/names`` rejects a name with two meanings, and a file named after its folder."""

import runpy
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / ".ci" / "names"))
findings = SCRIPT["findings"]


@pytest.fixture
def package(tmp_path):
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "stages.py").write_text(
        "class Plan:\n    class Inner: ...\n\nKind = int\nT = 1\nMOST_MB = 1\n"
    )
    (tmp_path / "search.py").write_text("import os\n\nclass Plan: ...\n\nKind: type = str\nT = 2\nMOST_MB = 2\n")
    (tmp_path / "loop.py").write_text("class Inner: ...\n\ndef f():\n    class Plan: ...\n")
    return tmp_path


def test_what_has_two_meanings_is_named_with_its_places(package):
    assert findings(package) == [
        "Kind is defined in search.py:5 and stages/stages.py:4",
        "Plan is defined in search.py:3 and stages/stages.py:1",
        "stages/stages.py has the name of its folder",
    ]


def test_the_package_itself_has_none():
    assert findings(SCRIPT["PACKAGE"]) == []
