"""The ready-made training job behind ``cuboid prepare`` and ``cuboid train``.

It makes the model and the engine as any other script would, with ``import cuboid`` and ``deepspeed.initialize``. Other
modules of Cuboid serve to check arguments and checkpoints before that, and to make ranks fail together.
"""
