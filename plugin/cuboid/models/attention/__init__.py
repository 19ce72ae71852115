"""Hugging Face's attention and mask interfaces for sharded heads and for segments of a sequence."""
