"""Mistakes that could be made in Cuboid, each of which can be put into the processes of a verification.

A mutation changes the sharded side only: plain transformers runs in the same processes, before and after.
"""

from mutations.reported import REPORTED
from mutations.seeded import SEEDED

MUTATIONS = (*REPORTED, *SEEDED)
BY_NAME = {mutation.name: mutation for mutation in MUTATIONS}
