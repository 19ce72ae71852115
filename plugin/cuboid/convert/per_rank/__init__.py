"""Checkpoints that are cut beforehand, a file for each rank."""
