"""Mixtures of experts on a mesh: which rows go to which expert, the products, the layer, and the router."""
