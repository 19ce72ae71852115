"""Is an architecture right when it is cut into stages and segments? Known because it was run, not because it looks so.

:mod:`~cuboid.models.certification.small_config` makes a config small but keeps all that decides which code runs,
:mod:`~cuboid.models.certification.check` compares the architecture's own class with itself cut, in float64, and
:mod:`~cuboid.models.certification.certificates` remembers what came of it.
"""
