"""Checkpoints from one form into another, streaming: Hugging Face folders, per-rank files, DeepSpeed's pickles."""
