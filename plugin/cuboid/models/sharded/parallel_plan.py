"""Derives sharding specs from modules' roles: how each parameter is cut, and whether a mesh can cut it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from cuboid.distributed.topology import Axis, Coordinate, MeshShape
from cuboid.errors import MeshError, UnsupportedModelError
from cuboid.models.architectures.attention_heads import HeadCounts, plan_key_value_heads
from cuboid.models.architectures.certificate import MeshVerdict
from cuboid.models.architectures.roles import Role, find_roles, token_embeddings
from cuboid.models.attention.interface import check_model_options
from cuboid.tensor3d.experts.sharded_experts import ExpertForm
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec

_SHOWN_MESHES = 6
#: The verdict without a probe: everything that has a rule is split.
_SPLIT = MeshVerdict()


@dataclass(frozen=True)
class ParallelPlan:
    """How a model is sharded over a mesh, the same on all ranks: roles, head counts, sharding specs."""

    mesh: MeshShape
    heads: HeadCounts
    roles: dict[str, Role]
    #: Sharding specs by module name, then parameter name.
    specs: dict[str, dict[str, ShardingSpec]]
    verdict: MeshVerdict

    @property
    def by_parameter(self) -> dict[str, ShardingSpec]:
        """Sharding specs by the parameters' full names."""
        return {
            f"{module}.{name}": spec
            for module, module_specs in self.specs.items()
            for name, spec in module_specs.items()
        }

    def parameters_of(self, model: nn.Module) -> Iterator[tuple[nn.Module, str, ShardingSpec]]:
        """Yield for each parameter its module in ``model``, its name in the module, and its sharding spec."""
        for path, module_specs in self.specs.items():
            module = model.get_submodule(path)
            for name, spec in module_specs.items():
                yield module, name, spec


def make_parallel_plan(model: PreTrainedModel, mesh: MeshShape, verdict: MeshVerdict = _SPLIT) -> ParallelPlan:
    """Plan how a model is sharded over a mesh.

    Args:
        model: on any device, meta included.
        mesh: the mesh's shape.
        verdict: result of the architecture's certification, which names the blocks that must be computed whole.

    Raises:
        UnsupportedModelError: a module or the attention implementation has no rule.
        MeshError: the mesh doesn't divide the model; the message names what, and the nearest meshes that do.
    """
    roles, modules = _cut_modules(model, verdict)
    heads = HeadCounts.of(model.config)
    misfits = _misfits(modules, heads, mesh)
    if misfits:
        raise MeshError(_misfit_message(model, _distinct(modules), heads, mesh, misfits))
    specs = {
        module.name: {name: _spec(name, shape, module, heads, mesh) for name, shape in module.shapes}
        for module in modules
    }
    return ParallelPlan(mesh, heads, roles, specs, verdict)


class MeshRules:
    """Which meshes can cut a model. Knows its modules' shapes, and doesn't keep the model.

    Raises:
        UnsupportedModelError: no mesh can.
    """

    def __init__(self, model: PreTrainedModel, verdict: MeshVerdict = _SPLIT) -> None:
        self._heads = HeadCounts.of(model.config)
        #: Of all modules.
        self.roles, modules = _cut_modules(model, verdict)
        self._all = {module.name: module for module in modules}
        self._modules = _distinct(modules)
        self._known: dict[MeshShape, str | None] = {}

    def misfit(self, mesh: MeshShape) -> str | None:
        """What a mesh can't cut, in words; None if it fits the model."""
        if mesh not in self._known:
            self._known[mesh] = next(iter(_misfits(self._modules, self._heads, mesh)), None)
        return self._known[mesh]

    def weights(self, names: Iterable[str]) -> list[CutWeight]:
        """The weights of modules, one of all that any mesh cuts alike."""
        return [CutWeight(module, self._heads) for module in _distinct([self._all[name] for name in names])]

    def fitting(self, size: int) -> list[MeshShape]:
        """All meshes of ``size`` ranks that can cut the model."""
        return [mesh for mesh in MeshShape.of_size(size) if self.misfit(mesh) is None]


@dataclass(frozen=True)
class _Module:
    """A module, as far as it decides how a mesh cuts it.

    Args:
        name: in the model.
        role: its role.
        shapes: of its own parameters, by their names.
        features: those that are cut over both sequence and hidden, unlike any weight's rows: what an "up" projection
            without heads gives, or what is inside each expert; 0 for other modules.
        inputs_first: whether its weight is stored transposed.
    """

    name: str
    role: Role
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    features: int
    inputs_first: bool


@dataclass(frozen=True)
class CutWeight:
    """The weight of a module, which meshes cut."""

    module: _Module
    heads: HeadCounts

    def spec(self, mesh: MeshShape) -> ShardingSpec:
        """How a mesh that can cut it does."""
        return _spec("weight", dict(self.module.shapes)["weight"], self.module, self.heads, mesh)


def _cut_modules(model: PreTrainedModel, verdict: MeshVerdict) -> tuple[dict[str, Role], list[_Module]]:
    """The roles of a model's modules, and the modules.

    Raises:
        UnsupportedModelError: no mesh can cut the model.
    """
    check_model_options(model.config)
    if model.config.is_encoder_decoder:
        _check_stacks(model)
    roles = find_roles(model, verdict.whole_blocks, splits_late=verdict.splits_late, head=verdict.head)
    modules = []
    for name, role in roles.items():
        module = model.get_submodule(name)
        shapes = tuple((key, tuple(parameter.shape)) for key, parameter in module.named_parameters(recurse=False))
        features = 0
        if role.experts is not None:
            # The inputs of "down", since "up" may have a gate's features as well.
            features = module.get_parameter(role.experts.down).shape[3 - role.experts.out_dim]
        elif role.kind == "up" and role.heads is None:
            features = out_features(module)
        modules.append(_Module(name, role, shapes, features, isinstance(module, Conv1D)))
    return roles, modules


def _distinct(modules: list[_Module]) -> list[_Module]:
    """One of all modules that any mesh cuts alike: layers have the same ones."""
    distinct: dict[_Module, _Module] = {}
    for module in modules:
        distinct.setdefault(replace(module, name=""), module)
    return list(distinct.values())


def _check_stacks(model: PreTrainedModel) -> None:
    """Check that an encoder and its decoder have equally many heads, and vocabularies of one size.

    Raises:
        UnsupportedModelError: they differ.
    """
    names = ("encoder_attention_heads", "decoder_attention_heads")
    heads = [getattr(model.config, name, None) for name in names]
    if heads[0] != heads[1]:
        both = " and ".join(f"{name} is {count}" for name, count in zip(names, heads, strict=True))
        raise UnsupportedModelError(f"{type(model).__name__}: {both}; a mesh has rules for as many of each only")
    sizes = {table.num_embeddings for table in token_embeddings(model) if isinstance(table, nn.Embedding)}
    if len(sizes) > 1:
        raise UnsupportedModelError(
            f"{type(model).__name__}: the encoder's and the decoder's vocabularies have {min(sizes)} and {max(sizes)} "
            "entries; a mesh has rules for one vocabulary only"
        )


def _misfits(modules: list[_Module], heads: HeadCounts, mesh: MeshShape) -> list[str]:
    """Descriptions of what the mesh can't cut; empty if it fits the modules."""
    head_ranks = mesh.of("sequence", "hidden")
    if heads.query % head_ranks and any(module.role.heads for module in modules):
        # Return at once, since key/value heads can't be planned for such a mesh either.
        return [f"{heads.query} attention heads don't divide by sequence × hidden = {head_ranks}"]
    misfits: list[str] = []
    for module in modules:
        if module.features % head_ranks:
            of = " of each expert" if module.role.experts is not None else ""
            misfits.append(
                f"{module.name}: {module.features} features{of} don't divide by sequence × hidden = {head_ranks}"
            )
        for parameter, shape in module.shapes:
            misfits += [
                f"{module.name}.{parameter} {shape}: {size} doesn't divide by {pieces}"
                for size, pieces in _spec(parameter, shape, module, heads, mesh).indivisible(mesh)
            ]
    return misfits


def out_features(module: nn.Module) -> int:
    """Out features of a linear layer or a ``Conv1D``, whose weight is stored transposed."""
    return module.nf if isinstance(module, Conv1D) else module.out_features  # type: ignore[return-value]


def _misfit_message(
    model: PreTrainedModel, modules: list[_Module], heads: HeadCounts, mesh: MeshShape, misfits: list[str]
) -> str:
    def distance(other: MeshShape) -> float:
        pairs = [(mesh.batch, other.batch), (mesh.sequence, other.sequence), (mesh.hidden, other.hidden)]
        return sum(abs(math.log(a / b)) for a, b in pairs)

    nearest: list[MeshShape] = []
    for size in sorted(range(1, mesh.size + 1), reverse=True):
        nearest += sorted((m for m in MeshShape.of_size(size) if not _misfits(modules, heads, m)), key=distance)
        if len(nearest) >= _SHOWN_MESHES:
            break
    rest = f" (and {len(misfits) - 1} more)" if len(misfits) > 1 else ""
    works = ", ".join(str(m) for m in nearest[:_SHOWN_MESHES])
    return (
        f"tensor_parallel.mesh {mesh} (batch × sequence × hidden) can't cut {type(model).__name__}: "
        f"{misfits[0]}{rest}; nearest meshes that work: {works}"
    )


def _spec(name: str, shape: tuple[int, ...], module: _Module, heads: HeadCounts, mesh: MeshShape) -> ShardingSpec:
    role = module.role
    if role.kind in ("gathered", "whole", "inside", "beside tower"):
        return ShardingSpec(shape, ((),) * len(shape))
    if role.kind == "norm":
        # The weight of a norm over heads is sharded like the bias of the projection to these heads.
        return ShardingSpec(
            shape, (("hidden",) if role.heads is None else _feature_axes("bias", role, heads, mesh)[0],)
        )
    if role.kind == "per head":
        return ShardingSpec(shape, (("sequence", "hidden"),))
    if role.kind == "bias of heads":
        return ShardingSpec(shape, ((), ("sequence", "hidden")))
    if role.kind in ("labels", "latent"):
        return ShardingSpec(shape, ((), ("hidden",)) if name == "weight" else ((),))
    if role.kind == "from latent":
        axes: tuple[tuple[Axis, ...], ...] = (("sequence", "hidden"), ())
        return ShardingSpec(shape, axes[: len(shape)])
    if role.kind in ("embedding", "head", "tied"):
        split: tuple[tuple[Axis, ...], ...] = (("sequence",), ("hidden",))
        return ShardingSpec(shape, split[: len(shape)], ragged=True)
    if role.experts is not None:
        return _expert_spec(name, shape, role.experts)
    if role.kind == "router":
        # Other parameters of a router are small, so every rank unshards them whole.
        is_multiplied = len(shape) == 2 and shape[-1] == role.width
        return ShardingSpec(shape, ((), ("hidden",)) if is_multiplied else ((),) * len(shape))
    parts = role.parts
    out, into = _feature_axes(name, role, heads, mesh)
    if name == "bias":
        return ShardingSpec(shape, (out,), (parts,))
    if module.inputs_first:
        return ShardingSpec(shape, (into, out), (1, parts))
    return ShardingSpec(shape, (out, into), (parts, 1))


def _expert_spec(name: str, shape: tuple[int, ...], form: ExpertForm) -> ShardingSpec:
    """As :func:`_feature_axes`, for each expert's features; whole experts are distributed over `batch`."""
    is_up = name in (form.up, form.up_bias)
    parts = form.parts if is_up else 1
    if name in form.biases:
        # Biases are added after the products' reduce-scatters: after "up" features are cut over both axes, after "down"
        # over `hidden`.
        return ShardingSpec(shape, ((), ("sequence", "hidden") if is_up else ("hidden",)), (1, parts))
    out: tuple[Axis, ...] = ("sequence",) if is_up else ("hidden",)
    into: tuple[Axis, ...] = ("hidden",) if is_up else ("sequence",)
    if form.in_first:
        return ShardingSpec(shape, ((), into, out), (1, 1, parts))
    return ShardingSpec(shape, ((), out, into), (1, parts, 1))


def _feature_axes(
    name: str, role: Role, heads: HeadCounts, mesh: MeshShape
) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """Axes that cut the out and the in features of an "up" or "down" projection's block."""
    if role.kind == "down":
        return ("hidden",), ("sequence",)
    if role.heads == "key_value":
        # Whether the heads divide evenly is the same on every rank, so any coordinate will do.
        plan = plan_key_value_heads(heads, mesh, Coordinate(0, 0, 0, 0, 0))
        if not plan.scattered:
            return (("sequence",) if plan.split_by_sequence else ()), ("hidden",)
    # A bias is added after the reduce-scatter, where the features are cut once more.
    return (("sequence", "hidden") if name == "bias" else ("sequence",)), ("hidden",)
