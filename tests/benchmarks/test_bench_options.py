"""What all cases of the benchmarks have in common on the command line, and how their tables look."""

import importlib
import sys

import pytest

from launching import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
sys.path.insert(0, str(ROOT / "docs"))

import generate
from generators.measured import SHOWN
from harness.tables import Column, Table, ranged
from run import CASES, SHAPED

cases = pytest.mark.parametrize("name", CASES)


def case_of(name):
    return importlib.import_module(name).CASE


def test_every_case_has_its_part_of_the_pages():
    assert set(generate.MEASURED) == set(SHOWN) == set(CASES)
    for name in CASES:
        assert case_of(name).name == name


@cases
def test_options_that_all_cases_have(name):
    case = case_of(name)
    args = case.parse(["--rounds", "3", "--limit", "7", "--out", "somewhere"])
    assert (args.repeats, args.limit, str(args.out)) == (3, 7.0, "somewhere")
    args = case.parse(["--quick", "--repeats", "3"])
    assert (args.repeats, args.limit) == (1, 0.0)
    assert case.parse([]).network == "loopback"
    assert (name in SHAPED) == ("shaped" in case.networks)


@cases
@pytest.mark.parametrize("options", [["--repeats", "0"], ["--network", "token-ring"], ["--rate-mbit", "10"]])
def test_what_makes_no_sense_is_refused(name, options, capsys):
    with pytest.raises(SystemExit) as ended:
        case_of(name).parse(options)
    assert ended.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_one_table_for_pages_and_console():
    numbers = {"median": 1.234, "low": 1.0, "high": 2.0}
    columns = [
        Column("`name`", lambda row: f"`{row['name']}`", "l"),
        Column("a|b", lambda row: f"**{ranged(row['numbers'])}**"),
    ]
    table = Table(columns, [{"name": "one", "numbers": numbers}, {"name": "two", "numbers": None}])
    assert table.markdown().splitlines() == [
        "| `name` | a\\|b |",
        "| --- | ---: |",
        "| `one` | **1.23 (1.00–2.00)** |",
        "| `two` | **–** |",
    ]
    assert table.text().splitlines() == ["name  a|b", "one   1.23 (1.00–2.00)", "two   –"]


def test_a_page_has_what_people_compare_and_a_file_has_all():
    columns = [
        Column("`name`", lambda row: f"`{row['name']}`", "l"),
        Column("step, s", lambda row: f"**{row['step_s']}**"),
        Column("error", lambda row: row["error"], on_page=False),
    ]
    rows = [{"name": name, "step_s": step_s, "error": "1e-7"} for name, step_s in (("one", 1.5), ("two", 2.5))]
    table = Table(columns, rows, file="_steps", page_rows=rows[1:])
    assert table.for_page().markdown().splitlines() == ["| `name` | step, s |", "| --- | ---: |", "| `two` | **2.5** |"]
    assert table.plain_cells() == [["name", "step, s", "error"], ["one", "1.5", "1e-7"], ["two", "2.5", "1e-7"]]
