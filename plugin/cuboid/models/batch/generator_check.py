"""Compares the random number generators of a mesh's ranks, which have to agree where ranks draw the same numbers."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Sequence
from typing import Literal

import numpy as np
import torch

from cuboid.distributed.axis_collectives import all_gather
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import AXES
from cuboid.errors import CuboidError

#: Whose generator is drawn from.
Library = Literal["torch", "numpy", "random"]


def generator_numbers(libraries: Collection[Library]) -> tuple[int, int]:
    """A checksum of this rank's generators on the host, in 64 bits, and the seed of torch's for messages.

    Seeds of devices' generators are drawn from the host's, so nothing waits for a device.
    """
    digest = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=8)
    if "numpy" in libraries:
        digest.update(repr(np.random.get_state(legacy=False)["state"]).encode())
    if "random" in libraries:
        digest.update(repr(random.getstate()).encode())
    seed = torch.initial_seed()
    return int.from_bytes(digest.digest(), "big", signed=True), seed - 2**64 if seed >= 2**63 else seed


def shared_number(states: Sequence[Sequence[int]]) -> int | None:
    """Of all ranks' :func:`generator_numbers`: one of the first rank's, from 0 to 2^61; None if the ranks agree."""
    checksums = [checksum for checksum, _ in states]
    return None if len(set(checksums)) == 1 else checksums[0] % 2**61


def generators_differ(states: Sequence[Sequence[int]], mesh: Mesh) -> CuboidError:
    """The error about generators that differ, given all ranks' :func:`generator_numbers`."""
    other = next(index for index, (checksum, _) in enumerate(states) if checksum != states[0][0])
    (_, first_seed), (_, seed) = states[0], states[other]
    ranks = mesh.mesh_ranks
    how = (
        f"rank {ranks[0]}'s seed is {first_seed % 2**64} and rank {ranks[other]}'s {seed % 2**64}"
        if seed != first_seed
        else f"ranks {ranks[0]} and {ranks[other]} both have the seed {seed % 2**64}, but have drawn differently since"
    )
    return CuboidError(
        f"the ranks of a mesh {mesh.shape} must draw the same random numbers for what several of them compute whole, "
        f"and their generators differ: {how}. Call torch.manual_seed with the same number on all of them, such as "
        "seed + cuboid.mesh_of(model).coordinate.data, not seed + rank: parts of a tensor get different numbers anyway"
    )


class StepGenerators:
    """Compares generators in a step of a pipeline, at the first draw that needs it, by a collective of the mesh."""

    def __init__(self, mesh: Mesh, device: torch.device, libraries: Collection[Library]) -> None:
        self._mesh, self._device, self._libraries = mesh, device, libraries
        self._states: Sequence[Sequence[int]] | None = None

    def number_if_differing(self) -> int | None:
        """See :class:`cuboid.tensor3d.layers.dropout.Generators`."""
        if self._mesh.in_threads:
            # The ranks are threads of one process, which has one generator.
            return None
        if self._states is None:
            numbers = torch.tensor(generator_numbers(self._libraries), device=self._device)
            self._states = all_gather(numbers, self._mesh.along(*AXES)).tolist()
        return shared_number(self._states)

    def require_equal(self) -> None:
        """See :class:`cuboid.tensor3d.layers.dropout.Generators`."""
        if self.number_if_differing() is not None:
            assert self._states is not None
            raise generators_differ(self._states, self._mesh)
