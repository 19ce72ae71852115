"""Which generators a sharded dropout seeds, that it leaves them as they were, and what a model's own code draws."""

import itertools
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import AXES, MeshShape
from cuboid.errors import CuboidError, UnsupportedModelError
from cuboid.tensor3d.layers.dropout import compared_by, own_random_numbers, random_numbers_of_block
from cuboid.tensor3d.layers.random_draws import Place, RandomDraws


class Devices:
    """The part of ``torch.cuda`` that generators are asked and set by, of two devices."""

    def __init__(self):
        self.current = 0
        self.states = {0: "first", 1: "second"}

    @contextmanager
    def device(self, device):
        before, self.current = self.current, device.index
        yield
        self.current = before

    def get_rng_state(self, device):
        return self.states[device.index]

    def set_rng_state(self, state, device):
        self.states[device.index] = state

    def manual_seed(self, seed):
        self.states[self.current] = seed


@pytest.fixture
def devices(monkeypatch):
    fake = Devices()
    for name in ("device", "get_rng_state", "set_rng_state", "manual_seed"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


def mesh_of(ranks, index):
    return SimpleNamespace(size=lambda *_: ranks, index=lambda *_: index)


def test_only_the_generator_of_the_tensors_device_is_seeded(devices):
    seeds = []
    for index in (0, 3):
        torch.manual_seed(0)
        with own_random_numbers(mesh_of(4, index), torch.device("cuda:1")):
            seeds.append(devices.states[1])
            assert devices.states[0] == "first"
            assert devices.current == 0
            inside = torch.rand(())
        assert devices.states == {0: "first", 1: "second"}
        # What the host draws goes on.
        assert torch.rand(()) != inside
    assert seeds[1] == seeds[0] + 3


def test_an_error_leaves_the_generator_as_it_was(devices):
    with pytest.raises(ZeroDivisionError), own_random_numbers(mesh_of(2, 1), torch.device("cuda:0")):
        raise ZeroDivisionError
    assert devices.states == {0: "first", 1: "second"}


def test_the_seed_comes_from_the_host_whatever_the_default_device_is():
    before = torch.get_rng_state()
    drawn = []
    for default in ("cpu", "meta"):
        torch.manual_seed(0)
        with torch.device(default), own_random_numbers(mesh_of(2, 0), torch.device("cpu")):
            drawn.append(torch.rand(3, device="cpu"))
    torch.set_rng_state(before)
    assert torch.equal(*drawn)


# --- a model's own draws, on the ranks of a mesh one after the other -------------------------------------------------

SHAPE = MeshShape(2, 2, 2)
#: What the ranks have of eight rows, six tokens and eight features.
ROWS, LENGTH, WIDTH = 4, 3, 4
PART = Place("layers.0", "Layer", "parts")
LIST = Place("", "Layers", "parts", runs_layers=True)
WHOLE = SimpleNamespace(is_whole=True)


def on_each_rank(draw, place=PART, *, generators=None, seed=lambda rank: 0):
    """What ``draw`` returns on each rank, by the rank's coordinate."""
    by_coordinate = {}
    for rank in range(SHAPE.size):
        mesh = Mesh(SHAPE, rank=rank, world_size=SHAPE.size)
        draws = RandomDraws(mesh, WIDTH)
        draws.begin(ROWS, [LENGTH])
        torch.manual_seed(seed(rank))
        with compared_by(generators), draws.inside(place):
            result = draw()
        at = mesh.coordinate
        by_coordinate[at.batch, at.sequence, at.hidden] = result
    return by_coordinate


def axes_that_differ(by_coordinate):
    """The axes along which ranks have drawn differently; along all others, they must have drawn exactly alike."""
    differing = set()
    for (first, x), (second, y) in itertools.combinations(by_coordinate.items(), 2):
        if not torch.equal(x, y):
            differing.add(tuple(axis for axis, a, b in zip(AXES, first, second, strict=True) if a != b))
    return {axis for axes in differing if len(axes) == 1 for axis in axes}


def dropped(*shape):
    return nn.functional.dropout(torch.ones(shape), 0.25)


@pytest.fixture(autouse=True)
def generator_of_others():
    before = torch.get_rng_state()
    yield
    torch.set_rng_state(before)


@pytest.mark.parametrize(
    ("draw", "place", "expected"),
    [
        (lambda: dropped(ROWS, LENGTH, WIDTH), PART, set(AXES)),
        # Features of an MLP, scores of attention (of a single head too), and tokens of all rows in one dim.
        (lambda: dropped(ROWS, 2 * LENGTH, 7), PART, set(AXES)),
        (lambda: dropped(ROWS, 1, 6, 6), PART, set(AXES)),
        (lambda: dropped(ROWS * LENGTH, WIDTH), PART, set(AXES)),
        (lambda: torch.empty(ROWS, LENGTH, WIDTH).uniform_(), PART, set(AXES)),
        (lambda: torch.rand_like(torch.ones(ROWS, LENGTH, WIDTH)), PART, set(AXES)),
        # One number for each row (stochastic depth), token, or feature.
        (lambda: torch.rand((ROWS, 1, 1)), PART, {"batch"}),
        (lambda: torch.ones(ROWS, 1, 1).bernoulli_(0.5) + torch.rand(ROWS), PART, {"batch"}),
        (lambda: torch.rand(ROWS, LENGTH, 1), PART, {"batch", "sequence"}),
        (lambda: nn.functional.dropout1d(torch.ones(ROWS, LENGTH, WIDTH)), PART, {"batch", "sequence"}),
        (lambda: torch.rand(ROWS, 1, WIDTH), PART, {"batch", "hidden"}),
        # For all rows alike.
        (lambda: dropped(1, LENGTH, WIDTH), PART, {"sequence", "hidden"}),
        # Whole activations, what a router knows, and what every rank has.
        (lambda: dropped(ROWS, 6, 8), replace(PART, holding="rows"), {"batch"}),
        (lambda: dropped(ROWS, 6, 8), replace(PART, late=WHOLE), {"batch"}),
        (lambda: dropped(ROWS * LENGTH, 5), replace(PART, holding="tokens"), {"batch", "sequence"}),
        (lambda: dropped(2 * ROWS, 5), replace(PART, holding="all"), set()),
        # Whether a layer runs.
        (lambda: torch.rand([]), LIST, set()),
        (lambda: torch.rand(1), LIST, set()),
    ],
)
def test_ranks_draw_differently_along_the_axes_along_which_they_have_different_parts(draw, place, expected):
    assert axes_that_differ(on_each_rank(draw, place)) == expected


def test_masks_of_different_parts_are_independent_and_drop_at_the_rate():
    masks = [x == 0 for x in on_each_rank(lambda: dropped(ROWS, 100, 100)).values()]
    assert all(mask.float().mean().item() == pytest.approx(0.25, abs=0.01) for mask in masks)
    for first, second in itertools.combinations(masks, 2):
        assert (first == second).float().mean().item() == pytest.approx(0.25**2 + 0.75**2, abs=0.02)


def test_masks_change_from_call_to_call_and_repeat_when_the_state_is_restored():
    def draw():
        state = torch.get_rng_state()
        first, second = dropped(ROWS, LENGTH, WIDTH), dropped(ROWS, LENGTH, WIDTH)
        torch.set_rng_state(state)
        return first, second, dropped(ROWS, LENGTH, WIDTH)

    for first, second, again in on_each_rank(draw).values():
        assert not torch.equal(first, second)
        assert torch.equal(first, again)


def test_whether_a_layer_runs_is_drawn_as_in_the_plain_model():
    torch.manual_seed(0)
    plain = torch.rand([])
    assert all(torch.equal(x, plain) for x in on_each_rank(lambda: torch.rand([]), LIST).values())


def test_nothing_is_drawn_for_what_drops_nothing():
    def draw():
        x = torch.ones(5, 7)
        nn.functional.dropout(x, 0.0)
        nn.functional.dropout(x, 0.5, training=False)
        nn.functional.scaled_dot_product_attention(x, x, x)
        return torch.rand([])

    torch.manual_seed(0)
    plain = torch.rand([])
    assert all(torch.equal(x, plain) for x in on_each_rank(draw, LIST).values())


@pytest.mark.parametrize("draw", [lambda: torch.rand(5, 7), lambda: torch.randperm(6), lambda: dropped(5, 7, 2)])
def test_what_may_have_to_be_alike_or_not_is_refused_by_name(draw):
    with pytest.raises(UnsupportedModelError, match=r"Layer \(layers.0\) draws random numbers \[.*\] with"):
        on_each_rank(draw)


def test_a_dropout_that_a_script_has_replaced_is_called_once_and_gets_the_same_seeds(monkeypatch):
    plain, calls = nn.functional.dropout, []

    def spy(x, p=0.5, training=True, inplace=False):
        calls.append(p)
        return plain(x, p, training)

    expected = on_each_rank(lambda: dropped(ROWS, LENGTH, WIDTH))
    monkeypatch.setattr(nn.functional, "dropout", spy)
    actual = on_each_rank(lambda: dropped(ROWS, LENGTH, WIDTH))
    assert len(calls) == SHAPE.size
    assert all(torch.equal(actual[at], expected[at]) for at in expected)


class Differing:
    """Says that the ranks' generators differ."""

    def number_if_differing(self):
        return 5

    def require_equal(self):
        raise CuboidError("generators differ")


def test_generators_that_differ_are_an_error_only_where_ranks_must_agree():
    differing = {"generators": Differing(), "seed": lambda rank: rank}
    assert axes_that_differ(on_each_rank(lambda: dropped(ROWS, LENGTH, WIDTH), **differing)) == set(AXES)
    for draw in (lambda: torch.rand(ROWS, 1, 1), lambda: torch.rand([])):
        with pytest.raises(CuboidError, match="differ"):
            on_each_rank(draw, **differing)
    # Which layers run is drawn from a number of the first rank, another one each time.
    layers_run = on_each_rank(lambda: torch.stack([torch.rand([]), torch.rand([])]), LIST, **differing)
    assert axes_that_differ(layers_run) == set()
    first, second = layers_run[0, 0, 0]
    assert first != second


def test_a_block_that_draws_nothing_leaves_the_hosts_generator_alone():
    mesh = Mesh(SHAPE, rank=3, world_size=SHAPE.size)
    state = torch.get_rng_state()
    with compared_by(Differing()):
        with random_numbers_of_block(mesh, torch.device("cpu")):
            torch.zeros(3)
        assert torch.equal(torch.get_rng_state(), state)
        with pytest.raises(CuboidError, match="differ"), random_numbers_of_block(mesh, torch.device("cpu")):
            torch.rand(3)


def test_in_a_block_rows_differ_and_decisions_do_not():
    def draw():
        with random_numbers_of_block(Mesh(SHAPE, rank=0, world_size=SHAPE.size), torch.device("cpu")):
            return torch.rand([])

    assert axes_that_differ(on_each_rank(draw, replace(PART, holding="rows"))) == set()


def test_what_blocks_draw_changes_from_block_to_block():
    def block():
        with random_numbers_of_block(Mesh(SHAPE, rank=0, world_size=SHAPE.size), torch.device("cpu")):
            return dropped(ROWS, LENGTH, WIDTH)

    for first, second in on_each_rank(lambda: (block(), block()), replace(PART, holding="rows")).values():
        assert not torch.equal(first, second)
