"""The site has every page once, by what its readers want."""

import csv
import re
import sys

from launching import ROOT

sys.path.insert(0, str(ROOT / "docs"))

from generators import errors

DOCS = ROOT / "docs"


def test_every_page_is_in_one_part_of_the_site():
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    parts = re.findall(r"```\{toctree\}\n:caption: (.+)\n:maxdepth: 1\n((?:[\w/]+\n)+)```", index)
    listed = [page for _, pages in parts for page in pages.split()]
    assert [name for name, _ in parts] == ["Tutorials", "How to", "Reference", "Explanations", "Benchmarks"]
    there = [page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.rglob("*.md")]
    assert sorted([*listed, "index"]) == sorted(there)


def test_the_list_of_errors_has_them_as_they_are_worded():
    by_text = {message.text: message for message in errors.messages()}
    assert by_text["…: has no tensor …, which … says it has"].error == "CheckpointError"
    assert len({message.area for message in by_text.values()}) > 8
    # What Markdown would take for marks is shown as it stands.
    listed = errors.listed()
    assert "\\_" in listed
    assert all(text == " ".join(text.split()) for text in re.findall(r"^\* (.*)$", listed, re.MULTILINE))


def test_the_page_of_architectures_explains_the_columns_of_its_table():
    page = (DOCS / "architectures.md").read_text(encoding="utf-8")
    explained = page.partition("```{architectures}")[2].partition("## ")[0]
    with (DOCS / "data" / "architectures.csv").open(encoding="utf-8", newline="") as lines:
        columns = next(csv.reader(lines))
    assert columns[:3] == ["architecture", "variant", "task"]
    for column in columns[3:]:
        assert re.search(rf"^\| ([^|]*, )?{column}(,[^|]*)? \|", explained, re.MULTILINE), column
