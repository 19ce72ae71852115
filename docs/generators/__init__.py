"""What makes each generated part of the pages, the tables in docs/data, and pictures.

A module has `parts` (texts in pages), `files` (whole files), `draw`, or several of them.
"""

import sys
from pathlib import Path

# Tables and pictures of measurements are made by the cases there.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
