"""What a step costs, before it is run: formulas of bytes, estimates of time and memory, the search for a layout."""
