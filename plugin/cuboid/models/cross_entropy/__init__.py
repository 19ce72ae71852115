"""The loss of a causal language model without all of its logits in memory."""
