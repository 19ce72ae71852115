"""Layers of PEFT's adapters over sharded ones, a file for each kind."""
