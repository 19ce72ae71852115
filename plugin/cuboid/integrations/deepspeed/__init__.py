"""DeepSpeed engines for sharded models and pipelines, and their checkpoints."""
