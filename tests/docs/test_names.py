"""``.ci/names`` rejects a name with two meanings, a file named after its folder, and variables that don't say what they
are."""

import runpy
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / ".ci" / "names"))
findings, variable_findings = SCRIPT["findings"], SCRIPT["variable_findings"]


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


@pytest.mark.parametrize(
    "code",
    [
        "own = 1",
        "own: int = 1",
        "first, *own = 1, 2",
        "for own in (): ...",
        "rows = [row for own in () for row in own]",
        "with open('x') as own: ...",
        "def f(own): ...",
        "def f(*, own=1): ...",
        "f = lambda own: own",
        "if (own := 1): ...",
        "import os as own",
        "try: ...\nexcept OSError as own: ...",
        "match 1:\n    case [*own]: ...",
    ],
)
def test_a_variable_that_does_not_say_what_it_is_is_named_with_its_line(tmp_path, code):
    (tmp_path / "plugin").mkdir()
    (tmp_path / "plugin" / "loop.py").write_text(code + "\n")
    (sentence,) = variable_findings(tmp_path, ["plugin"])
    line = 2 if "\n" in code else 1
    assert sentence == f"plugin/loop.py:{line}: own doesn't say what the variable is"


def test_attributes_keywords_and_functions_may_have_any_name(tmp_path):
    (tmp_path / "loop.py").write_text("def own(): ...\nx.own = f(own=1).whole\nowner = x\n")
    assert variable_findings(tmp_path, ["."]) == []


@pytest.mark.slow  # `make lint` asks the same
def test_variables_say_what_they_are():
    assert variable_findings(SCRIPT["ROOT"]) == []
