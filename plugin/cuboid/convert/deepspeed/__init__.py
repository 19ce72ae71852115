"""Read the weights from checkpoints that DeepSpeed itself writes."""
