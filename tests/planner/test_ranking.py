"""Layouts that fit by formulas, and the first of them that fits with what is alive in its layers counted."""

import logging
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console
from transformers import AutoConfig

from cuboid.config.schema import parse_config
from cuboid.distributed.topology import MeshShape
from cuboid.errors import ConfigError
from cuboid.planner import estimate as estimates
from cuboid.planner import ranking
from cuboid.planner.automatic import choose_mesh
from cuboid.planner.cost.step import StepCost
from cuboid.planner.description.cluster import Cluster
from cuboid.planner.estimate import Estimate, cuboid_software
from cuboid.planner.ranking import best_of
from cuboid.planner.report import print_plan
from cuboid.planner.search import layouts, search
from planning import LLAMA_8B, description_of, on_meta

#: Layouts whose formulas' bytes are above half of a GPU, and below all of it.
MODEL, CLUSTER, LENGTH, ROWS = {**LLAMA_8B, "num_hidden_layers": 4}, "2xA100-40GB", 8192, 4


def described():
    """The model by its sizes alone, of which formulas are fast."""
    return replace(description_of(MODEL), config=None)


@pytest.fixture
def counted(monkeypatch):
    """Counts in place of those of the layers' code, of which a test sets the rule; and the layouts that are counted."""

    class Counted(list):
        rule = staticmethod(lambda layout: 0)

    layouts_counted = Counted()

    def count(cost):
        layouts_counted.append(cost.layout)
        return layouts_counted.rule(cost.layout)

    monkeypatch.setattr(estimates, "counted_bytes", count)
    return layouts_counted


def every_cost():
    model, cluster, known = described(), Cluster.parse(CLUSTER), {}
    return [
        StepCost(model, layout, cluster, LENGTH, cuboid_software(layout), known=known)
        for layout in layouts(model, cluster, LENGTH, ROWS)
        if layout.stages == 1
    ]


def test_the_best_is_the_first_in_order_of_time_that_fits_by_its_count(counted):
    costs = every_cost()
    in_order = sorted((one for one in map(Estimate.of, costs) if one.fits), key=lambda one: one.time.total_s)
    assert best_of([costs], "this").best[0].time == in_order[0].time
    # All that recompute nothing take too much, and one mesh does.
    fast = {layout for layout in (one.layout for one in in_order) if layout.checkpointing == "none"}
    counted.rule = lambda layout: 1e12 if layout in fast or layout.mesh == MeshShape(2, 1, 1) else 0
    result = best_of([costs], "this")
    half = 0.5 * in_order[0].limit_bytes
    expected = next(one for one in in_order if one.memory_bytes <= half or not counted.rule(one.layout))
    assert result.best[0].time == expected.time
    assert result.refused > 0
    assert result.refused == sum(one.time.total_s < expected.time.total_s for one in in_order)


def test_layouts_that_take_less_than_half_are_not_counted(counted):
    assert search(described(), Cluster.parse("2xH200-141GB"), 1024, 2, count=1).refused == 0
    assert not counted


def test_where_no_count_fits_the_next_set_is_taken_and_at_last_an_error_names_the_smallest(
    counted, caplog, monkeypatch
):
    costs = [cost for cost in every_cost() if Estimate.of(cost).memory_bytes > 0.5 * Estimate.of(cost).limit_bytes]
    first, second = costs[::2], costs[1::2]
    counted.rule = lambda layout: 0 if layout in {cost.layout for cost in second} else 1e12
    result = best_of([first, second], "this")
    assert result.best[0].layout in {cost.layout for cost in second}
    assert not caplog.records
    # Where not all of the first set are counted, it is said.
    monkeypatch.setattr(ranking, "MOST_COUNTED", 2)
    with caplog.at_level(logging.WARNING):
        assert best_of([first, second], "this").refused == 2
    assert "later ones weren't counted" in caplog.text
    counted.rule = lambda layout: 1e12
    with pytest.raises(ConfigError, match=r"of the 4 best that fit by formulas, .* needs the least, 931\.3 GiB a GPU"):
        best_of([first, second], "this")


def test_search_and_the_mesh_auto_take_the_first_that_fits_by_its_count(counted):
    model, cluster = described(), Cluster.parse(CLUSTER)
    before = search(model, cluster, LENGTH, ROWS).best[0].layout
    counted.rule = lambda layout: 1e12 if layout.mesh == before.mesh else 0
    result = search(model, cluster, LENGTH, ROWS)
    assert result.best[0].layout.mesh != before.mesh
    output = StringIO()
    print_plan(result, Console(file=output, width=200))
    assert f"Before the first came {result.refused} that fit by formulas" in output.getvalue()

    config = parse_config(
        {
            "tensor_parallel": {"mode": "3d_tensor", "mesh": "auto", "size": 2}, "cluster": CLUSTER,
            "train_micro_batch_size_per_gpu": 4, "sequence_length": LENGTH,
        }
    )  # fmt: skip
    loaded = on_meta(AutoConfig.for_model(**MODEL))
    chosen = choose_mesh(loaded, config).mesh
    counted.rule = lambda layout: 1e12 if layout.mesh == chosen else 0
    assert choose_mesh(loaded, config).mesh != chosen
