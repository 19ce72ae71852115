"""``python -m cuboid.cli``: how launchers start the command."""

from cuboid.cli import app

app()
