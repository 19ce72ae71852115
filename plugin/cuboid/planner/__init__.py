"""Closed formulas for communication and memory, and the search for the mesh with the least communication."""
