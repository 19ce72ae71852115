"""Find out by running it whether an architecture is right when it is cut into stages and segments, or over a mesh.

:mod:`~cuboid.models.certification.small_config` shrinks a config but keeps everything that decides which code runs,
:mod:`~cuboid.models.certification.check` compares the architecture's own class with itself cut, in float64, and
:mod:`~cuboid.models.certification.certificates` stores the results.
"""
