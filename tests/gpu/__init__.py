"""Checks that need a GPU, for ``make gpu``, which writes docs/gpu.md from one run of them. Each can run alone."""
