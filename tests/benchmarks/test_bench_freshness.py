"""Tables of measurements say where the code that they measure has changed since, and only there."""

import importlib
import json
import sys

import pytest

from launching import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
sys.path.insert(0, str(ROOT / "docs"))

from generators.measured import Measured
from harness import freshness
from run import CASES

RECORDS = sorted((ROOT / "benchmarks" / "measured").glob("*.json"))
CODE = """\
'''A module.'''

def double(x):
    '''Twice.'''
    return 2 * x  # a number
"""


@pytest.fixture
def root(tmp_path):
    """A repository with one file."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "one.py").write_text(CODE)
    return tmp_path


def remark(root, sources=("code/**/*.py",), change=lambda: None):
    """What a record says that was made before a change."""
    result = {"measures": {**freshness.stamp(sources, root), "commit": "abc1234", "date": "2026-01-31"}}
    change()
    return freshness.remark(result, root)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# a number", "# another number"),
        ("Twice.", "Two times."),
        ("'''A module.'''\n", ""),
        ("2 * x", "(2   *   x)"),
        ("return", "\n\n    return"),
    ],
)
def test_words_and_formatting_do_not_count(root, old, new):
    path = root / "code" / "one.py"
    assert remark(root, change=lambda: path.write_text(CODE.replace(old, new))) is None


def test_a_moved_file_does_not_count(root):
    (root / "code" / "deep").mkdir()
    assert remark(root, change=lambda: (root / "code" / "one.py").rename(root / "code" / "deep" / "two.py")) is None


@pytest.mark.parametrize(("old", "new"), [("2 * x", "3 * x"), ("double(x)", "double(x, y=None)"), ("return", "yield")])
def test_what_code_does_counts(root, old, new):
    path = root / "code" / "one.py"
    told = remark(root, change=lambda: path.write_text(CODE.replace(old, new)))
    assert told == "**Measured on 2026-01-31 (commit abc1234): the code that it measures has changed since.**"


def test_added_removed_and_forgotten_files_count(root):
    one = root / "code" / "one.py"
    assert remark(root, change=lambda: (root / "code" / "two.py").write_text("x = 1\n")) is not None
    assert remark(root, change=one.unlink) is not None
    result = {"measures": {"sources": ["code/*.py"], "fingerprint": None, "commit": None, "date": "2026-01-31"}}
    assert freshness.remark(result, root) == "**Measured on 2026-01-31: the code that it measures has changed since.**"


def test_other_files_do_not_count(root):
    assert remark(root, change=lambda: (root / "other.py").write_text("x = 1\n")) is None


def test_files_that_no_benchmark_runs_do_not_count(root):
    path = root / freshness.NOT_MEASURED[0]
    path.parent.mkdir(parents=True)
    assert remark(root, ("plugin/**/*.py", "code/*.py"), change=lambda: path.write_text("x = 1\n")) is None
    assert all((ROOT / path).is_file() for path in freshness.NOT_MEASURED)


@pytest.mark.parametrize("name", CASES)
def test_each_case_names_code_that_there_is(name):
    sources = importlib.import_module(name).CASE.sources
    assert sources
    assert all(list(ROOT.glob(glob)) for glob in sources)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_each_record_says_what_it_measures_and_its_page_whether_that_is_still_so(path):
    result = json.loads(path.read_text(encoding="utf-8"))
    case = importlib.import_module(result["benchmark"]).CASE
    assert case.record_name(result) == path.stem
    assert set(result["measures"]) == {"sources", "fingerprint", "commit", "date"}
    told = freshness.remark(result)
    texts = Measured(case.name).parts_of({path.stem: result}).values()
    assert any(told in text for text in texts) if told else not any("has changed since" in text for text in texts)


def test_fingerprints_are_those_of_other_versions_too():
    # Fields that only later versions of Python have are empty where nothing of them is used.
    assert freshness._shape(freshness.ast.parse("def f(): pass")) == (
        "Module",
        [
            (
                "body",
                [("FunctionDef", [("args", ("arguments", [])), ("body", [("Pass", [])]), ("name", "'f'")])],
            )
        ],
    )
