"""Models on all ranks of a mesh, whose ranks are threads of this process."""

import copy
import os
from collections import Counter
from contextvars import ContextVar
from unittest import mock

import torch

from cuboid.config.schema import CuboidConfig
from cuboid.distributed import mesh as mesh_module
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.thread_ranks import ThreadRanks, _connect
from cuboid.distributed.topology import AXES, MeshShape
from cuboid.models.architectures.certificate import MeshVerdict
from cuboid.models.certification.float64 import KeepFloat64
from cuboid.models.sharded.parallel_plan import make_parallel_plan
from cuboid.models.sharded.sharded_model import shard_modules
from cuboid.tensor3d.sharding.sharding_spec import put_shard, take_shard
from cuboid.weights import save

#: In a thread of a :class:`ThreadWorld`, the rank that it is.
_rank = ContextVar("rank", default=0)


class ThreadWorld:
    """In the place of a pool of processes: :meth:`run` calls a function on each rank, and the ranks are threads.

    What the function shards is on a mesh of them. It must not use ``torch.distributed`` itself, an engine or an
    optimizer, nor replace what all threads share; and all threads draw from one generator.
    """

    def run(self, ranks, function, *arguments):
        """What ``function(*arguments)`` returns on each rank."""
        if ranks == 1:
            return [function(*arguments)]
        threads = ThreadRanks(MeshShape(ranks, 1, 1))
        connected, groups = Counter(), {}

        def connect(mesh):
            """Connect a rank's n-th mesh with the n-th ones of the others."""
            if mesh._connected:
                return
            key = connected[mesh.rank], mesh.shape
            connected[mesh.rank] += 1
            if key not in groups:
                every = [Mesh(mesh.shape, rank=rank, world_size=ranks) for rank in range(ranks)]
                threads._meetings += _connect(every, threads._turn)
                groups[key] = [other._groups for other in every]
            mesh.connect_threads(groups[key][mesh.rank])

        def on_rank(mesh):
            _rank.set(mesh.rank)
            return function(*arguments)

        with (
            mock.patch.dict(os.environ, WORLD_SIZE=str(ranks)),
            mock.patch.object(mesh_module, "current_rank", _rank.get),
            mock.patch.object(Mesh, "connect", connect),
            mock.patch.object(save, "_collect", _collect),
        ):
            return threads.run(on_rank)


def _collect(value, spec, mesh):
    """The full tensor on the first rank, as what it stands for."""
    pieces = [value.detach().clone()] if spec is None else mesh.along(*AXES).process_group._exchange(value)
    if mesh.rank > 0:
        return None
    if spec is None:
        return pieces[0]
    full = value.new_empty(spec.shape)
    for rank, piece in enumerate(pieces):
        put_shard(full, piece, spec, mesh.shape, mesh.topology.coordinate(rank))
    return full


class Threaded:
    """A copy of a whole model on a mesh, split as a verdict says, or wherever there is a rule."""

    def __init__(self, model, mesh, verdict=None):
        self.plan = make_parallel_plan(model, MeshShape.parse(mesh), verdict or MeshVerdict())
        self.ranks = ThreadRanks(self.plan.mesh)
        self.models = [self._sharded(copy.deepcopy(model), mesh) for mesh in self.ranks.meshes]

    def _sharded(self, copied, mesh):
        settings = CuboidConfig().tensor_parallel
        return shard_modules(copied, self.plan, mesh, settings, lambda x, spec: take_shard(x, spec, mesh))

    def run(self, step):
        """What a step returns of each rank's model."""

        def on_rank(mesh):
            with KeepFloat64():
                return step(self.models[mesh.rank])

        return self.ranks.run(on_rank)

    def gradients(self):
        """By name, put together from all ranks."""
        specs = self.plan.by_parameter
        gradients = {}
        for mesh, model in zip(self.ranks.meshes, self.models, strict=True):
            for name, parameter in model.named_parameters():
                full = gradients.setdefault(name, parameter.new_zeros(specs[name].shape))
                if parameter.grad is not None:
                    put_shard(full, parameter.grad, specs[name], mesh.shape, mesh.coordinate)
        return gradients


def step_of(**batch):
    """A step that computes a loss and its gradients."""

    def step(model):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        return loss.detach()

    return step


def sent_by_last_layer(model_of, mesh, step):
    """Bytes that a step sends for the last of three layers, by axes, on each rank.

    Args:
        model_of: gives a model of so many layers.
    """
    counts = []
    for layers in (2, 3):
        threaded = Threaded(model_of(layers), mesh)
        threaded.run(step)
        counts.append([mesh_of_rank.comm_counter.snapshot() for mesh_of_rank in threaded.ranks.meshes])
    return [
        {axes: total - two.get(axes, 0) for axes, total in three.items() if total != two.get(axes, 0)}
        for two, three in zip(*counts, strict=True)
    ]


def assert_as_alone(model, mesh, step, verdict=None):
    """A step on a mesh gives the loss and every gradient that it gives on one process.

    Returns:
        The model on the mesh.
    """
    alone = copy.deepcopy(model)
    with KeepFloat64():
        expected = step(alone)
    threaded = Threaded(model, mesh, verdict)
    for loss in threaded.run(step):
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    gradients = threaded.gradients()
    for name, parameter in alone.named_parameters():
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(gradients[name], wanted, rtol=1e-9, atol=1e-9, msg=lambda text: f"{name}: {text}")  # noqa: B023
    return threaded
