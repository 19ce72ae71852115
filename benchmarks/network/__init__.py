"""Ranks on a network of a known rate, on one machine: what :mod:`layer_meshes` and other benchmarks measure on."""
