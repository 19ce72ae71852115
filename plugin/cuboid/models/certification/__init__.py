"""Find out by running it whether an architecture is right when it is cut into stages and segments, or over a mesh.

:mod:`~cuboid.models.certification.small_config` shrinks a config but keeps everything that decides which code runs,
:mod:`~cuboid.models.certification.sides` runs the architecture's own class whole and split, in float64,
:mod:`~cuboid.models.certification.check` and ``mesh_check`` compare the two on all kinds of micro-batches, and
:mod:`~cuboid.models.certification.certificates` stores the results.
"""
