"""The ways to bring a checkpoint onto ranks: Cuboid's two, and three that everybody can use; and what a process that
loads is seen to hold and to read (Linux)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
import torch.distributed as dist
from harness.llama import Llama
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

import cuboid
from cuboid.distributed.topology import MeshShape

_DTYPE = torch.float32
_OWN = Path("/proc/self")
_SAMPLE_S = 0.01


# --- ways ---


@dataclass(frozen=True)
class Way:
    """One way to load.

    Args:
        name: of the table's row.
        load: gives the model, given the checkpoint.
        owned: whether every number of the model has one owner among the ranks.
        everywhere: whether every rank holds the whole model at some time.
    """

    name: str
    load: Callable[[Path], PreTrainedModel]
    owned: bool = True
    everywhere: bool = False


def ways(ranks: int) -> list[Way]:
    """All ways on so many ranks; the first one is what others are compared with."""

    def config(mesh: str) -> dict[str, object]:
        return {"tensor_parallel": Llama().section(mesh, ranks)}

    cube = {1: "1x1x1", 4: "1x2x2", 8: "2x2x2"}[ranks]

    def ours(mesh: str) -> Way:
        name = f"Cuboid {MeshShape.parse(mesh)}"
        return Way(name, lambda path: cuboid.from_pretrained(path, config(mesh), dtype=_DTYPE))

    return [
        ours(cube),
        ours(f"{ranks}x1x1"),
        Way("whole, then cuboid.shard", lambda path: cuboid.shard(plain(path), config(cube)), everywhere=True),
        Way('transformers, tp_plan="auto"', _tensor_parallel, owned=False),
        Way("FSDP2, broadcast from rank 0", _fsdp),
    ]


def plain(path: Path) -> PreTrainedModel:
    """The whole model."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=_DTYPE)


def _tensor_parallel(path: Path) -> PreTrainedModel:
    plan = DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto")
    return AutoModelForCausalLM.from_pretrained(path, dtype=_DTYPE, distributed_config=plan)


def _fsdp(path: Path) -> PreTrainedModel:
    """As PyTorch's tutorial has it: rank 0 has the whole state, and broadcasts it tensor by tensor."""
    state = plain(path).state_dict() if dist.get_rank() == 0 else {}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=_DTYPE)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    # Buffers that no checkpoint has: the frequencies of the rotary embedding.
    rotary = model.model.rotary_emb
    for name, buffer in type(rotary)(model.config).named_buffers():
        setattr(rotary, name, buffer)
    return model


def loss_and_norm(model: PreTrainedModel, ids: torch.Tensor, *, owned: bool = True) -> tuple[float, float]:
    """Loss of a batch that all ranks have, and the norm of its gradient; see :class:`Way`. Collective."""
    loss = model.train()(input_ids=ids, labels=ids).loss
    loss.backward()
    squares = torch.zeros((), dtype=torch.float64)
    for parameter in model.parameters():
        gradient = parameter.grad
        assert gradient is not None
        if isinstance(gradient, DTensor):
            gradient = gradient.to_local() if owned else gradient.full_tensor()
        squares += gradient.double().square().sum()
    if owned and dist.get_world_size() > 1:
        dist.all_reduce(squares)
    return loss.item(), squares.sqrt().item()


# --- footprints ---


@dataclass(frozen=True)
class Footprint:
    """Of a process that loaded a model.

    Args:
        floor_bytes: what it had in memory before: PyTorch, transformers, everything imported.
        peak_bytes: the most that it had in memory at a time, files that it mapped included.
        peak_files_bytes: the most pages of files that it mapped, beyond those from before; sampled.
        proportional_bytes: what it holds afterwards, where each page that several processes share counts in parts.
    """

    floor_bytes: int
    peak_bytes: int
    peak_files_bytes: int
    proportional_bytes: int


class Watched:
    """Inside a ``with`` block, the footprint of this process is watched; afterwards :attr:`footprint` has it."""

    footprint: Footprint

    def __enter__(self) -> Watched:
        # The peak starts again at what the process has now.
        (_OWN / "clear_refs").write_text("5", encoding="ascii")
        self._before = _numbers(_OWN / "status")
        self._files = self._before["RssFile"]
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()
        self.footprint = Footprint(
            floor_bytes=self._before["VmRSS"],
            peak_bytes=_numbers(_OWN / "status")["VmHWM"],
            peak_files_bytes=self._files - self._before["RssFile"],
            proportional_bytes=_numbers(_OWN / "smaps_rollup")["Pss"],
        )

    def _sample(self) -> None:
        while not self._end.wait(_SAMPLE_S):
            self._files = max(self._files, _numbers(_OWN / "status")["RssFile"])


def _numbers(path: Path) -> dict[str, int]:
    """Lines ``Name: number`` or ``Name: number kB``, in bytes."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        number, _, unit = value.strip().partition(" ")
        if number.isdigit():
            found[name] = int(number) * (1024 if unit == "kB" else 1)
    return found


# --- ranks ---


class Load(NamedTuple):
    """What one rank saw of a load.

    Args:
        duration_s: until its model was there, and each weight had been read once.
        computing_s: processor time meanwhile.
        all_computing_s: with that of meeting the others before and of looking at the memory afterwards, which can take
            as long as a load.
        footprint: its memory.
    """

    duration_s: float
    computing_s: float
    all_computing_s: float
    footprint: Footprint


class LoadingRank:
    """What a rank keeps, for one load.

    Args:
        checkpoint: its folder.
        ids: a batch by which to see whether everything was loaded, and rightly.
        name: of the way; None for plain transformers in one process.
    """

    def __init__(self, checkpoint: Path, ids: torch.Tensor, name: str | None) -> None:
        self._checkpoint, self._ids = checkpoint, ids
        own = next((way for way in ways(dist.get_world_size()) if way.name == name), None)
        self._way = own or Way("plain transformers", plain)
        self._model: PreTrainedModel | None = None

    def load(self) -> Load:
        """Load, and read every weight of this rank once: of a mapped file nothing has been read before that."""
        begin_s = time.process_time()
        dist.barrier()
        computing_s, start_s = time.process_time(), time.perf_counter()
        with Watched() as watched:
            self._model = self._way.load(self._checkpoint)
            for parameter in self._model.parameters():
                weight = parameter.detach()
                (weight.to_local() if isinstance(weight, DTensor) else weight).sum()
            duration_s, computing_s = time.perf_counter() - start_s, time.process_time() - computing_s
            # Until then, what the last one broadcasts isn't done.
            dist.barrier()
        return Load(duration_s, computing_s, time.process_time() - begin_s, watched.footprint)

    def check(self) -> tuple[float, float]:
        """Loss and gradient norm of the model, which is loaded if it isn't yet."""
        model = self._way.load(self._checkpoint) if self._model is None else self._model
        return loss_and_norm(model, self._ids, owned=self._way.owned)
