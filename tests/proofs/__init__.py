"""What stands in for CUDA and NCCL where there is no GPU: worlds of many ranks, recorders, and groups that misbehave."""
