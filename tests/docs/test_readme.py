"""What the README shows runs as written: the config, the script, the launch line, and the same in a pipeline."""

import json
import re
import shlex

import pytest
import torch
from transformers import AutoModelForCausalLM

from cuboid.requirements import RANGES
from cuboid.verify import SmallModel
from launching import BIN, ROOT, as_ranks, run
from warm_python import warm_python

README = (ROOT / "README.md").read_text(encoding="utf-8")
#: What a user's script has before the lines of the README: a folder to run in, and data.
BEGIN = """
import os, sys, torch
os.chdir({folder!r})
sys.argv = sys.argv[:1]
rows = torch.load("rows.pt")
batches = iter([{{"input_ids": ids, "labels": ids}} for ids in rows])
"""


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def config_of(*texts):
    """The config's blocks put together, as a user would."""
    merged = {}
    for text in texts:
        merged |= json.loads(re.sub(r"//.*", "", text))
    return merged


@pytest.fixture
def folder(tmp_path):
    """A folder with a checkpoint and rows of tokens where the README's lines expect them."""
    SmallModel("llama", heads=4, kv_heads=4).write(tmp_path / "path/to/checkpoint")
    generator = torch.Generator().manual_seed(0)
    torch.save([torch.randint(2, 131, (4, 32), generator=generator) for _ in range(8)], tmp_path / "rows.pt")
    return tmp_path


def loss_of(path, folder):
    """Plain transformers' mean loss over all rows."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        return torch.stack([model(input_ids=ids, labels=ids).loss for ids in torch.load(folder / "rows.pt")]).mean()


def test_it_is_short():
    assert len(README.splitlines()) <= 120


@pytest.mark.parametrize("page", ["README.md", "docs/scripts.md"])
def test_the_versions_are_those_that_the_import_accepts(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for package, name in (("torch", "PyTorch"), ("transformers", "transformers")):
        low, high = re.findall(r"(\d+)\.(\d+)", RANGES[package])
        assert f"{'.'.join(low)} to {high[0]}.{int(high[1]) - 1}" in text, name
    assert RANGES["deepspeed"].split(",")[0].removeprefix(">=") in text


def test_the_script_trains_when_it_is_launched(folder):
    config, _ = blocks("jsonc")
    script, _ = blocks("python")
    (launch,) = re.findall(r"^(torchrun .*?train\.py)", README, re.MULTILINE)
    (folder / "ds_config.json").write_text(config, encoding="utf-8")
    (folder / "train.py").write_text(BEGIN.format(folder=str(folder)) + script, encoding="utf-8")
    command, *arguments, _ = shlex.split(launch)
    status, output = run(warm_python(), BIN / command, *arguments, folder / "train.py", timeout_s=240)
    assert status == 0, output
    before, after = (loss_of(folder / path, folder) for path in ("path/to/checkpoint", "out/global_step8"))
    assert after < before - 0.01


@pytest.mark.ci
def test_the_same_script_trains_in_a_pipeline(folder):
    config = config_of(*blocks("jsonc"))
    script, step = blocks("python")
    (folder / "ds_config.json").write_text(json.dumps(config), encoding="utf-8")
    start, loop, _ = script.partition("for batch in batches:\n")
    assert loop
    begin = BEGIN.format(folder=str(folder))
    (folder / "train.py").write_text(f"{begin}{start}{step}print('LOSS', loss.item())\n", encoding="utf-8")
    ranks = config["pipeline"]["stages"] * 4
    assert f"on {ranks} ranks" in step
    for status, output in as_ranks(ranks, folder / "train.py"):
        assert status == 0, output
        (loss,) = re.findall(r"LOSS ([\d.]+)", output)
        assert float(loss) == pytest.approx(loss_of(folder / "path/to/checkpoint", folder).item(), rel=5e-3)
