"""Predict what a step costs before it runs: byte formulas, time and memory estimates, and the search for a layout."""
