"""Causal attention of a segment to itself and to the segments before it, through a KV cache."""
