"""Layers that hand on states, on several processes: loaded as slices, trained in segments, saved and resumed."""

import pytest
from transformers import AutoModelForCausalLM

from cuboid.verify import WorkerPool
from training import make_engine, ranks_of, settings, small_checkpoint, train

TIMEOUT_S = 240.0
BEFORE, AFTER = 3, 3
#: A convolution and experts; a convolution, a gated delta rule, attention and experts; a state space.
OPTIONS = {"lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16}, "qwen3_next": {}, "mamba2": {}}
SAVED = settings("2x1x1", stages=2)
OTHERS = {"one process": settings(), "1×2×1": settings("1x2x1"), "3 stages": settings(stages=3)}


def train_and_save(path, config, out):
    """Losses up to the save, and after it."""
    engine = make_engine(path, config)
    before = train(engine, BEFORE)
    engine.save_checkpoint(out)
    return before, train(engine, AFTER, skip=BEFORE)


def resume(path, config, out):
    """Losses after the save."""
    engine = make_engine(path, config)
    engine.load_checkpoint(out)
    return train(engine, AFTER, skip=BEFORE)


def run(pool, function, path, config, out):
    """What the first rank returns."""
    if ranks_of(config) > 1:
        return pool.run(ranks_of(config), function, path, config, out, timeout_s=TIMEOUT_S)[0]
    # A process that has had no engine yet: DeepSpeed keeps the groups of the first one.
    with WorkerPool(1) as alone:
        return alone.run(1, function, path, config, out, timeout_s=TIMEOUT_S)[0]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", OPTIONS)
def test_it_trains_and_resumes_as_in_one_process(pool, architecture, tmp_path):
    path = small_checkpoint(AutoModelForCausalLM, architecture, tmp_path / "model", **OPTIONS[architecture])
    out = str(tmp_path / "out")
    expected = run(pool, train_and_save, path, settings(), str(tmp_path / "alone"))
    before, after = run(pool, train_and_save, path, SAVED, out)
    assert before == pytest.approx(expected[0], rel=1e-5)
    assert after == pytest.approx(expected[1], rel=1e-5)
    assert run(pool, resume, path, SAVED, out) == after
    for config in OTHERS.values():
        assert run(pool, resume, path, config, out) == pytest.approx(after, rel=1e-5)
    model = AutoModelForCausalLM.from_pretrained(f"{out}/global_step{BEFORE}")
    assert model.config.model_type == architecture
