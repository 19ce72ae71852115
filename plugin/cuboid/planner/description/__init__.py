"""Inputs of the planner: a model, read from its config or its modules, and a cluster, from its name or a profile."""
