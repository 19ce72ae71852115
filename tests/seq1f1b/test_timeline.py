"""Timelines as pictures, as Perfetto traces, and on the command line."""

import importlib
import json
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.image import imread
from transformers import LlamaConfig
from typer import BadParameter

from cuboid import CuboidError
from cuboid.cli import commands
from cuboid.cli.timeline import _Name
from cuboid.seq1f1b.schedule.actions import Action, Op
from cuboid.seq1f1b.schedule.choice import NAMES
from cuboid.seq1f1b.schedule.schedules import SCHEDULES, PipelineShape
from cuboid.seq1f1b.schedule.simulator import Span, Timeline, simulate
from cuboid.seq1f1b.schedule.timeline_picture import draw_timeline, draw_timelines, format_bytes
from cuboid.seq1f1b.schedule.timeline_trace import write_chrome_trace
from traces import read_chrome_trace

DOCS = Path(__file__).parents[2] / "docs"


def simulated(name="seq1f1b", stages=2, micro_batches=2, segments=2, scale_s=1.0):
    shape = PipelineShape(stages, micro_batches, segments)
    return simulate(
        SCHEDULES[name](shape),
        shape,
        lambda action: scale_s * (1 if action.op is Op.FORWARD else 2),
        kept_bytes=lambda _: 2**20,
    )


def test_the_command_takes_all_schedules_and_no_others():
    assert {*get_args(_Name)} == {*NAMES}


def lanes(path):
    """Columns of pixels that are blue, and that are orange, through the middle of each lane; the legend is left out."""
    red, _, blue = np.moveaxis(imread(path)[..., :3], -1, 0)
    is_blue, is_orange = blue - red > 0.15, red - blue > 0.15
    rows = np.flatnonzero((is_blue | is_orange).sum(axis=1) > 150)
    for group in np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1):
        # Near the lower edge there is no text.
        row = group[-len(group) // 10]
        yield is_blue[row], is_orange[row]


def test_boxes_are_as_long_as_the_work_and_idle_time_is_blank(tmp_path):
    timeline = simulated(stages=3, micro_batches=3)
    draw_timeline(timeline, tmp_path / "a.png", title="title")
    drawn = list(lanes(tmp_path / "a.png"))
    assert len(drawn) == 3
    width = max(np.flatnonzero(blue | orange)[-1] for blue, orange in drawn)
    width -= min(np.flatnonzero(blue | orange)[0] for blue, orange in drawn)
    for (blue, orange), idle in zip(drawn, timeline.bubbles, strict=True):
        # Lines between the boxes are white too.
        assert (blue | orange).sum() / width == pytest.approx(1 - idle, abs=0.04)
        assert orange.sum() / blue.sum() == pytest.approx(2, rel=0.06)


def test_a_shorter_step_is_drawn_shorter_on_the_common_axis(tmp_path):
    draw_timelines([("one", simulated()), ("half", simulated(scale_s=0.5))], tmp_path / "a.png")
    long, _, short, _ = (blue | orange for blue, orange in lanes(tmp_path / "a.png"))
    assert np.ptp(np.flatnonzero(short)) / np.ptp(np.flatnonzero(long)) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_same_timeline_gives_the_same_picture(tmp_path, suffix):
    messages = simulated()
    for name in "ab":
        draw_timeline(messages, tmp_path / f"{name}{suffix}", title="t", caption="c", time_label="time")
    first = (tmp_path / f"a{suffix}").read_bytes()
    assert first == (tmp_path / f"b{suffix}").read_bytes()
    if suffix == ".svg":
        assert ElementTree.fromstring(first).tag.endswith("svg")


def test_large_timelines_measured_ones_and_empty_ones_are_drawn(tmp_path):
    large = simulated(stages=16, micro_batches=16, segments=8, scale_s=1e-3)
    unit = (0, 0, 0)
    measured = Timeline(
        (
            (Span(Action(Op.FORWARD, *unit), 5.0, 6.0), Span(Action(Op.SEND_ACTIVATION, *unit), 6.0, 6.5)),
            (Span(Action(Op.INPUT_GRADIENT, 1, 0, 0), 7.0, 8.0), Span(Action(Op.WEIGHT_GRADIENT, 1, 0, 0), 8.0, 9.0)),
        ),
        (0, 0),
    )
    empty = Timeline(((), ()), (0, 0))
    draw_timelines([("large", large), ("measured", measured), ("empty", empty)], tmp_path / "a.png")
    assert imread(tmp_path / "a.png").shape[0] > 1000


def test_other_formats_are_refused(tmp_path):
    with pytest.raises(CuboidError, match=r"\.png, \.svg or \.pdf, not as 'a\.jpg'"):
        draw_timeline(simulated(), tmp_path / "a.jpg")


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (999, "999 B"), (1536, "1.5 KiB"), (73.7 * 2**30, "73.7 GiB"), (2**41, "2 TiB")]
)
def test_bytes_for_people(number, text):
    assert format_bytes(number) == text


def test_a_trace_is_read_back_as_it_was(tmp_path):
    timeline = simulated(stages=3, micro_batches=4, segments=3, scale_s=0.37)
    write_chrome_trace(timeline, tmp_path / "a.json", details={"step": 3})
    back = read_chrome_trace(tmp_path / "a.json")
    assert back.peak_bytes == timeline.peak_bytes
    assert back.bubble == pytest.approx(timeline.bubble, rel=1e-9)
    for spans, others in zip(timeline.spans, back.spans, strict=True):
        assert [span.action for span in spans] == [span.action for span in others]
        np.testing.assert_allclose([s.start_s for s in spans], [s.start_s for s in others], atol=1e-12)


def test_a_trace_is_what_perfetto_reads(tmp_path):
    timeline = simulated(stages=2)
    write_chrome_trace(timeline, tmp_path / "a.json", name="run", details={"step": 3})
    trace = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert trace["otherData"]["step"] == 3
    assert trace["otherData"]["bubble"] == timeline.bubble
    names = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert names == {0: "stage 0", 1: "stage 1"}
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(complete) == 2 * 2 * 2 * 2
    first = min(complete, key=lambda event: (event["tid"], event["ts"]))
    assert (first["name"], first["ts"], first["dur"]) == ("F0.0.0", 0, 1e6)
    assert first["args"] == {"action": "F0.0.0", "stage": 0, "micro_batch": 0, "segment": 0}


@pytest.fixture
def cli(tmp_path, capsys):
    """Runs ``cuboid timeline`` with a picture in the test's folder; returns its output."""

    def run(*arguments):
        commands(["timeline", "--output", str(tmp_path / "a.png"), *map(str, arguments)], standalone_mode=False)
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "vocab_size": 131,
    }
    LlamaConfig(**sizes, max_position_embeddings=4096).save_pretrained(folder)
    return folder


def test_the_command_prints_the_bubble_of_equal_units(cli, tmp_path):
    printed = cli("--stages", 4, "--micro-batches", 8, "--segments", 4)
    assert f"bubble {3 / 35:.1%}" in printed
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_uses_a_models_costs(cli, model):
    flops = cli("--stages", 2, "--micro-batches", 2, "--segments", 2, "--model", model, "--seq-len", 4096)
    even = cli(
        "--stages", 2, "--micro-batches", 2, "--segments", 2, "--model", model, "--seq-len", 4096, "--partition", "even"
    )  # fmt: skip
    assert "llama, 4096 tokens cut into 2048, 2048" in even
    assert "activations" in even

    def bubble(printed):
        return float(printed.partition("bubble ")[2].partition("%")[0])

    assert 20 <= bubble(flops) < bubble(even)


def test_the_command_tells_what_the_head_costs(cli, model, tmp_path):
    def head(vocabulary, *arguments):
        LlamaConfig.from_pretrained(model, vocab_size=vocabulary).save_pretrained(tmp_path)
        printed = cli("--model", tmp_path, "--seq-len", 64, "--json", tmp_path / "a.json", *arguments)
        return printed, json.loads((tmp_path / "a.json").read_text())["head"]

    printed, costs = head(131, "--stages", 2)
    assert "the head is worth 0.2 layers" in printed
    assert "spread" not in printed
    printed, costs = head(5000, "--stages", 2, "--micro-batches", 64)
    assert f"the head is worth {costs['layers']:.1f} layers and is {costs['of_stage']:.0%} of its stage" in printed
    # It has a layer beside it. With 64 micro-batches hardly any other time counts than that of the costliest stage.
    assert costs["excess"] == pytest.approx((1 + costs["layers"]) / ((6 + costs["layers"]) / 2) - 1)
    assert costs["costs"] == pytest.approx(1 - 1 / (1 + costs["excess"]), abs=0.02)


def test_the_command_searches_stages(cli, model, tmp_path):
    def makespan(balance):
        options = ("--stages", 4, "--micro-batches", 1, "--schedule", "zero_bubble", "--json", tmp_path / "a.json")
        cli("--model", model, "--seq-len", 64, "--stage-balance", balance, *options)
        return json.loads((tmp_path / "a.json").read_text())["makespan"]

    assert makespan("schedule") < min(makespan("flops"), makespan("halves"))
    with pytest.raises(BadParameter, match="--stage-balance schedule means nothing without --model"):
        cli("--stage-balance", "schedule")


def test_lengths_may_be_given_with_and_without_a_model(cli, model):
    assert "4 segments" in cli("--partition", "4,3,2,1")
    assert "8 tokens cut into 5, 3" in cli("--partition", "5,3", "--model", model)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--partition", "measured"), "times of real steps"),
        (("--partition", "flop"), "none of"),
        (("--seq-len", "64"), "--model PATH"),
        (("--model", "MODEL"), "needs --seq-len"),
        (("--model", "MODEL", "--seq-len", "63", "--multiple", "8"), "63 is not a multiple"),
        (("--model", "MODEL", "--seq-len", "64", "--partition", "32,16"), "adds up to 48"),
        (("--schedule", "auto-interleaved", "--chunks", "1"), "several chunks on each rank"),
        (("--model", "MODEL", "--seq-len", "64", "--stages", "7"), "6 layers"),
        (("--model", "MODEL", "--seq-len", "64", "--segments", "9", "--multiple", "8"), "8 or fewer would work"),
        (("--schedule", "1f1b", "--segments", "2"), 'take "seq1f1b"'),
        (("--model", "EMPTY", "--seq-len", "64"), "no config.json in it"),
    ],
)
def test_invalid_arguments_are_rejected_with_an_alternative(cli, model, tmp_path, arguments, problem):
    places = {"MODEL": model, "EMPTY": tmp_path}
    with pytest.raises((BadParameter, CuboidError)) as caught:
        cli(*(places.get(argument, argument) for argument in arguments))
    assert problem in str(caught.value)
    assert not (tmp_path / "a.png").exists()


@pytest.mark.slow
def test_the_page_is_up_to_date_and_its_picture_is_drawn(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(DOCS))
    generate = importlib.import_module("generate")
    assert generate.main(["timeline", "--check", "--figures", str(tmp_path)]) == 0
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
