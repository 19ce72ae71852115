"""The tutorials run as written, one after the other, in one folder."""

import json
import os
import re

import pytest

from launching import BIN, ROOT, run
from warm_python import warm_python

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An empty folder to work in."""
    return tmp_path_factory.mktemp("tutorial")


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """A folder for PATH, with the launcher and what it starts in forked processes."""
    commands = tmp_path_factory.mktemp("commands")
    launcher = commands / "torchrun"
    launcher.write_text(f'#!/bin/sh\nexec "{warm_python()}" "{BIN / "torchrun"}" "$@"\n', encoding="utf-8")
    launcher.chmod(0o755)
    return commands


def follow(page, folder, commands):
    """Write the files that a tutorial shows, under the names in the text above them, run its commands; their output."""
    text = (ROOT / "docs" / "tutorials" / f"{page}.md").read_text(encoding="utf-8")
    outputs = []
    for block in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if block[1] == "bash":
            path = os.pathsep.join((str(commands), str(BIN), os.environ["PATH"]))
            status, output = run("bash", "-ec", f'cd "{folder}"\n{block[2]}', PATH=path)
            assert status == 0, output
            outputs.append(output)
        else:
            section = text[: block.start()].rpartition("\n## ")[2]
            name = re.findall(r"`(\w+\.(?:py|json))`", section)[0]
            (folder / name).write_text(block[2], encoding="utf-8")
    return "\n".join(outputs)


def losses_of(output):
    return [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", output, re.MULTILINE)]


def test_they_run_as_written(folder, commands):
    output = follow("finetune", folder, commands)
    first = losses_of(output)
    assert len(first) == 20
    assert first[-1] < first[0] - 0.5
    assert re.search(r"^tensor\(", output, re.MULTILINE)
    assert re.search(r"all \d+ checks pass", output)

    output = follow("pipeline", folder, commands)
    second = losses_of(output)
    assert len(second) == 10
    assert max(second) < first[0] - 0.5
    assert list((folder / "trace").glob("*.png"))

    output = follow("plan", folder, commands)
    assert re.search(r"all \d+ checks pass", output)
    report = json.loads((folder / "run" / "report.json").read_text(encoding="utf-8"))
    assert report["losses"]["heldout_last"] < report["losses"]["heldout_first"]
    assert (folder / "run" / "model" / "config.json").is_file()
