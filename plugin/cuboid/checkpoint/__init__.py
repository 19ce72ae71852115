"""The format of checkpoints, and how ranks write and read them together. Knows torch only, no framework."""
