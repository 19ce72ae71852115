"""The cost of a layout: times of kernels and collectives, memory by kind, and the step time that they add up to."""
