"""The site: Sphinx over these pages, which read the same on GitHub. `make site` builds it; warnings are errors."""

import csv
import sys
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from pygments.lexers.data import JsonLexer
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

sys.path.insert(0, str(Path(__file__).parent))
from generators import errors

project = "Cuboid"
extensions = ["myst_parser"]
#: As many levels as GitHub has, so that links to headings hold in both.
myst_heading_anchors = 4
html_theme = "furo"
html_title = "Cuboid"
html_show_copyright = False
html_static_path = ["site"]
html_js_files = ["pages.js"]
html_css_files = ["pages.css"]
exclude_patterns = ["examples", "generators", "data", "figures", "site"]


def setup(app: Sphinx) -> None:
    """Make known the comments of JSON, the list of errors, the table of architectures, and links to folders."""
    app.add_lexer("jsonc", JsonLexer)
    app.add_directive("errors", Errors)
    app.add_directive("architectures", Architectures)
    app.connect("doctree-read", show_folders)


class Errors(SphinxDirective):
    """The errors of the package's source, which would be out of date in a page after each change of a message."""

    def run(self) -> list[nodes.Node]:
        """The list, with a heading for each package."""
        place = nodes.section()
        place.document = self.state.document
        self.state.nested_parse(StringList(errors.listed().splitlines(), "errors"), 0, place, match_titles=True)
        return place.children


class Architectures(SphinxDirective):
    """All rows of data/architectures.csv, as a table that the page's script sorts; GitHub shows the file itself so."""

    def run(self) -> list[nodes.Node]:
        """The table."""
        rows = Path(self.env.srcdir, "data", "architectures.csv")
        self.env.note_dependency(str(rows))
        with rows.open(encoding="utf-8", newline="") as lines:
            header, *body = csv.reader(lines)
        group = nodes.tgroup("", *(nodes.colspec(colwidth=1) for _ in header), cols=len(header))
        group += nodes.thead("", _row(header))
        group += nodes.tbody("", *(_row(row) for row in body))
        return [nodes.container("", nodes.table("", group), classes=["sortable"])]


def _row(cells: list[str]) -> nodes.row:
    return nodes.row("", *(nodes.entry("", nodes.paragraph(text=cell)) for cell in cells))


def show_folders(app: Sphinx, page: nodes.document) -> None:
    """Make links to folders of the repository their text: the site has no page of them, while GitHub has."""
    for link in list(page.findall(pending_xref)):
        if Path(app.srcdir, link["refdoc"]).parent.joinpath(link["reftarget"]).is_dir():
            link.replace_self(link.children)
