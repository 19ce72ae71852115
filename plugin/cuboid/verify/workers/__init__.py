"""A pool of local processes, each one rank of a small ``torch.distributed`` world."""
