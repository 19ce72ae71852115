"""What the replicas of a mesh do together: the sum of their gradients, its norm, and the optimizer's step.

For frameworks that leave it to Cuboid. DeepSpeed has all of it in its own optimizers.
"""
