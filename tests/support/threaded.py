"""Models on all ranks of a mesh, whose ranks are threads of this process."""

import copy

import torch

from cuboid.config.schema import CuboidConfig
from cuboid.distributed.thread_ranks import ThreadRanks
from cuboid.distributed.topology import MeshShape
from cuboid.models.architectures.certificate import MeshVerdict
from cuboid.models.certification.float64 import KeepFloat64
from cuboid.models.sharded.parallel_plan import make_parallel_plan
from cuboid.models.sharded.sharded_model import shard_modules
from cuboid.tensor3d.sharding.sharding_spec import put_shard, take_shard


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
