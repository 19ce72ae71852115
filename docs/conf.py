"""The site: Sphinx over these pages. python -m sphinx -W --keep-going -n docs build/site"""

from pygments.lexers.data import JsonLexer
from sphinx.application import Sphinx

project = "Cuboid"
extensions = ["myst_parser"]
#: As many as GitHub makes, so that links into pages hold in both.
myst_heading_anchors = 4
html_theme = "furo"
exclude_patterns = ["examples", "generators", "data", "figures"]
# Links into the sources, which aren't part of the site.
suppress_warnings = ["myst.xref_missing"]


def setup(app: Sphinx) -> None:
    """Make the comments of JSON known."""
    app.add_lexer("jsonc", JsonLexer)
