"""What DeepSpeed is handed for sharded models and pipelines."""
