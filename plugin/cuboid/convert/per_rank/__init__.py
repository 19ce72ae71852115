"""Checkpoints that are sharded ahead of time, one file per rank."""
