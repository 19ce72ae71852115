"""Who trains the same model on 8 processes: Cuboid's meshes, DeepSpeed's AutoTP, Transformers' tp_plan, and FSDP2."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.utils import clip_grad_norm_ as deepspeed_clip_grad_norm_
from deepspeed.utils import groups
from harness.llama import AUTO, Llama
from network.serving import Contestant
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from transformers import LlamaForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

import cuboid
from cuboid.config.schema import suggestion
from cuboid.distributed.topology import MeshShape, Topology
from cuboid.errors import CuboidError
from cuboid.planner.comm_formula import layer_bytes
from cuboid.planner.mesh_search import block_sizes

#: All contestants' processes; the global batch has a row for each, so that every layout can share it out.
RANKS = 8
#: What a user would write; a step's time doesn't depend on it.
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
#: Below the first gradient's norm, so that clipping has something to do.
CLIP = 0.1
#: Ends the key of a mesh whose gathered weights are kept for the step.
_KEPT = "-kept"
Family = Literal["cuboid", "autotp", "tp_plan", "fsdp2"]


# --- who there is ---


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

    @property
    def gathers(self) -> Literal["layer", "step"]:
        """Cuboid's ``weight_gather``."""
        return "layer" if self.reshard else "step"

    def shape(self, workload: Llama, model: LlamaForCausalLM) -> MeshShape:
        """Cuboid's mesh."""
        return workload.shape(self.mesh, RANKS, model, weight_gather=self.gathers)

    def formula_bytes(self, workload: Llama, model: LlamaForCausalLM) -> int | None:
        """What a rank sends by theory: for Cuboid in all layers, without embedding, head, loss and what replicas of the
        mesh exchange; for FSDP2 all that collectives of the fewest bytes would send, two gathers of each weight (one,
        if weights are kept) and the scatter of its gradient; None for others."""
        element_bytes = 2 if workload.dtype == "bfloat16" else 4
        if self.family == "cuboid":
            mesh = self.shape(workload, model)
            rows = workload.batch * mesh.size // RANKS
            options: dict[str, Any] = {"element_bytes": element_bytes, "weight_gather": self.gathers}
            return workload.layers * sum(
                layer_bytes(block_sizes(model, mesh), mesh, rows, workload.length, **options).values()
            )
        if self.family == "fsdp2":
            whole_bytes = sum(p.numel() for p in model.parameters()) * element_bytes
            return (3 if self.reshard else 2) * whole_bytes * (RANKS - 1) // RANKS
        return None


def _autotp(size: int, *, split_head: bool) -> Entry:
    replicas = RANKS // size
    layout = f"TP {size}" + (f" × DP {replicas}" if replicas > 1 else "")
    head = ", head split" if split_head else ""
    key = f"autotp-{size}" + ("-head" if split_head else "")
    return Entry(key, f"DeepSpeed AutoTP, {layout}{head}", "autotp", tensor_parallel=size, split_head=split_head)


_PEERS = [
    *(_autotp(size, split_head=split_head) for size in (8, 4, 2) for split_head in (False, True)),
    Entry("tp-plan", "Transformers tp_plan, TP 8", "tp_plan", tensor_parallel=RANKS),
    Entry("fsdp2", "FSDP2, weights freed", "fsdp2"),
    Entry("fsdp2-keep", "FSDP2, weights kept", "fsdp2", reshard=False),
]
_MESHES = ["1x8x1", "1x4x2", "2x2x2", "8x1x1", f"8x1x1{_KEPT}", AUTO, f"{AUTO}{_KEPT}"]
DEFAULT = [f"cuboid-{mesh}" for mesh in _MESHES] + [entry.key for entry in _PEERS]
AUTO_KEY = f"cuboid-{AUTO}"


def find(keys: Sequence[str], workload: Llama, model: LlamaForCausalLM) -> list[Entry]:
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
        family, _, mesh = key.partition("-")
        if family != "cuboid":
            raise CuboidError(f"there is no contestant {key}; {suggestion(key, DEFAULT)}")
        reshard, mesh = not mesh.endswith(_KEPT), mesh.removesuffix(_KEPT)
        shape = Entry(key, "", "cuboid", mesh=mesh, reshard=reshard).shape(workload, model)
        if RANKS % shape.size:
            raise CuboidError(f"contestant {key}: mesh {shape} has {shape.size} ranks, which don't divide {RANKS}")
        replicas = f" × DP {RANKS // shape.size}" if shape.size < RANKS else ""
        kept = "" if reshard else ", weights kept"
        name = f"Cuboid, {shape}{replicas}{kept}" + (" (auto)" if mesh == AUTO else "")
        if mesh == AUTO or (shape, reshard) not in chosen:
            chosen[shape, reshard] = Entry(key, name, "cuboid", mesh=mesh, reshard=reshard)
    return list(chosen.values())


# --- what each does on a rank ---


@dataclass(frozen=True)
class FirstSteps:
    """What a contestant computed at first on one rank.

    Args:
        losses: of the rank's rows, before and after a step.
        gradient_norm: of the first step, before clipping.
    """

    losses: tuple[float, float]
    gradient_norm: float


class _Training(Contestant):
    """A framework's training."""

    def first(self) -> FirstSteps:
        """Two steps, which also connect process groups."""
        (first, norm), (second, _) = self.step(tell_norm=True), self.step(tell_norm=True)
        assert norm is not None
        return FirstSteps((first.item(), second.item()), float(norm))

    def step(self, *, tell_norm: bool = False) -> tuple[torch.Tensor, torch.Tensor | float | None]:
        """Forward, backward, clipping and AdamW on the global batch.

        Args:
            tell_norm: whether the gradient norm is wanted even where that takes more work.

        Returns:
            The mean loss of the rank's rows before the step; and the norm of the whole gradient, before clipping, or
            None where it wasn't asked for and the framework keeps it to itself.
        """
        raise NotImplementedError

    def figures(self) -> dict[str, Any]:
        """Bytes that this rank sent by the framework's own counter, and its collectives by axes, if it counts."""
        return {"sent_bytes": 0, "calls": {}}


class _Engine(_Training):
    """A model under DeepSpeed.

    Args:
        workload: what is trained.
        model: whole; stays as it is.
        section: ``tensor_parallel`` of the config.
        replicas: how many parts the global batch is cut into.
        own: which of them is this rank's.
    """

    def __init__(
        self, workload: Llama, model: LlamaForCausalLM, section: dict[str, Any], replicas: int, own: int
    ) -> None:
        self._rows = workload.tokens().chunk(replicas)[own]
        self._groups = _own_groups()
        # ZeRO is off in float32, where it would only add work: no contestant has optimizer state that it could save by
        # splitting among many replicas. In bfloat16 it is stage 1, without which DeepSpeed 0.19.8 tells a wrong norm
        # under any tensor parallelism.
        low_precision = workload.dtype == "bfloat16"
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": len(self._rows),
            "gradient_accumulation_steps": 1,
            "gradient_clipping": CLIP,
            "zero_optimization": {"stage": 1 if low_precision else 0},
            "optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}},
            "steps_per_print": 10**9,
            "tensor_parallel": section,
            **({"bf16": {"enabled": True}} if low_precision else {}),
        }
        copied = copy.deepcopy(model)
        with self._in_own_groups():
            self.engine, *_ = deepspeed.initialize(
                model=copied, model_parameters=list(copied.parameters()), config=config
            )

    def step(self, *, tell_norm: bool = False) -> tuple[torch.Tensor, torch.Tensor | float | None]:
        with self._in_own_groups():
            loss = self.engine(input_ids=self._rows, labels=self._rows).loss
            self.engine.backward(loss)
            norm = self._norm_before_step() if tell_norm else None
            self.engine.step()
            kept = self.engine.get_global_grad_norm()
        return loss.detach(), norm if kept is None else kept

    def _norm_before_step(self) -> float | None:
        """Where the engine won't tell it afterwards."""
        return None

    @contextlib.contextmanager
    def _in_own_groups(self) -> Iterator[None]:
        """Inside, DeepSpeed has this engine's process groups, and what it adds to them is kept.

        It keeps the groups of a process in global variables, and takes those of an earlier engine for a later one where
        it finds them. So each engine gets variables of its own; in the benchmark's own processes alone.
        """
        before = _own_groups()
        vars(groups).update(self._groups)
        try:
            yield
        finally:
            self._groups = _own_groups()
            vars(groups).update(before)


def _own_groups() -> dict[str, Any]:
    """All that DeepSpeed's functions declare ``global``: names in capitals, and three others. Dicts as copies."""

    def is_state(name: str) -> bool:
        private = name.startswith("_") and not name.startswith("__") and name.isupper()
        return private or name in {"mpu", "mesh_device", "expert_tensor_parallel_world_size"}

    found = {name: value for name, value in vars(groups).items() if is_state(name)}
    return {name: dict(value) if isinstance(value, dict) else value for name, value in found.items()}


class MeshStep(_Engine):
    """Cuboid on a mesh, whose ranks are all given the whole batch, or what is their replica's of it."""

    def __init__(self, entry: Entry, workload: Llama, model: LlamaForCausalLM) -> None:
        place = Topology(entry.shape(workload, model), RANKS)
        own = place.coordinate(dist.get_rank()).data
        section = workload.section(entry.mesh, RANKS, weight_gather=entry.gathers)
        super().__init__(workload, model, section, place.data, own)
        self._traffic = cuboid.mesh_of(self.engine).comm_counter

    def begin(self) -> None:
        self._traffic.reset()

    def figures(self) -> dict[str, Any]:
        """Without the gradient norm's sum, which DeepSpeed sends."""
        return {"sent_bytes": sum(self._traffic.snapshot().values()), "calls": self._traffic.calls()}


class AutoTpStep(_Engine):
    """DeepSpeed's AutoTP: replicas of tensor-parallel ranks, which are neighbours and are given the same rows."""

    def __init__(self, entry: Entry, workload: Llama, model: LlamaForCausalLM) -> None:
        section: dict[str, Any] = {"autotp_size": entry.tensor_parallel}
        if entry.split_head:
            section["vocab_parallel_lm_head"] = True
        own, replicas = dist.get_rank() // entry.tensor_parallel, RANKS // entry.tensor_parallel
        super().__init__(workload, model, section, replicas, own)

    def _norm_before_step(self) -> float | None:
        if self.engine.zero_optimization_stage() > 0:
            return None
        # Without ZeRO it clips by this function, and forgets what that returns.
        parameters, mpu = self.engine.module.parameters(), self.engine.mpu
        return float(deepspeed_clip_grad_norm_(parameters, max_norm=float("inf"), mpu=mpu))


class TpPlanStep(_Training):
    """``from_pretrained(tp_plan="auto")``: layers split among all ranks as DTensors, embedding and norms whole on each.

    Every rank computes the loss of the whole batch. bfloat16 is autocast, as the HF ``Trainer`` has it.

    Args:
        workload: what is trained.
        folder: a checkpoint of the model, which is the only way into tensor parallelism there.
    """

    def __init__(self, workload: Llama, folder: Path) -> None:
        plan = DistributedConfig(tp_plan="auto")
        self._model = LlamaForCausalLM.from_pretrained(folder, distributed_config=plan, dtype=torch.float32).train()
        self._rows, self._low_precision = workload.tokens(), workload.dtype == "bfloat16"
        parameters = list(self._model.parameters())
        # Neither the optimizer nor clipping takes both kinds in one group.
        split = [p for p in parameters if isinstance(p, DTensor)]
        whole = [p for p in parameters if not isinstance(p, DTensor)]
        self._parameters = [split, whole]
        self._optimizer = torch.optim.AdamW([{"params": group} for group in self._parameters], **ADAMW)

    def step(self, *, tell_norm: bool = False) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002 -- it always does
        with torch.autocast("cpu", torch.bfloat16, enabled=self._low_precision):
            loss = self._model(input_ids=self._rows, labels=self._rows).loss
        loss.backward()
        gradients = [[p.grad for p in group if p.grad is not None] for group in self._parameters]
        norm = torch.linalg.vector_norm(torch.stack([_whole(get_total_norm(group)) for group in gradients]))
        for group in self._parameters:
            clip_grads_with_norm_(group, CLIP, norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach(), norm


class FullyShardedStep(_Training):
    """FSDP2: each layer, and what is left of the model, a unit of its own; each rank has its own row.

    bfloat16 is its mixed-precision policy; gradients are summed in bfloat16, too, which sends least.
    """

    def __init__(self, entry: Entry, workload: Llama, model: LlamaForCausalLM) -> None:
        self._model = copy.deepcopy(model)
        options: dict[str, Any] = {
            "mesh": init_device_mesh("cpu", (RANKS,)),
            "reshard_after_forward": entry.reshard,
        }
        if workload.dtype == "bfloat16":
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in self._model.model.layers:
            fully_shard(layer, **options)
        fully_shard(self._model, **options)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), **ADAMW)
        self._rows = workload.tokens().chunk(RANKS)[dist.get_rank()]

    def step(self, *, tell_norm: bool = False) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002 -- it always does
        loss = self._model(input_ids=self._rows, labels=self._rows).loss
        loss.backward()
        norm = _whole(clip_grad_norm_(self._model.parameters(), CLIP))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach(), norm


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def build(entry: Entry, workload: Llama, model: LlamaForCausalLM, folder: Path) -> _Training:
    """Set up a contestant. All ranks must call.

    Args:
        entry: which one.
        workload: what is trained.
        model: whole, in float32; stays as it is.
        folder: a checkpoint of the model.
    """
    if entry.family == "tp_plan":
        return TpPlanStep(workload, folder)
    classes = {"cuboid": MeshStep, "autotp": AutoTpStep, "fsdp2": FullyShardedStep}
    return classes[entry.family](entry, workload, model)
