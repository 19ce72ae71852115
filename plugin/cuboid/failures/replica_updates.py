"""Which optimizer step each replica has begun: shows whose data ended first, when replicas wait for one another."""

from __future__ import annotations

from cuboid.distributed.mesh import Mesh
from cuboid.failures.bounded_store import BoundedStore

#: Advice for replicas with data of different lengths.
EQUAL_SHARES = (
    "All replicas must be given equally many batches: drop_last=True in the data loader, and a sampler that shares the "
    "data by cuboid.mesh_of(model).coordinate.data out of cuboid.mesh_of(model).topology.data"
)


class ReplicaUpdates:
    """The replicas' steps, which one rank of each records in the store without waiting."""

    def __init__(self, store: BoundedStore) -> None:
        self._store = store
        self._replica, self._replicas = 0, 1
        #: The last optimizer step that this replica has begun.
        self._begun = 0

    def begin(self, mesh: Mesh, number: int) -> None:
        """Record that this replica begins an optimizer step."""
        self._replica, self._replicas, self._begun = mesh.coordinate.data, mesh.topology.data, number
        if mesh.rank == mesh.copy_ranks[0]:
            self._store.post(f"update/{self._replica}", str(number))

    def behind(self) -> str:
        """A clause about the other replicas that haven't begun this one's step; empty if all have."""
        begun = self._begun_by_others()
        others = [replica for replica in range(self._replicas) if replica != self._replica]
        behind = [replica for replica in others if begun.get(replica, 0) < self._begun]
        if not behind:
            return ""
        return (
            f": replica {', '.join(map(str, behind))} of {self._replicas} had made {begun.get(behind[0], 0)} optimizer "
            f"steps, this is step {self._begun}. {EQUAL_SHARES}"
        )

    def ahead(self, what: str) -> str | None:
        """The message if another replica is still training while this one waits for it in ``what``; else None."""
        ahead = [(step, replica) for replica, step in self._begun_by_others().items() if step > self._begun]
        if not ahead:
            return None
        step, replica = max(ahead)
        return (
            f"replica {self._replica} of {self._replicas} made {self._begun} optimizer steps and went on to {what}, "
            f"but replica {replica} is in step {step}: its data is longer. {EQUAL_SHARES}"
        )

    def _begun_by_others(self) -> dict[int, int]:
        """By replica, the last optimizer step that each other one has begun, if any."""
        keys = {replica: f"update/{replica}" for replica in range(self._replicas) if replica != self._replica}
        return {replica: int(self._store.get(key)) for replica, key in keys.items() if self._store.check(key)}
