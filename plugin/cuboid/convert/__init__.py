"""Convert Cuboid's, Hugging Face, per-rank and DeepSpeed checkpoints to Hugging Face or per-rank files, in a stream."""
