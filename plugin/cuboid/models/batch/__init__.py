"""Micro-batches: checked, broadcast to the ranks of a replica, and cut to each rank's part."""
