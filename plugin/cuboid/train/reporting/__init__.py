"""A run's output: progress, memory, the loss curve and ``report.json``."""
