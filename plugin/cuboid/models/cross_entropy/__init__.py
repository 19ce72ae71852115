"""The loss of a causal language model in chunks, without all of its logits in memory."""
