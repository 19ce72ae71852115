"""The site has every page once, by what its readers want."""

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_every_page_is_in_one_part_of_the_site():
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    parts = re.findall(r"```\{toctree\}\n:caption: (.+)\n((?:\w+\n)+)```", index)
    listed = [page for _, pages in parts for page in pages.split()]
    assert [name for name, _ in parts] == ["Tutorials", "How to", "Reference", "Explanations", "Benchmarks"]
    assert sorted(listed) == sorted(page.stem for page in DOCS.glob("*.md") if page.name != "index.md")
