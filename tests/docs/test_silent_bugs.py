"""Scripts of docs/silent_bugs.md say of the installed peers what the page says: what is wrong, and what isn't now."""

import importlib.util
import re

import pytest

from launching import ROOT, torchrun

SCRIPTS = ROOT / "docs" / "examples" / "silent"


def load(name):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(f"silent_{name}", SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_documents_see_each_other_by_default_in_transformers(attention):
    errors = load("packing").measure(attention)
    assert errors["position_ids"] > 0.1
    assert errors["position_ids, attention_mask of ones"] > 0.1
    assert errors["position_ids, use_cache=False"] < 1e-5


def test_accelerate_refuses_windows_under_context_parallelism_and_loses_documents():
    errors = load("context_parallel").measure()
    assert "refused" in str(errors["sliding window of 8 of 24"])
    assert errors["two documents in a row"] > 0.1


def test_chunks_of_automodels_loss_are_a_mean():
    pytest.importorskip("nemo_automodel")
    assert load("chunked_loss").measure() == pytest.approx(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "ranks", "name", "least", "most"),
    [
        ("tensor_parallel", 2, r"q_norm", 0, 1e-5),
        ("experts", 2, r"routers' gradients", 0, 1e-5),
        ("fsdp", 2, r"rank 0: error of the gradient", 0.7, 0.8),
        ("fsdp", 2, r"rank 1: error of the gradient", 0.2, 0.3),
        ("accumulation", 1, r"deepspeed [\d.]+:", 0.999, 1.001),
    ],
)
def test_what_processes_find(script, ranks, name, least, most):
    status, output = torchrun(ranks, SCRIPTS / f"{script}.py")
    assert status == 0, output
    match = re.search(rf"{name} ([\d.e+-]+)", output)
    assert match is not None, output
    assert least <= float(match[1]) <= most, output


def test_every_script_is_on_the_page_and_short():
    page = (ROOT / "docs" / "silent_bugs.md").read_text(encoding="utf-8")
    for script in SCRIPTS.glob("*.py"):
        assert f"(examples/silent/{script.name})" in page
        assert len(script.read_text(encoding="utf-8").splitlines()) <= 60
