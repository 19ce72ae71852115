"""Sharded parameters: who holds which elements, how they are unsharded, and how gradients are reduced."""
