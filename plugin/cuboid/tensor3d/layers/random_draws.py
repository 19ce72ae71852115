"""Random numbers that a model's own code draws: each gets the seed that fits what its ranks have of the tensor.

Modules whose code draws (``nn.functional.dropout`` on hidden states, a random number that decides whether a layer
runs) run inside :meth:`RandomDraws.inside`. There, torch passes every call of its functions to us first, and the shape
of a draw tells along which axes ranks must draw differently. What may have to be either way is refused.

Torch's functions aren't replaced for good: code that has nothing to do with a sharded model would pay for it, and could
no longer be compiled. Nor is a seed set for all of a module's code: decoders drop layers and elements in one function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode

from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import AXES, Axis
from cuboid.errors import UnsupportedModelError
from cuboid.tensor3d.layers.dropout import (
    MaybeWhole,
    is_in_region,
    is_settled,
    own_random_numbers,
    running_generators,
    seeded,
)

#: What a rank has of the activations in a module. "parts": of rows, tokens and features. "tokens": of rows and tokens,
#: with all features. "rows": of rows, with all tokens and features. "all": the same as every other rank.
Holding = Literal["parts", "tokens", "rows", "all"]

#: Functions with a probability, and whether they drop if nothing says whether the model is training.
_DROPOUTS = {
    **dict.fromkeys(("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "native_dropout"), True),
    **dict.fromkeys(("alpha_dropout", "alpha_dropout_", "feature_alpha_dropout", "feature_dropout"), False),
}
#: Dropouts that draw a number for each channel ``[B, C]`` of ``[B, C, …]``.
_OF_CHANNELS = ("dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout", "feature_dropout")
#: Functions that draw in the shape of their first argument.
_IN_SHAPE = (
    *("rand_like", "randn_like", "randint_like", "bernoulli", "bernoulli_", "uniform_", "normal_", "exponential_"),
    *("geometric_", "cauchy_", "log_normal_", "random_", "gumbel_softmax", "poisson", "multinomial", "binomial"),
    *("scaled_dot_product_attention", "rrelu", "rrelu_"),
)
#: Torch's own functions in Python that draw.
_ORIGINALS = {name: getattr(nn.functional, name) for name in (*_DROPOUTS, *_IN_SHAPE) if hasattr(nn.functional, name)}
#: Functions that are given a shape.
_OF_SIZE = ("rand", "randn", "randint", "randperm", "normal")
#: Functions whose first argument is an activation: none of its dims is there to be expanded.
_OF_ACTIVATIONS = ("dropout", "dropout_", "native_dropout", "scaled_dot_product_attention")
#: The names of all functions that draw.
RANDOM_FUNCTIONS = frozenset((*_DROPOUTS, *_IN_SHAPE, *_OF_SIZE))


@dataclass(frozen=True)
class Place:
    """A module whose own code draws.

    Args:
        name: in the model.
        cls: name of its class.
        holding: what a rank has of its activations.
        late: if there is one, it tells whether activations are whole instead of parts.
        runs_layers: whether it contains the list of layers. Its code isn't recomputed in backward.
    """

    name: str
    cls: str
    holding: Holding
    late: MaybeWhole | None = None
    runs_layers: bool = False


class RandomDraws:
    """Finds the seeds of what a sharded model's own code draws, on one rank, which has ``width`` features (H/h)."""

    def __init__(self, mesh: Mesh, width: int) -> None:
        self._mesh, self._width = mesh, width
        self._rows, self._lengths, self._decisions = 0, frozenset[int](), 0
        self._place: Place | None = None

    def begin(self, rows: int, lengths: Iterable[int]) -> None:
        """Begin a forward on this rank's rows, of sequences of which it has these numbers of positions."""
        self._rows, self._lengths, self._decisions = rows, frozenset(lengths), 0

    @contextmanager
    def inside(self, place: Place) -> Iterator[None]:
        """In the ``with`` block, the code of a module runs."""
        outer, self._place = self._place, place
        try:
            if outer is None:
                with _Calls(self):
                    yield
            else:
                yield
        finally:
            self._place = outer

    def draw(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a function that may draw, with the right seed.

        Raises:
            UnsupportedModelError: there is no rule for its shape; on all ranks.
        """
        # Without a forward of the model, as when a layer is measured, nothing has to fit together.
        is_free = is_settled() or not self._rows or kwargs.get("generator") is not None
        shape = None if is_free else _shape(name, call, args, kwargs)
        if shape is None:
            return call(*args, **kwargs)
        device = _device(args, kwargs)
        if len(shape) < 2 and math.prod(shape) == 1:
            return self._decide(device, lambda: call(*args, **kwargs))
        axes = self._axes(shape, is_activation=name in _OF_ACTIVATIONS)
        if axes is None:
            raise self._refused(name, shape)
        with own_random_numbers(self._mesh, device, axes):
            return call(*args, **kwargs)

    def _decide(self, device: torch.device, draw: Callable[[], Any]) -> Any:
        """Draw one number, which may decide whether a layer runs: the same on all ranks."""
        generators = running_generators()
        number = None if generators is None else generators.number_if_differing()
        if number is None:
            # With equal seeds, the host's generator draws what it would in the plain model.
            if device.type == "cpu" and not is_in_region():
                return draw()
            with own_random_numbers(self._mesh, device, ()):
                return draw()
        assert generators is not None
        assert self._place is not None
        if not self._place.runs_layers:
            # A recomputation couldn't repeat it: it restores the rank's own generator.
            generators.require_equal()
        # What a checksum of the generator is compared by, and seeds are made from, must change with each draw.
        torch.rand((), device="cpu")
        self._decisions += 1
        with seeded(device, number + self._decisions):
            return draw()

    def _axes(self, shape: Sequence[int], *, is_activation: bool) -> tuple[Axis, ...] | None:
        """The axes along which ranks draw differently, for a draw of a shape; None if that isn't known."""
        place = self._place
        assert place is not None
        holding: Holding = "rows" if place.late is not None and place.late.is_whole else place.holding
        if holding == "all":
            return ()
        if holding == "tokens":
            # A router's code works on rows of tokens, and on what all ranks along `hidden` know of them.
            return ("batch", "sequence")
        rows, *others = shape
        if rows not in (1, self._rows):
            # Tokens of all rows in one dim.
            if holding == "rows" and rows % self._rows == 0:
                return ("batch",)
            is_tokens = rows in {self._rows * length for length in self._lengths} and others == [self._width]
            return AXES if is_tokens else None
        batch: tuple[Axis, ...] = ("batch",) if rows == self._rows else ()
        if holding == "rows" or max(others, default=1) == 1:
            return batch
        of_part = self._axes_of_part(others, is_activation=is_activation)
        return None if of_part is None else (*batch, *of_part)

    def _axes_of_part(self, others: list[int], *, is_activation: bool) -> tuple[Axis, ...] | None:
        """The same for the dims behind the rows', of which one of size 1 may stand for all tokens or features."""
        if (is_activation and len(others) > 2) or (len(others) > 1 and min(others) > 1):
            return ("sequence", "hidden")
        is_length, is_width = others[0] in self._lengths, others[-1] == self._width
        if len(others) == 1:
            # A number for each token or for each feature, unless it could be either.
            return None if is_length == is_width else ("sequence",) if is_length else ("hidden",)
        if len(others) > 2 or (others[0] > 1 and not is_length) or (others[1] > 1 and not is_width):
            return None
        return (*(("sequence",) if is_length else ()), *(("hidden",) if is_width else ()))  # type: ignore[return-value]

    def _refused(self, name: str, shape: Sequence[int]) -> UnsupportedModelError:
        place = self._place
        assert place is not None
        return UnsupportedModelError(
            f"{place.cls} ({place.name or 'the model'}) draws random numbers {list(shape)} with {name} in training, "
            f"and there is no rule for which ranks of a mesh {self._mesh.shape} must draw the same; set the "
            "probability or noise in its config that switches this on to 0"
        )


class _Calls(TorchFunctionMode):
    """Passes calls of functions that draw to :meth:`RandomDraws.draw`."""

    def __init__(self, draws: RandomDraws) -> None:
        super().__init__()
        self._draws = draws

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        # Methods of C have no module.
        if not (getattr(func, "__module__", None) or "torch").startswith("torch"):
            # A script has replaced a dropout, and its function has called the original one, which passes on what its
            # own name stands for now. Go on with the original.
            name = next((key for key in _ORIGINALS if getattr(nn.functional, key) is func), name)
            func = _ORIGINALS.get(name, func)
        if name not in RANDOM_FUNCTIONS:
            return func(*args, **(kwargs or {}))
        return self._draws.draw(name, func, args, kwargs or {})


@contextmanager
def without_draws() -> Iterator[None]:
    """In the ``with`` block, nothing looks at what is drawn: for code that draws nothing, as a checked graph does."""
    modes = []
    while torch._C._len_torch_function_stack() and isinstance(_get_current_function_mode(), _Calls):
        modes.append(_pop_mode())
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


def draws_at_all(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of one of :data:`RANDOM_FUNCTIONS` draws with these arguments."""
    if name in _DROPOUTS:
        p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", _DROPOUTS[name]))
        return bool(training and p)
    if name == "scaled_dot_product_attention":
        return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p"))
    return not name.startswith("rrelu") or bool(args[3] if len(args) > 3 else kwargs.get("training"))


def _shape(
    name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Sequence[int] | None:
    """The shape in which a call draws; None if it draws nothing, or nothing with values."""
    x = args[0] if args else kwargs.get("input", kwargs.get("query", kwargs.get("tensor")))
    if not isinstance(x, torch.Tensor):
        # A size is given in one of several forms; the meta device draws nothing.
        return tuple(call(*args, **{**kwargs, "device": "meta"}).shape) if name in _OF_SIZE else None
    if not draws_at_all(name, args, kwargs) or isinstance(x, FakeTensor):
        return None
    return (*x.shape[:2], *[1] * (x.dim() - 2)) if name in _OF_CHANNELS else x.shape


def _device(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device:
    device = next((x.device for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), None)
    return device or torch.device(kwargs.get("device") or torch.get_default_device())
