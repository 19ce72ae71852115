"""What makes each generated part of the pages, and their pictures. A module has `parts`, `draw` or both."""

import sys
from pathlib import Path

# Tables and pictures of measurements are made by the cases there.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
