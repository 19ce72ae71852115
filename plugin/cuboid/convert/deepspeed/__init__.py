"""Weights out of the checkpoints that DeepSpeed itself writes."""
