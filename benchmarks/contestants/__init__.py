"""Who and what the cases compare."""
