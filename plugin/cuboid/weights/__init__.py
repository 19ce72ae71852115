"""Load and save Hugging Face checkpoints with sharded models, and the checkpoints of training runs."""
