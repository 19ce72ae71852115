"""The ready-made training job behind ``cuboid prepare`` and ``cuboid train``.

It uses Cuboid as any other script would, through what ``import cuboid`` offers; and :mod:`cuboid.checkpoint`, to find a
run to resume.
"""
