"""What a run tells: progress, figures, the loss curve and ``report.json``."""
