"""Micro-batches: checks them, broadcasts them to the ranks of a replica, and cuts out each rank's part."""
