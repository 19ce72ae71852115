"""What the planner is told: a model by its config, and a cluster by its name or profile."""
