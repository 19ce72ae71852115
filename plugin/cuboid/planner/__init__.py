"""Closed formulas of bytes and memory, and the search for the mesh that moves the fewest bytes."""
