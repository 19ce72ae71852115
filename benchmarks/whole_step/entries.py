"""Who takes part: Cuboid on several meshes, and what else trains the same model on as many processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import LlamaForCausalLM

from cuboid.config.schema import suggestion
from cuboid.distributed.topology import MeshShape
from cuboid.errors import CuboidError
from whole_step.workload import AUTO, RANKS, StepWorkload

Family = Literal["cuboid", "autotp", "tp_plan", "fsdp2"]


@dataclass(frozen=True)
class Entry:
    """One contestant.

    Args:
        key: what the command line and the records call it.
        name: for people.
        family: whose layouts it is one of.
        mesh: Cuboid's, or ``"auto"``.
        tensor_parallel: ranks that share a layer (AutoTP, ``tp_plan``); the others are replicas of them.
        split_head: whether AutoTP splits the LM head by vocabulary and computes the loss so.
        reshard: whether Cuboid or FSDP2 frees a layer's weights between its forward and its backward.
    """

    key: str
    name: str
    family: Family
    mesh: str = ""
    tensor_parallel: int = 1
    split_head: bool = False
    reshard: bool = True


def _autotp(size: int, *, split_head: bool) -> Entry:
    replicas = RANKS // size
    layout = f"TP {size}" + (f" × DP {replicas}" if replicas > 1 else "")
    head = ", head split" if split_head else ""
    key = f"autotp-{size}" + ("-head" if split_head else "")
    return Entry(key, f"DeepSpeed AutoTP, {layout}{head}", "autotp", tensor_parallel=size, split_head=split_head)


#: Ends the key of a mesh whose gathered weights are kept for the step.
_KEPT = "-kept"
_PEERS = [
    *(_autotp(size, split_head=split_head) for size in (8, 4, 2) for split_head in (False, True)),
    Entry("tp-plan", "Transformers tp_plan, TP 8", "tp_plan", tensor_parallel=RANKS),
    Entry("fsdp2", "FSDP2, weights freed", "fsdp2"),
    Entry("fsdp2-keep", "FSDP2, weights kept", "fsdp2", reshard=False),
]
_MESHES = ["1x8x1", "1x4x2", "2x2x2", "8x1x1", f"8x1x1{_KEPT}", AUTO, f"{AUTO}{_KEPT}"]
DEFAULT = [f"cuboid-{mesh}" for mesh in _MESHES] + [entry.key for entry in _PEERS]
AUTO_KEY = f"cuboid-{AUTO}"


def find(keys: Sequence[str], workload: StepWorkload, model: LlamaForCausalLM) -> list[Entry]:
    """The contestants of these names, each mesh only once: as ``"auto"`` where the automatic choice is one of them.

    Args:
        keys: ``"cuboid-2x2x2"`` for any mesh, ``"cuboid-auto"``, both perhaps with ``"-kept"`` behind them, and those
            of the others in :data:`DEFAULT`. A mesh of fewer ranks has replicas.

    Raises:
        CuboidError: there is no such contestant, or the mesh can't cut this model among so many ranks.
    """
    peers = {entry.key: entry for entry in _PEERS}
    chosen: dict[object, Entry] = {}
    for key in keys:
        if key in peers:
            chosen[key] = peers[key]
            continue
        entry, shape = _mesh(key, workload, model)
        if entry.mesh == AUTO or (shape, entry.reshard) not in chosen:
            chosen[shape, entry.reshard] = entry
    return list(chosen.values())


def _mesh(key: str, workload: StepWorkload, model: LlamaForCausalLM) -> tuple[Entry, MeshShape]:
    family, _, mesh = key.partition("-")
    if family != "cuboid":
        raise CuboidError(f"there is no contestant {key}; {suggestion(key, DEFAULT)}")
    reshard = not mesh.endswith(_KEPT)
    mesh = mesh.removesuffix(_KEPT)
    shape = workload.shape(mesh, model, reshard=reshard)
    if RANKS % shape.size:
        raise CuboidError(f"contestant {key}: mesh {shape} has {shape.size} ranks, which don't divide {RANKS}")
    replicas = f" × DP {RANKS // shape.size}" if shape.size < RANKS else ""
    kept = "" if reshard else ", weights kept"
    name = f"Cuboid, {shape}{replicas}{kept}" + (" (auto)" if mesh == AUTO else "")
    return Entry(key, name, "cuboid", mesh=mesh, reshard=reshard), shape
