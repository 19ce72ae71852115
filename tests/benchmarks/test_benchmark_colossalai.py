"""The comparison with Colossal-AI's 3-D layers runs, and its figures are right. Times are not looked at."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TIMEOUT_S = 600

needs_peer = pytest.mark.skipif(
    importlib.util.find_spec("colossalai") is None,
    reason="colossalai isn't installed (`pip install --no-deps colossalai==0.5.0` and what it imports)",
)


@pytest.fixture
def instruments(monkeypatch):
    """The module that counts."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("three_d.sides")


@pytest.fixture
def places(monkeypatch):
    """The module that says who has what."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("three_d.sides")


# --- the instruments ---------------------------------------------------------------------------------------------


@given(rows=st.integers(1, 4), columns=st.integers(1, 4), ranks=st.integers(1, 3), seed=st.integers(0, 99))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
def test_pieces_that_make_up_the_whole_have_no_error(places, rows, columns, ranks, seed):
    full = torch.randn(rows * ranks, columns, generator=torch.Generator().manual_seed(seed))
    order = torch.randperm(rows * ranks, generator=torch.Generator().manual_seed(seed))
    cut = [(places.chunk(order, rank, ranks), places.everything(columns)) for rank in range(ranks)]
    pieces = [(places.take(full, place), place) for place in cut]

    def error(piece, place, others):
        """As the rank with ``piece`` has it, given the places of all others, whose parts are right."""

        def add_up(tensor):
            for other in others:
                index = torch.meshgrid(*other, indexing="ij")
                if tensor.dtype == torch.int32:
                    tensor[index] += 1
                else:
                    tensor += torch.stack([torch.zeros(()), full[index].square().sum()])

        return places.relative_error(full, piece, place, add_up)

    assert error(*pieces[0], cut[1:]) == 0
    if ranks > 1:
        assert error(*pieces[0], cut[2:]) == math.inf  # the second one's elements are nowhere
    part, place = pieces[0]
    with pytest.raises(AssertionError, match="a part is"):
        error(part[:, :0], place, cut[1:])
    assert error(torch.full_like(part, math.nan), place, cut[1:]) == math.inf
    assert error(part + 1, place, cut[1:]) == pytest.approx(((part.numel()) ** 0.5 / full.double().norm()).item())


def test_the_error_is_relative_to_the_norm(places):
    full = torch.tensor([[3.0, 4.0]])
    place = (places.everything(1), places.everything(2))
    assert places.relative_error(full, torch.tensor([[3.0, 4.5]]), place) == pytest.approx(0.1)


def test_the_peak_is_of_tensors_that_live_together(instruments):
    x = torch.ones(1000)
    with instruments.Meter([x]) as meter:
        y = x * 2
        z = (y + 1).view(10, 100)[1:]  # a view keeps the whole
        del y
        x.add_(1)  # was there before
        w = z * 2
    assert w.nbytes == 3600
    assert meter.peak_bytes == 4000 + 4000
    assert not meter.collectives


# --- the comparison ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Numbers of the smallest run."""
    out = tmp_path_factory.mktemp("benchmark")
    options = ["--quick", "--repeats", "1", "--limit", "0", "--out", str(out)]
    command = [sys.executable, str(BENCHMARKS / "colossalai_3d.py"), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    numbers = json.loads((out / "colossalai_3d.json").read_text(encoding="utf-8"))
    assert all(row["title"] in ended.stdout for row in numbers["rows"])
    return numbers


def rows_of(result, key):
    """A contestant's numbers, part by part."""
    return [row for row in result["rows"] if row["key"] == key]


@needs_peer
@pytest.mark.slow
def test_everyone_takes_part_in_both_cases(result):
    keys = ["colossalai_3d", "colossalai_3d_exchange", "cuboid", "cuboid_auto"]
    assert [(row["part"], row["key"]) for row in result["rows"]] == [
        (part, key) for part in ("mlp", "layer") for key in keys
    ]
    for row in result["rows"]:
        assert row["ratios"].keys() == {"colossalai_3d"}


@needs_peer
@pytest.mark.slow
def test_everyone_computes_what_one_process_computes(result):
    weights = {"mlp": 4, "layer": 12}
    for row in result["rows"]:
        assert len(row["errors"]) == 2 + weights[row["part"]]
        assert 0 < max(row["errors"].values()) < 1e-6


@needs_peer
@pytest.mark.slow
def test_the_peer_sends_the_same_either_way(result):
    for direct, exchanged in zip(
        rows_of(result, "colossalai_3d"), rows_of(result, "colossalai_3d_exchange"), strict=True
    ):
        assert direct["sent_bytes"] == exchanged["sent_bytes"]
        assert direct["collectives"] == ["all_gather", "all_reduce", "reduce_scatter"]
        assert exchanged["collectives"] == ["all_gather", "all_reduce", "all_to_all"]


@needs_peer
@pytest.mark.slow
def test_we_save_less(result):
    for ours, theirs in zip(rows_of(result, "cuboid"), rows_of(result, "colossalai_3d"), strict=True):
        assert max(ours["saved_bytes"]) < min(theirs["saved_bytes"])
