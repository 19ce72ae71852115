"""Routers of mixtures of experts: their logits and their loss, on a mesh and over stages."""
