"""What stands in for CUDA and NCCL where there is no GPU: worlds of many ranks, recorders, groups that misbehave."""
