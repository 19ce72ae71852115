"""Every config that is shipped is valid for as many ranks as it says, and the commented ones say what they are for."""

import re

import pytest

from cuboid import split_config
from cuboid.config.compatibility import check_framework_config
from cuboid.config.config_file import load_config
from launching import ROOT

CONFIGS = ROOT / "configs"
COMMENTED = sorted((CONFIGS / "commented").glob("*.yaml"))
PATHS = [path for suffix in ("json", "yaml") for path in sorted(CONFIGS.rglob(f"*.{suffix}"))]


def ranks_of(config):
    """Of one replica; an automatic mesh without a size is for as many as there are."""
    return config.ranks if config.tensor_parallel.is_sized else config.stages


@pytest.mark.parametrize("path", PATHS, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_it_loads(path):
    ours, rest = split_config(load_config(path))
    assert ours is not None
    check_framework_config(ours, rest, ranks_of(ours), is_complete=path in COMMENTED and path.stem != "trainer")


@pytest.mark.parametrize("path", COMMENTED, ids=lambda path: path.stem)
def test_its_comments_are_right(path):
    text = path.read_text(encoding="utf-8")
    ours, _ = split_config(load_config(path))
    ranks = ranks_of(ours)
    head = text.partition("\n\n")[0]
    assert all(line.startswith("# ") for line in head.splitlines())
    assert f"# Ranks: {ranks} for each replica" in head
    assert f"--nproc-per-node {ranks} " in head
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert f"[`{path.name}`](../configs/commented/{path.name})" in page
    for name in re.findall(r"\((docs/\w+\.md|README\.md)", text):
        assert (ROOT / name).exists()


def test_every_commented_config_is_listed():
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert re.findall(r"\(\.\./configs/commented/([\w.]+)\)", page) == [
        *("mesh.yaml", "pipeline.yaml", "mesh_and_pipeline.yaml", "long_sequences.yaml", "fp8.yaml"),
        *("automatic.yaml", "float16.yaml", "host_optimizer.yaml", "muon.yaml", "trainer.yaml"),
    ]
    assert len(COMMENTED) == 10
