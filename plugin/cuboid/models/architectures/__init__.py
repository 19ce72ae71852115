"""Roles of an architecture's modules, the supported tasks, and what an architecture was certified for."""
