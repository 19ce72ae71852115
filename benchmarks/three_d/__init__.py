"""Colossal-AI's 3-D layers and Cuboid, for the same block."""
