"""What a layout costs: time of kernels and collectives, memory by kind, and the step that they add up to."""
