"""Layers as one graph of torch.compile: with collectives in it, and with blocks that are unsharded outside of it."""
