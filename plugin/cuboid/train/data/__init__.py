"""Text to tokens to micro-batches, and the tokenizer and model of a fresh start."""
