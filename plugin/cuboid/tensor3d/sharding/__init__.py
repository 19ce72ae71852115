"""Sharded parameters: which rank owns which elements, how they are unsharded, and how gradients are reduced."""
