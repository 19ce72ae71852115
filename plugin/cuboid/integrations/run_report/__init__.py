"""``report.json`` and ``loss.png``: a finished run of the Trainer, or of ``cuboid train``."""
