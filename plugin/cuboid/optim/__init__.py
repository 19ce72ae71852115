"""Data parallelism: gradient reduction over replicas, gradient norm, ZeRO-1 and the optimizer's step.

Used where the framework leaves these to Cuboid (ColossalAI). DeepSpeed does them in its own optimizers.
"""
