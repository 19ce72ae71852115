"""The documentation says what the code does: generated parts are up to date, links resolve, examples are valid."""

import ast
import importlib
import json
import multiprocessing
import re
import runpy
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import yaml

from launching import ROOT, run

sys.path.insert(0, str(ROOT / "docs"))

import generate
from generators import architectures

import cuboid
from cuboid.config.compatibility import check_framework_config

DEVELOPERS = [ROOT / "CONTRIBUTING.md", ROOT / "tests" / "README.md", ROOT / "benchmarks" / "README.md"]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *DEVELOPERS, *sorted((ROOT / "docs").rglob("*.md"))]

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, *languages: str) -> list[str]:
    """Contents of a page's code blocks in the given languages."""
    fenced = re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [text for language, text in fenced if language in languages]


def prose(page: Path) -> str:
    """A page without its code."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(page: Path) -> set[str]:
    """Names under which GitHub reaches a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_relative_links_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), f"{page.name} links to {target}, which does not exist"
        assert not anchor or anchor in anchors(linked), f"{page.name} links to {target}, which has no such heading"


def test_files_that_are_to_be_touched_exist():
    folders = [ROOT, ROOT / "plugin" / "cuboid", ROOT / "patches"]
    there = {path.name for top in ("plugin", "docs", "tests") for path in (ROOT / top).rglob("*.*")}
    for name in re.findall(r"`([\w./-]+\.(?:py|md|json|toml|txt))`", DEVELOPERS[0].read_text(encoding="utf-8")):
        is_there = name in there if "/" not in name else any((folder / name).exists() for folder in folders)
        assert is_there or (ROOT / name).exists(), f"CONTRIBUTING.md names {name}, which does not exist"


@pages
def test_python_blocks_compile_and_use_the_public_api(page):
    for text in blocks(page, "python"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "cuboid":
                assert node.attr in cuboid.__all__


@pages
def test_configs_are_valid(page):
    loaded = [yaml.safe_load(text) for text in blocks(page, "yaml")]
    loaded += [json.loads(re.sub(r"//.*", "", text)) for text in blocks(page, "json", "jsonc")]
    for config in loaded:
        if "tensor_parallel" in config or "pipeline" in config:
            ours, rest = cuboid.split_config(config)
            assert ours is not None
            # An automatic mesh without a size is for as many ranks as there are.
            check_framework_config(ours, rest, ours.ranks if ours.tensor_parallel.is_sized else ours.stages)


@pages
def test_named_make_targets_exist(page):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = {name for text in blocks(page, "bash") for name in re.findall(r"^make ([a-z-]+)", text, re.MULTILINE)}
    assert named <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


def test_settings_that_the_page_calls_refused_are_refused():
    table = (ROOT / "docs" / "config.md").read_text(encoding="utf-8").partition("| refused |")[2]
    sections = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert len(sections) > 5
    mode, _ = cuboid.split_config({"tensor_parallel": {"mode": "3d_tensor", "mesh": {"sequence": 2}}})
    assert mode is not None
    for name in sections:
        with pytest.raises(cuboid.ConfigError, match=name):
            check_framework_config(mode, {name: {"enabled": True}}, 2)


#: Generated parts whose searches and schedules take longest.
LONG = {"choosing": pytest.mark.slow, "timeline": pytest.mark.slow, "planner": pytest.mark.ci}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=LONG.get(case, ())) for case in (*generate.WRITTEN, *generate.MEASURED)],
)
def test_generated_parts_are_up_to_date(case):
    assert generate.main([case, "--check"]) == 0


def test_a_change_of_code_after_a_measurement_fails_no_check_but_is_told_when_pages_are_made(monkeypatch, tmp_path):
    for page in (ROOT / "docs").glob("*.md"):
        shutil.copy(page, tmp_path)
    monkeypatch.setattr(generate, "DOCS", tmp_path)
    monkeypatch.setattr(generate.freshness, "fingerprint", lambda *_: "another")
    assert generate.main(["colossalai_3d", "--check"]) == 0
    assert generate.main(["colossalai_3d", "--figures", str(tmp_path)]) == 0
    assert "has changed since.**" in (tmp_path / "colossalai.md").read_text(encoding="utf-8")


def test_a_page_that_is_out_of_date_is_named(monkeypatch, tmp_path, capsys):
    for source in (ROOT / "docs").glob("*.md"):
        shutil.copy(source, tmp_path)
    page = tmp_path / "config.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("| key | type |", "| key | kind |"), encoding="utf-8")
    monkeypatch.setattr(generate, "DOCS", tmp_path)
    assert generate.main(["config", "--check"]) == 1
    assert f"{page} is out of date; run: python docs/generate.py" in capsys.readouterr().err
    assert generate.main(["config", "--figures", str(tmp_path)]) == 0
    assert page.read_text(encoding="utf-8") == text


def test_a_new_record_is_taken_over(monkeypatch, tmp_path):
    measured = importlib.import_module("generators.measured")
    record = json.loads((measured.RECORDS / "memory.json").read_text(encoding="utf-8"))
    record["command"] = "another one"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "memory.json").write_text(json.dumps(record), encoding="utf-8")
    page = tmp_path / "performance.md"
    page.write_text((ROOT / "docs" / "performance.md").read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(generate, "DOCS", tmp_path)
    monkeypatch.setattr(measured, "RECORDS", tmp_path)
    assert generate.main(["--from", str(tmp_path / "run"), "--figures", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "memory.json").read_text(encoding="utf-8")) == record
    assert "| 1 | `another one` |" in page.read_text(encoding="utf-8")
    assert (tmp_path / "memory.png").exists()
    with pytest.raises(SystemExit):
        generate.main(["--from", str(ROOT / "tests")])


@pytest.mark.ci
def test_pictures_are_drawn_alike_each_time(tmp_path):
    for folder in ("one", "two"):
        assert generate.main(["layout", "traffic", "memory", "--check", "--figures", str(tmp_path / folder)]) == 0
    for name in ("layout.svg", "layout.png", "traffic.png", "memory.png"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def without_errors(table):
    return {
        "rejected": table["rejected"],
        "flavours": table["flavours"],
        "architectures": {
            key: {**entry, "error": 0} for group in table["architectures"].values() for key, entry in group.items()
        },
    }


@pytest.mark.slow
def test_the_table_of_architectures_is_what_their_probes_find_today(tmp_path):
    table = tmp_path / "table.json"
    shutil.copyfile(architectures.TABLE, table)
    cases = architectures.causal_cases()
    # Of two processes, since it takes minutes; fresh ones, because a thread of the tests' own can hold a lock.
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        for case, (key, entry) in zip(cases, pool.map(architectures.probe_pipeline, cases), strict=True):
            architectures.write_entry(table, case, key, entry)
    probed, known = (without_errors(json.loads(path.read_text())) for path in (table, architectures.TABLE))
    for part in probed:
        assert probed[part] == known[part]


@pytest.mark.slow
@pytest.mark.parametrize("path", [architectures.TABLE, architectures.MESH_TABLE], ids=lambda path: path.stem)
def test_loading_finds_every_entry_of_the_tables(path):
    """An entry under another key would be probed again on each machine."""
    table = json.loads(path.read_text(encoding="utf-8"))
    for part in ("flavours", "heads"):
        cases = {(model_type, name): key for model_type, names in table[part].items() for name, key in names.items()}
        for case, key in cases.items():
            cls, config = architectures.config_of(*case) if part == "flavours" else architectures.head_of(case)
            assert architectures.digest_of(architectures.features_of(cls, config)) == key, case


def test_a_case_that_there_is_not_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        generate.main(["timelines"])
    assert ended.value.code == 2
    assert "there is no timelines; there are api, architectures" in capsys.readouterr().err


def test_make_hands_cases_on():
    status, output = run("make", "--dry-run", "docs", "CASE=timeline traffic", "ARGS=--check")
    assert status == 0, output
    assert re.search(r"docs/generate\.py timeline traffic --check$", output, re.MULTILINE)


def test_the_tests_that_run_with_other_versions_exist():
    for test in runpy.run_path(str(ROOT / ".ci" / "versions"))["TESTS"]:
        file, _, name = test.partition("::")
        functions = {node.name for node in ast.parse((ROOT / file).read_text()).body if hasattr(node, "name")}
        assert not name or name in functions, test
