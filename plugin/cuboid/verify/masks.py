"""Are dropout's masks random where they have to be, and equal where they have to be?

Every mask must be independent of every other one: those of other ranks, which have other parts of an activation, of
other layers, also on other stages, of other micro-batches and other segments. Equal must be the masks of ranks that
compute the same, and those of a forward and its recomputation in backward.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from cuboid.distributed.mesh import Mesh
from cuboid.tensor3d.sharding.sharded_param import is_recomputing

#: Dropout's probability while its masks are compared.
HALF = 0.5
#: Elements of a mask that are kept, its first ones.
_ELEMENTS = 1 << 14
#: Elements of an input that are kept, and how far apart they may be if two ranks compute the same.
_SAMPLE, _ROUNDING = 256, 1e-4
#: With fewer elements, chance explains any correlation.
_FEW = 64
#: Masks of one size that are compared with one another; n² pairs.
_MOST = 1024


@dataclass
class DropoutMasks:
    """The masks of one place in the model, on one rank.

    Attributes:
        calls: flat masks of the elements that were kept, call by call.
        inputs: elements of what each call was given; ranks that were given the same compute the same.
        recomputed: masks of recomputations in backward.
    """

    calls: list[torch.Tensor] = field(default_factory=list)
    inputs: list[torch.Tensor] = field(default_factory=list)
    recomputed: list[torch.Tensor] = field(default_factory=list)


#: By dropout module; or by the module that calls ``nn.functional.dropout``, and the number of the call in its forward.
MasksByName = dict[str, DropoutMasks]


def probe_masks(modules: Iterable[tuple[str, nn.Module]], model: nn.Module, run: Callable[[], Any]) -> MasksByName:
    """Record dropout's masks on this rank, in training mode with the same seed on all ranks.

    Args:
        modules: those of the model that run here, by name; they drop half of the elements during this call.
        model: which they are of.
        run: the forwards, perhaps with their backwards.
    """
    named = dict(modules)
    recorder = _Recorder(named)
    was_training = model.training
    model.train()
    # With the same seed on all ranks, masks differ only if Cuboid makes them differ.
    torch.manual_seed(0)
    try:
        with _dropping_half(named.values()), recorder.recording(), recorder:
            run()
    finally:
        model.train(was_training)
    return recorder.found


class _Recorder(TorchFunctionMode):
    """Records what dropout modules and ``nn.functional.dropout`` keep."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._modules = modules
        self._inside: list[str] = []
        self._given: list[torch.Tensor] = []
        self._is_busy = False
        #: Number of modules that were running when a recomputation began; None outside of one.
        self._recomputed_from: int | None = None
        self._called: dict[str, int] = {}
        self.found: MasksByName = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Know which module runs, in the ``with`` block."""
        hooks: list[Any] = []
        for name, module in self._modules.items():
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self._enter(name), prepend=True))
            if isinstance(module, nn.Dropout):
                hooks.append(module.register_forward_pre_hook(self._give_ones))
                hooks.append(module.register_forward_hook(lambda _, __, out, name=name: self._take(name, out)))
            hooks.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, name: str) -> None:
        if self._recomputed_from is None and is_recomputing():
            # Autograd runs backward with the modes of the calls that made its nodes, none of which was in a mode.
            self._recomputed_from = len(self._inside)
            self.__enter__()
        self._inside.append(name)
        self._called[name] = 0

    def _leave(self) -> None:
        self._inside.pop()
        if self._recomputed_from == len(self._inside):
            self._recomputed_from = None
            self.__exit__(None, None, None)

    def _give_ones(self, _: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Ones, since zeros in an input, such as a ReLU's, would look dropped in the output."""
        self._given.append(inputs[0])
        return torch.ones_like(inputs[0])

    def _take(self, name: str, kept: torch.Tensor) -> torch.Tensor:
        x = self._given.pop()
        self._note(name, x, kept)
        # So that backward goes through here, and recomputes what is before.
        return x * kept

    def _note(self, name: str, x: torch.Tensor, kept: torch.Tensor) -> None:
        masks = self.found.setdefault(name, DropoutMasks())
        mask = (kept.detach() != 0).flatten()[:_ELEMENTS].cpu()
        if is_recomputing():
            masks.recomputed.append(mask)
            return
        masks.calls.append(mask)
        # From everywhere: at padding, which may be at the beginning, all ranks may have zeros.
        start = x.detach().flatten()
        masks.inputs.append(start[:: max(1, start.numel() // _SAMPLE)][:_SAMPLE].double().cpu())

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = kwargs or {}
        owner = self._inside[-1] if self._inside else ""
        is_module = isinstance(self._modules.get(owner), nn.Dropout)
        if func is not nn.functional.dropout or is_module or not owner or self._is_busy:
            return func(*args, **keywords)
        self._is_busy = True
        try:
            return self._dropout(owner, *args, **keywords)
        finally:
            self._is_busy = False

    def _dropout(
        self, owner: str, x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Any:
        if not training or p == 0:
            return nn.functional.dropout(x, p, training, inplace)
        kept = nn.functional.dropout(torch.ones_like(x), p, training=True)
        number = self._called[owner]
        self._called[owner] = number + 1
        self._note(f"{owner}, its dropout {number}", x, kept)
        return x * kept


@contextlib.contextmanager
def _dropping_half(modules: Iterable[nn.Module]) -> Iterator[None]:
    """All rates that modules or their configs have, but those of scores, whose masks are inside of kernels."""
    owners = list(modules)
    owners += list({id(c): c for m in owners if (c := getattr(m, "config", None)) is not None}.values())
    before = [(owner, name, value) for owner in owners for name, value in vars(owner).items() if _is_rate(name, value)]
    before += [(owner, "p", owner.p) for owner in owners if isinstance(owner, nn.Dropout)]
    for owner, name, _ in before:
        setattr(owner, name, HALF)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _is_rate(name: str, value: object) -> bool:
    others = ("att", "layerdrop", "layer_drop", "drop_path")
    return isinstance(value, float) and "drop" in name and not any(other in name for other in others)


@dataclass(frozen=True)
class _Mask:
    """One mask of one rank: of which module, on which stage, and of which of several inputs that ranks have."""

    name: str
    pipe: int
    call: int
    place: int
    mask: torch.Tensor


def compare_masks(kept: MasksByName, again: MasksByName, mesh: Mesh) -> dict[str, tuple[float, float]]:
    """Compare the masks of all ranks of a copy of the model. Collective.

    Args:
        kept: this rank's, of several forwards.
        again: this rank's, of forwards and their recomputations.
        mesh: the model's.

    Returns:
        By module and kind of comparison, the largest deviation from independent masks that keep half, and the largest
        that chance explains. Ranks are compared with one another by the first of them.
    """
    peers = mesh.copy_ranks
    gathered: list[Any] | None = [(mesh.coordinate, kept)]
    if len(peers) > 1:
        gathered = [None] * len(peers) if mesh.rank == peers[0] else None
        dist.gather_object((mesh.coordinate, kept), gathered, dst=peers[0], group=mesh.model_parallel_group)
    every = _placed([(at.pipe, masks) for at, masks in gathered or ()])
    errors = {} if mesh.shape.size == 1 else _on_ranks(every)
    return errors | _in_calls(every) | _recomputed(again)


def _placed(ranks: Sequence[tuple[int, MasksByName]]) -> list[_Mask]:
    """The masks of all ranks, whose stages are given."""
    placed: list[_Mask] = []
    seen: dict[tuple[str, int, int], list[torch.Tensor]] = {}
    for pipe, masks_by_name in ranks:
        for name, masks in masks_by_name.items():
            for call, (mask, start) in enumerate(zip(masks.calls, masks.inputs, strict=True)):
                others = seen.setdefault((name, pipe, call), [])
                place = next((number for number, other in enumerate(others) if _is_same(start, other)), len(others))
                if place == len(others):
                    others.append(start)
                placed.append(_Mask(name, pipe, call, place, mask))
    return placed


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool((one - other).abs().max() <= _ROUNDING * one.abs().max())


def _on_ranks(every: Sequence[_Mask]) -> dict[str, tuple[float, float]]:
    by_call: dict[tuple[str, int, int], list[_Mask]] = {}
    for mask in every:
        by_call.setdefault((mask.name, mask.pipe, mask.call), []).append(mask)
    errors: dict[str, tuple[float, float]] = {}
    for (name, *_), masks in by_call.items():
        error = mask_correlation([mask.mask for mask in masks], [mask.place for mask in masks])
        key = f"{name}, masks of the ranks"
        errors[key] = max(errors.get(key, error), error, key=lambda pair: (pair[0] > pair[1], pair[0]))
    return errors


def _in_calls(every: Sequence[_Mask]) -> dict[str, tuple[float, float]]:
    """Compare all masks with one another: of other modules, stages, micro-batches, segments and places."""
    # Ranks that compute the same have the same mask, which :func:`_on_ranks` sees to.
    distinct = {(mask.name, mask.pipe, mask.place, mask.call): mask for mask in every}
    by_size: dict[int, list[_Mask]] = {}
    for mask in distinct.values():
        by_size.setdefault(mask.mask.numel(), []).append(mask)
    errors: dict[str, tuple[float, float]] = {}
    for size, masks in by_size.items():
        masks = masks[:: math.ceil(len(masks) / _MOST)]
        if size < _FEW or len(masks) < 2:
            continue
        signs = torch.stack([mask.mask for mask in masks]).float() * 2 - 1
        correlations = (signs @ signs.t() / size).abs().fill_diagonal_(0).amax(1)
        chance = 6 / math.sqrt(size)
        for mask, largest in zip(masks, correlations.tolist(), strict=True):
            key = f"{mask.name}, masks of other calls and layers"
            error = (largest, chance)
            errors[key] = max(errors.get(key, error), error, key=lambda pair: pair[0] / pair[1])
    return errors


def _recomputed(again: MasksByName) -> dict[str, tuple[float, float]]:
    """A recomputation must repeat the masks of its forward, each of them once: 0 if it does, else 1."""
    errors = {}
    for name, masks in again.items():
        # Backward takes the micro-batches and segments in another order.
        forward, repeated = (sorted(mask.tolist() for mask in calls) for calls in (masks.calls, masks.recomputed))
        if repeated:
            errors[f"{name}, masks of the recomputation"] = (float(forward != repeated), 0.0)
    return errors


def mask_correlation(masks: Sequence[torch.Tensor], places: Sequence[Hashable]) -> tuple[float, float]:
    """The largest deviation of ranks' masks from independent ones that keep half, and the largest that chance explains.

    The deviation is 1 if two masks are equal, or if one keeps all or nothing. Ranks with equal ``places`` must have the
    same mask; if they don't, the deviation is infinite.
    """
    distinct = dict(zip(places, masks, strict=True))
    if not all(torch.equal(distinct[place], mask) for place, mask in zip(places, masks, strict=True)):
        return math.inf, 0.0
    masks = list(distinct.values())
    deviations = [abs(mask.double().mean().item() - HALF) / HALF for mask in masks]
    for number, one in enumerate(masks):
        for other in masks[number + 1 :]:
            if one.shape == other.shape:
                deviations.append(abs((one == other).double().mean().item() - HALF) / HALF)
    return max(deviations), 6 / math.sqrt(min(mask.numel() for mask in masks))
