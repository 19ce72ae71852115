"""A pool of local processes, each of which is one rank of a small ``torch.distributed`` world."""
