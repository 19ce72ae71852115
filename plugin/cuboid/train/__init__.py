"""The ready-made training job behind ``cuboid prepare`` and ``cuboid train``.

It is a user of Cuboid like any other: it calls what ``import cuboid`` offers and, to find a run that it can go on with,
:mod:`cuboid.checkpoint`.
"""
