"""Check whether an optimizer gives the same result on shards as on full tensors, or must be given whole tensors.

On shards, it has to treat each element by itself; on whole tensors, each tensor. Classes that aren't known are tried on
small tensors: stepped on all of them in full and on pieces, or on some of them, and the results are compared.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CellType
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cuboid.checkpoint.optimizer_state import OptimizerTensor, split_state, split_whole_state
from cuboid.distributed.mesh import Mesh
from cuboid.errors import CheckpointError, OptimizerError
from cuboid.optim.whole_tensors import WholeRule, newton_schulz_cost

#: Classes that treat each element by itself with any settings. Matched by their full names, so that subclasses, which
#: may behave differently, aren't included.
_ELEMENTWISE = frozenset(
    [f"torch.optim.{name.lower()}.{name}" for name in ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD")]
    + [f"torch.optim.{name.lower()}.{name}" for name in ("NAdam", "RAdam", "RMSprop", "Rprop", "SGD")]
    + [f"deepspeed.ops.adam.{name}" for name in ("fused_adam.FusedAdam", "cpu_adam.DeepSpeedCPUAdam")]
    + [f"deepspeed.ops.lion.{name}" for name in ("fused_lion.FusedLion", "cpu_lion.DeepSpeedCPULion")]
    + ["deepspeed.ops.adagrad.cpu_adagrad.DeepSpeedCPUAdagrad"]
    + [f"colossalai.nn.optimizer.{name}" for name in ("fused_adam.FusedAdam", "fused_sgd.FusedSGD")]
    + [f"colossalai.nn.optimizer.{name}" for name in ("cpu_adam.CPUAdam", "hybrid_adam.HybridAdam")]
    + [f"apex.optimizers.{name}" for name in ("fused_adam.FusedAdam", "fused_sgd.FusedSGD")]
    + ["apex.optimizers.fused_adagrad.FusedAdagrad"]
)
#: Classes that treat each tensor by itself, but need it whole.
_PER_TENSOR = {
    **{
        f"colossalai.nn.optimizer.{name}": WholeRule()
        for name in ("lamb.Lamb", "lars.Lars", "fused_lamb.FusedLAMB", "came.CAME", "adafactor.Adafactor")
    },
    "deepspeed.ops.lamb.fused_lamb.FusedLamb": WholeRule(),
    # Its other groups are stepped by Adam.
    "deepspeed.runtime.zero.muon.muon_optimizer.MuonWithAuxAdam": WholeRule(
        lambda group: bool(group["use_muon"]), newton_schulz_cost
    ),
    "torch.optim.Adafactor": WholeRule(),
    "torch.optim.Muon": WholeRule(cost=newton_schulz_cost),
    "transformers.optimization.Adafactor": WholeRule(),
}
#: Names in DeepSpeed's config of optimizers that need whole tensors, and why.
_NAMED = {
    "adafactor": "takes means of rows and columns",
    "lamb": "takes norms of whole tensors",
    "muon": "works on whole matrices",
}

#: Those that :func:`check_optimizer` has accepted.
CHECKED: WeakSet[torch.optim.Optimizer] = WeakSet()
_WORKING = "AdamW, Adam, SGD, RMSprop, Adagrad or Lion"
_STEPS = 24
#: Shapes of a trial's tensors by their number of dims. They are above the usual thresholds of optimizers (Adafactor
#: factors from 128 rows and columns, 8-bit states begin at 4096 elements in blocks of 256), while their halves aren't.
_SHAPES = {0: (), 1: (8448,), 2: (144, 272), 3: (24, 40, 16), 4: (16, 12, 8, 8)}
#: Allowed difference between steps on pieces and on full tensors, relative to the step, and to the weight for rounding.
_STEP_TOLERANCE, _WEIGHT_TOLERANCE = 1e-3, 5e-6
#: A trial is only conclusive if at least this share of the weights changed by at least this relative amount.
_LEAST_MOVED, _LEAST_MOTION = 0.1, 1e-4


@dataclass(frozen=True)
class OwnedShards:
    """How the tensors of one rank's optimizer differ from the full model's.

    Attributes:
        cut: why tensors are sharded; empty if they aren't.
        flat: why tensors are flattened into one; empty if they aren't.
        spread: why other ranks have further tensors of the model; empty if this rank has all.
        fixed: the setting that keeps whole tensors from being put together for a step; empty if nothing does.
    """

    cut: str = ""
    flat: str = ""
    spread: str = ""
    fixed: str = ""

    @classmethod
    def of(cls, mesh: Mesh, flat: str = "", fixed: str = "") -> OwnedShards:
        """The differences on a mesh; ``flat`` is the reason why its framework flattens tensors, if it does."""
        stages = mesh.topology.pipe
        return cls(
            cut=f"a mesh of {mesh.shape} cuts tensors" if mesh.shape.size > 1 else "",
            flat=flat,
            spread=f"the tensors of a model are spread over {stages} stages" if stages > 1 else "",
            fixed=fixed,
        )

    @property
    def reason(self) -> str:
        """All reasons as text; empty if the optimizer has the same tensors as without parallelism."""
        return " and ".join(filter(None, (self.cut, self.flat, self.spread)))


def check_optimizer(
    optimizer: torch.optim.Optimizer, owned: OwnedShards, parameters: Sequence[nn.Parameter] | None = None
) -> WholeRule | None:
    """Check that an optimizer can make the same steps as on the full model, and that its state can be saved.

    An optimizer of an unknown class is tried on small tensors, with its own settings: on full ones, and on pieces such
    as it will get, with a copy of the optimizer for each. The optimizer itself isn't changed.

    Args:
        optimizer: before or after the model was sharded; without a state, or with its constructor's.
        owned: how its tensors differ from the full model's.
        parameters: the original ones, if the optimizer has them flattened already.

    Returns:
        None if it may be given shards; else which tensors it must be given whole.

    Raises:
        OptimizerError: names the class, what differs and what would work.
    """
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    rule = _PER_TENSOR.get(name)
    _check_kind(optimizer, owned, wraps=rule is not None)
    if rule is None and name not in _ELEMENTWISE:
        rule = _try(optimizer, owned, parameters)
    if rule is not None and owned.fixed:
        raise _needs_whole(type(optimizer).__name__, "needs whole tensors", owned)
    CHECKED.add(optimizer)
    return rule


def is_muon(section: Any) -> bool:
    """Whether an ``optimizer`` section of DeepSpeed's config names its Muon."""
    return isinstance(section, Mapping) and str(section.get("type")).lower() == "muon"


def check_named(section: Mapping[str, Any], owned: OwnedShards) -> None:
    """Reject an ``optimizer`` section of DeepSpeed's config that can't train, before the optimizer is constructed.

    Raises:
        OptimizerError: as :func:`check_optimizer`.
    """
    name = section.get("type")
    if (section.get("params") or {}).get("per_head_muon"):
        raise OptimizerError(
            "optimizer.params.per_head_muon would have no effect: DeepSpeed steps heads by themselves inside of ZeRO, "
            "and Muon is given whole matrices here; leave it out"
        )
    if isinstance(name, str) and name.lower() in _NAMED and owned.fixed:
        raise _needs_whole(name, _NAMED[name.lower()], owned)


def _check_kind(optimizer: torch.optim.Optimizer, owned: OwnedShards, *, wraps: bool) -> None:
    """Reject wrappers, unless the class is known, patched objects and optimizers whose ``step`` needs arguments."""
    kind = type(optimizer).__name__
    arguments = [
        parameter.name
        for parameter in list(inspect.signature(type(optimizer).step).parameters.values())[1:]
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if arguments:
        raise OptimizerError(
            f"{kind}.step needs {', '.join(arguments)}, but frameworks call it without, once backward has run; take an "
            f"optimizer such as {_WORKING}"
        )
    inner = [
        name for name, value in vars(optimizer).items() if hasattr(value, "param_groups") and value is not optimizer
    ]
    if inner and not wraps:
        raise OptimizerError(
            f"{kind} wraps another optimizer, as its {inner[0]}, whose parameters and state neither framework nor "
            "checkpoints would find; give the inner one, and do around its step what the wrapper does"
        )
    if not owned.reason:
        return
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]  # type: ignore[attr-defined]
    if hooks:
        raise OptimizerError(
            f"{kind} has a step hook, {getattr(hooks[0], '__qualname__', type(hooks[0]).__name__)}, that would see "
            f"pieces only: {owned.reason}; do its work in the training loop, where cuboid.full_gradients and "
            "cuboid.full_state_dict give whole tensors"
        )
    step = vars(optimizer).get("step")
    if step is not None and getattr(step, "__wrapped__", None) is not type(optimizer).step:
        raise OptimizerError(
            f"the step of this {kind} was replaced on the object, so that it isn't known whether it is right on "
            f"pieces, which it would be given: {owned.reason}; override it in a class of its own, which is tried out"
        )
    if _holds_tensors(type(optimizer).step):
        raise OptimizerError(
            f"{kind}.step uses tensors or modules of the function that its class is made in, which it would see pieces "
            f"of: {owned.reason}; give them to it as parameters, so that it can be tried out, or take {_WORKING}"
        )


def _holds_tensors(value: Any, depth: int = 6) -> bool:
    """Whether a function, through the variables of those around it, can reach a tensor or a module."""
    if isinstance(value, torch.Tensor | nn.Module):
        return True
    if depth == 0 or isinstance(value, type | str):
        return False
    inside: Iterable[Any]
    if isinstance(value, Mapping):
        inside = value.values()
    elif isinstance(value, list | tuple | set):
        inside = value
    elif callable(value) and hasattr(value, "__closure__"):
        # An empty cell has a variable that isn't set yet.
        inside = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
    else:
        inside = getattr(value, "__dict__", {}).values()
    return any(_holds_tensors(x, depth - 1) for x in inside)


def _needs_whole(name: str, what: str, owned: OwnedShards) -> OptimizerError:
    return OptimizerError(
        f"{name} {what}, but would be given pieces: {owned.reason}. Take an optimizer that treats "
        f"each element by itself, such as {_WORKING}; or "
        + (f"leave out {owned.fixed}" if owned.fixed else "train on one rank")
    )


@dataclass(frozen=True)
class _Take:
    """Makes one piece from a group's full tensors: ``make`` gets those at ``places``."""

    places: tuple[int, ...]
    make: Callable[[Sequence[torch.Tensor]], torch.Tensor]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.make([tensors[place] for place in self.places])


#: For each parameter group of one optimizer, the pieces that it gets.
_Share = list[list[_Take]]


def _try(
    optimizer: torch.optim.Optimizer, owned: OwnedShards, parameters: Sequence[nn.Parameter] | None
) -> WholeRule | None:
    """Compare steps on all tensors with steps on pieces and, if those differ, on some of the tensors."""
    if hasattr(type(optimizer), "__del__"):
        # Copies would release the original's resources.
        if owned.reason:
            raise _untried(optimizer, "it releases something when it goes, which a copy would do as well", owned)
        return None
    groups = _distinct_groups(optimizer)
    if parameters is not None and owned.flat:
        groups = [{**group, "params": parameters} for group in groups]
    ranks = [_ranks_of(group, flat=bool(owned.flat)) for group in groups]
    place = next((p.device for group in groups for p in group["params"]), torch.device("cpu"))
    devices = [place.index or 0] if place.type == "cuda" else []
    # The script's random numbers must not depend on whether there was a trial.
    with torch.random.fork_rng(devices), _NoCommunication():
        trial = _Trial(optimizer, groups, [[_SHAPES[rank] for rank in group_ranks] for group_ranks in ranks], place)
        try:
            full = trial.run([[_full(place) for place in range(len(group_ranks))] for group_ranks in ranks])
            _check_moved(trial, full)
            difference = _difference(trial, full, ranks, owned)
            if difference is not None:
                # If it is given whole tensors, each rank has some of them.
                of_whole = _difference(trial, full, ranks, OwnedShards(spread=owned.reason))
                if of_whole is not None:
                    raise _needs_whole(type(optimizer).__name__, of_whole, owned)
        except OptimizerError:
            raise
        except Exception as error:
            if not owned.reason:
                return None
            raise _untried(optimizer, f"{type(error).__name__}: {error}", owned) from error
    if difference is None and _unsaved(full, is_whole=False) is None:
        return None
    unsaved = _unsaved(full, is_whole=True)
    if unsaved is not None:
        raise OptimizerError(
            f"{type(optimizer).__name__} could be trained with here, but never saved: {unsaved}. Take an optimizer "
            f"such as {_WORKING}"
        )
    return WholeRule()


def _difference(
    trial: _Trial, full: torch.optim.Optimizer, ranks: Sequence[Sequence[int]], owned: OwnedShards
) -> str | None:
    """What differs between steps on all tensors and those of ranks that own pieces of them; None if nothing does."""
    try:
        for how, shares in _shares(ranks, owned):
            for share in shares:
                trial.compare(full, _stepped(trial, share, how), share, how)
    except _DifferenceError as error:
        return str(error)
    return None


def _stepped(trial: _Trial, share: _Share, how: str) -> torch.optim.Optimizer:
    try:
        return trial.run(share)
    except Exception as error:
        # It has stepped the full tensors: Muon, for one, takes no flat ones.
        raise _DifferenceError(f"can't step other tensors ({how}: {type(error).__name__}: {error})") from error


def _untried(optimizer: torch.optim.Optimizer, why: str, owned: OwnedShards) -> OptimizerError:
    return OptimizerError(
        f"{type(optimizer).__name__} isn't known, and a trial of its steps on small tensors failed ({why}), so that "
        f"it isn't known whether it is right on the pieces that it would be given: {owned.reason}. Take one that is "
        f"known, such as {_WORKING}"
    )


def _distinct_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The parameter groups, with those of equal settings merged into one."""
    distinct: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        same = [other for other in distinct if repr(_settings(other)) == repr(settings)]
        if same:
            same[0]["params"] = [*same[0]["params"], *group["params"]]
        else:
            distinct.append({**settings, "params": list(group["params"])})
    return distinct


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _ranks_of(group: Mapping[str, Any], *, flat: bool) -> list[int]:
    """Numbers of dims of a group's tensors, each twice, so that a tensor can be flattened with another one."""
    dims = {min(parameter.dim(), max(_SHAPES)) for parameter in group["params"]}
    return sorted([*dims, *dims]) if dims else ([1] if flat else [])


def _full(place: int) -> _Take:
    return _Take((place,), lambda tensors: tensors[0])


def _half_along(place: int, dim: int, half: int) -> _Take:
    return _Take((place,), lambda tensors: tensors[0].chunk(2, dim)[half])


def _half_of_flat(count: int, half: int) -> _Take:
    def make(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        # Not in the middle, which is a boundary between the tensors, two of each shape.
        middle = flat.numel() * 3 // 7
        return flat[middle:] if half else flat[:middle]

    return _Take(tuple(range(count)), make)


def _shares(ranks: Sequence[Sequence[int]], owned: OwnedShards) -> Iterator[tuple[str, list[_Share]]]:
    """The ways in which ranks may divide the tensors: a description, and the pieces of each of two optimizers.

    ``ranks`` has the number of dims of each tensor, by parameter group.
    """
    halves = (0, 1)
    # A mesh may shard any dim; a tensor with fewer dims is cut along its last one. Scalars aren't cut.
    if owned.cut:
        for dim in range(max(itertools.chain.from_iterable(ranks), default=0)):
            yield (
                f"tensors cut in two along dim {dim}",
                [
                    [
                        [_half_along(at, min(dim, n - 1), half) for at, n in enumerate(group_ranks) if n]
                        for group_ranks in ranks
                    ]
                    for half in halves
                ],
            )
    if owned.flat:
        yield (
            "tensors laid end to end",
            [
                [[_half_of_flat(len(group_ranks), half)] if group_ranks else [] for group_ranks in ranks]
                for half in halves
            ],
        )
    if owned.spread or owned.cut:
        yield (
            "tensors spread over two optimizers",
            [
                [[_full(at) for at in range(len(group_ranks)) if at % 2 == half] for group_ranks in ranks]
                for half in halves
            ],
        )


class _DifferenceError(Exception):
    """Steps on pieces differ from steps on full tensors."""


class _Trial:
    """Small tensors with gradients of very different magnitudes, and copies of an optimizer that step on them."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: list[dict[str, Any]],
        shapes: list[list[tuple[int, ...]]],
        device: torch.device,
    ) -> None:
        self._optimizer, self._groups = optimizer, groups
        generator = torch.Generator().manual_seed(2105)

        def draw(spread: float) -> list[list[torch.Tensor]]:
            return [[_uneven(shape, spread, generator).to(device) for shape in group_shapes] for group_shapes in shapes]

        self.start = draw(1.0)
        # The magnitude varies between steps, too, from 0.01 to 100.
        sizes = [10.0 ** (step % 5 - 2) for step in range(_STEPS)]
        drawn = [draw(2.0) for _ in range(4)]
        self._gradients = [
            [[gradient * size * (1 + step % 3) for gradient in group_gradients] for group_gradients in drawn[step % 4]]
            for step, size in enumerate(sizes)
        ]

    def run(self, share: _Share) -> torch.optim.Optimizer:
        """Make some steps with a copy of the optimizer on its share of the tensors; returns the copy."""
        pieces = [
            [nn.Parameter(take(tensors).clone()) for take in takes]
            for takes, tensors in zip(share, self.start, strict=True)
        ]
        clone = _copy_of(self._optimizer, self._groups, pieces)
        for gradients in self._gradients:
            for takes, tensors, parameters in zip(share, gradients, pieces, strict=True):
                for take, parameter in zip(takes, parameters, strict=True):
                    parameter.grad = take(tensors).clone()
            clone.step()
        return clone

    def compare(self, full: torch.optim.Optimizer, sharded: torch.optim.Optimizer, share: _Share, how: str) -> None:
        """Compare weights and states after steps on a share with those after steps on the full tensors, or raise."""
        for group, other, takes, start in zip(full.param_groups, sharded.param_groups, share, self.start, strict=True):
            if not _same_numbers(_settings(group), _settings(other)):
                raise _DifferenceError(f"finds a number for all of its parameters together (with {how})")
            for take, parameter in zip(takes, other["params"], strict=True):
                # `take` makes a piece of full tensors, so it also makes the piece to compare with.
                _compare(take(start), take(group["params"]), parameter, how)
                numbers = [_numbers(full.state[group["params"][place]]) for place in take.places]
                if not all(_same_numbers(values, _numbers(sharded.state[parameter])) for values in numbers):
                    raise _DifferenceError(f"finds a number for each tensor (with {how})")


def _uneven(shape: tuple[int, ...], spread: float, generator: torch.Generator) -> torch.Tensor:
    """Random numbers whose magnitudes vary over several powers of ten between rows and between columns."""
    # Explicit, because a script may have changed torch's defaults.
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    values = torch.randn(shape, **options)
    for dim, length in enumerate(shape):
        scale = 10.0 ** (spread * (2 * torch.rand(length, **options) - 1))
        values *= scale.view([length if other == dim else 1 for other in range(len(shape))])
    return values


def _compare(start: torch.Tensor, full: torch.Tensor, piece: torch.Tensor, how: str) -> None:
    before, target, result = (tensor.detach().double() for tensor in (start, full, piece))
    step = (target - before).abs()
    off = (result - target).abs()
    if bool((off <= _STEP_TOLERANCE * step + _WEIGHT_TOLERANCE * target.abs() + 1e-9).all()):
        return
    share = float((off / step.clamp(min=1e-30)).clamp(max=1.0).mean())
    raise _DifferenceError(
        f"uses more than the element that it steps on (on {how}, its steps were off by {share:.1%} in the mean)"
    )


def _check_moved(trial: _Trial, full: torch.optim.Optimizer) -> None:
    for group, start in zip(full.param_groups, trial.start, strict=True):
        for before, after in zip(start, group["params"], strict=True):
            if not bool(torch.isfinite(after).all()):
                raise RuntimeError("its steps made the weights infinite")
            moved = (after.detach() - before).abs() > _LEAST_MOTION * before.abs()
            if float(moved.float().mean()) < _LEAST_MOVED:
                raise RuntimeError("its steps hardly moved the weights")


def _numbers(state: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a state that aren't per element."""
    return {key: value for key, value in state.items() if not isinstance(value, torch.Tensor) or value.numel() == 1}


def _same_numbers(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    def same(one: Any, other: Any) -> bool:
        if isinstance(one, int | float | torch.Tensor) and isinstance(other, int | float | torch.Tensor):
            return math.isclose(float(one), float(other), rel_tol=1e-6, abs_tol=1e-30)
        return True

    return all(same(ours[key], theirs[key]) for key in ours.keys() & theirs.keys())


def _unsaved(tried: torch.optim.Optimizer, *, is_whole: bool) -> str | None:
    """Why a state can't be saved, found now rather than when the first checkpoint is written; None if it can.

    Of a tensor that is stepped whole, it may have tensors of any shape.
    """
    parameters = {parameter for group in tried.param_groups for parameter in group["params"]}
    try:
        for parameter in parameters:
            state = tried.state.get(parameter, {})
            if is_whole:
                split_whole_state(state, "a parameter")
            else:
                split_state(state, OptimizerTensor.of(parameter, "a parameter"))
    except CheckpointError as error:
        return str(error)
    others = [key for key in tried.state if key not in parameters]
    if others:
        return f"it keeps a state for {others[0]!r}, which is no parameter"
    if type(tried).state_dict is not torch.optim.Optimizer.state_dict:
        return "it has a state_dict of its own, with what checkpoints know nothing of"
    return None


def _copy_of(
    optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]], params: Sequence[list[nn.Parameter]]
) -> torch.optim.Optimizer:
    """An optimizer of the same class and settings on other parameters, without a state."""
    # Without its constructor, whose arguments aren't known.
    clone = object.__new__(type(optimizer))
    # References to the model's parameters in other attributes become an empty one, so that these aren't copied.
    empty = nn.Parameter(torch.empty(0))
    memo: dict[int, Any] = {id(p): empty for group in optimizer.param_groups for p in group["params"]}
    memo[id(optimizer)] = clone
    attributes = {key: value for key, value in vars(optimizer).items() if key not in ("state", "param_groups", "step")}
    vars(clone).update(copy.deepcopy(attributes, memo))
    clone.state = defaultdict(dict)
    clone.param_groups = [
        {**copy.deepcopy(_settings(group), memo), "params": parameters}
        for group, parameters in zip(groups, params, strict=True)
    ]
    for group in clone.param_groups:
        # At least 0.01, so that steps are visible even if a warm-up starts from a learning rate of zero.
        rate, usual = group.get("lr"), optimizer.defaults.get("lr") or 0.0
        if isinstance(rate, torch.Tensor):
            group["lr"] = rate.clamp(min=max(0.01, float(usual)))
        elif isinstance(rate, float | int):
            group["lr"] = max(rate, usual, 0.01)
    return clone


class _NoCommunication(TorchDispatchMode):
    """Context in which a collective raises: ranks may not all run the trial, which would then hang."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            raise RuntimeError("it communicates by itself, with groups that know nothing of the layout")
        return function(*args, **(kwargs or {}))
