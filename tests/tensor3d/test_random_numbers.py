"""Which generators a sharded dropout seeds, and that it leaves them as they were."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from cuboid.tensor3d.layers.dropout import own_random_numbers


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
    found = Devices()
    for name in ("device", "get_rng_state", "set_rng_state", "manual_seed"):
        monkeypatch.setattr(torch.cuda, name, getattr(found, name))
    return found


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
