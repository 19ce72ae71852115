"""Hugging Face checkpoints in and out of sharded models, and the checkpoints of training."""
