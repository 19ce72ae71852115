"""From Hugging Face to a mesh, to another mesh, and back: checkpoints of architectures of different kinds."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

import cuboid
from converting import run, same
from training import make_engine, ranks_of, settings, small_checkpoint, train

TIMEOUT_S = 240.0
#: The learning rate is 0 in the first two steps.
BEFORE, AFTER = 4, 2
#: Rotary, grouped heads; learned positions and fused projections; experts in two forms; latent attention; windows in
#: turns; a state space; a gated delta rule beside attention; ALiBi; parallel blocks; an encoder; two stacks.
AUTO = {
    **dict.fromkeys(("llama", "gpt2", "mixtral", "qwen3_moe", "deepseek_v3", "gemma3_text"), AutoModelForCausalLM),
    **dict.fromkeys(("mamba2", "qwen3_next", "bloom", "gpt_neox"), AutoModelForCausalLM),
    "bert": AutoModelForMaskedLM,
    **dict.fromkeys(("t5", "bart"), AutoModelForSeq2SeqLM),
}
SAVED, OTHER = settings("2x1x2"), settings("1x2x1")


def train_and_save(path, out):
    """Losses after the save."""
    engine = make_engine(path, SAVED)
    train(engine, BEFORE)
    engine.save_checkpoint(out)
    return train(engine, AFTER, skip=BEFORE)


def resume_and_save(path, out, again):
    """The same, and what was resumed and saved again."""
    engine = make_engine(path, OTHER)
    engine.load_checkpoint(out)
    engine.save_checkpoint(again)
    weights = {name: x.clone() for name, x in cuboid.full_state_dict(engine).items()}
    return train(engine, AFTER, skip=BEFORE), weights


@pytest.mark.slow
@pytest.mark.parametrize("architecture", AUTO)
def test_weights_survive_two_meshes_and_come_back_as_plain_ones(pool, architecture, tmp_path):
    path = small_checkpoint(AUTO[architecture], architecture, tmp_path / "model")
    out, again = tmp_path / "out", tmp_path / "again"
    wanted = pool.run(ranks_of(SAVED), train_and_save, path, str(out), timeout_s=TIMEOUT_S)[0]
    losses, weights = pool.run(ranks_of(OTHER), resume_and_save, path, str(out), str(again), timeout_s=TIMEOUT_S)[0]
    assert losses == pytest.approx(wanted, rel=1e-4)
    assert same(again / f"global_step{BEFORE}", out / f"global_step{BEFORE}")
    run(again, tmp_path / "plain")
    plain = AUTO[architecture].from_pretrained(tmp_path / "plain").state_dict()
    assert plain.keys() == weights.keys()
    assert all(torch.equal(plain[name], weights[name]) for name in weights)
    before = AUTO[architecture].from_pretrained(Path(path)).state_dict()
    # What was trained has moved.
    assert any(not torch.equal(plain[name], x) for name, x in before.items())
