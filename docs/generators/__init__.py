"""What makes each generated part of the pages, and their pictures. A module has `parts`, `draw` or both."""
