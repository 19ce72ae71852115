"""The site: Sphinx over these pages, which read the same on GitHub. `make site` builds it; warnings are errors."""

from pathlib import Path

from docutils import nodes
from pygments.lexers.data import JsonLexer
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

project = "Cuboid"
extensions = ["myst_parser"]
#: As many levels as GitHub has, so that links to headings hold in both.
myst_heading_anchors = 4
html_theme = "furo"
html_title = "Cuboid"
exclude_patterns = ["examples", "generators", "data", "figures"]


def setup(app: Sphinx) -> None:
    """Make known the comments of JSON, and links to folders."""
    app.add_lexer("jsonc", JsonLexer)
    app.connect("doctree-read", show_folders)


def show_folders(app: Sphinx, page: nodes.document) -> None:
    """Make links to folders of the repository their text: the site has no page of them, while GitHub has."""
    for link in list(page.findall(pending_xref)):
        if Path(app.srcdir, link["refdoc"]).parent.joinpath(link["reftarget"]).is_dir():
            link.replace_self(link.children)
