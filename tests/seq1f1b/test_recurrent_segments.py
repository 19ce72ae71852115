"""Layers that hand something on from segment to segment: states of convolutions and recurrences, and attention that
gets its earlier keys from a cache. Loss and every gradient equal those of whole sequences."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import MeshShape
from cuboid.errors import UnsupportedModelError
from cuboid.models.attention.kept_attention import keep_attention
from cuboid.models.batch.length_cases import Case
from cuboid.models.certification import sides, trials
from cuboid.models.certification.float64 import precision
from cuboid.models.certification.small_config import small_config
from cuboid.models.kinds.probe_rows import probe_rows
from cuboid.models.stages.stage_cut import draw_outline
from cuboid.seq1f1b.attention.recurrent_states import RecurrentStates, carry_states, read_state

LENGTH = 13
OPTIONS = {
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},  # which its defaults leave out
    "megatron-bert": {"is_decoder": True},
}
#: A convolution and experts; a convolution, a gated delta rule and attention; a state space; attention of its own, also
#: with a bias over keys, windows, a cache among positional arguments; attention twice in a layer; lightning attention.
ARCHITECTURES = [
    *("lfm2_moe", "qwen3_next", "mamba2", "gptj"),
    *("bloom", "gpt_neo", "megatron-bert", "diffllama", "minimax"),
]


def difference(architecture, lengths, padding="none", **checkpointing):
    """The largest relative one, of the loss and all gradients, on as many stages as the probe's."""
    config = small_config(AutoConfig.for_model(architecture, **OPTIONS.get(architecture, {})))
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    # A recomputation runs where what keeps float64 doesn't reach, so that norms are computed in float32 then.
    with sides.quiet_cpu(), precision(keep_float64=not checkpointing):
        model = sides.random_model(cls, config, None, trials.ATTEMPTS[0])
        outline = draw_outline(cls, config)
        counts = sides.stage_counts(outline)
        stages = []
        for stage in range(len(counts)):
            mesh = Mesh(MeshShape(), pipe=len(counts), rank=stage, world_size=len(counts))
            stages.append(sides.make_stage(model, outline, counts, mesh, gives_cache=True))
            if checkpointing:
                stages[-1].gradient_checkpointing_enable(checkpointing)
        batch = probe_rows(Case("", LENGTH, padding), config.vocab_size)
        expected = sides.run_plain(model, batch)
        loss = sides.run_stages(stages, batch, lengths)
        return trials.largest_error(trials.ProbeOutcome(loss, sides.gradients_of(stages)), expected)[0]


@pytest.mark.sample(2)
@pytest.mark.parametrize("padding", ["none", "right"])
@pytest.mark.parametrize("lengths", [(6, 5, 2), (2, 3, 3, 3, 2)], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_segments_go_on_where_the_one_before_ended(architecture, lengths, padding):
    assert difference(architecture, lengths, padding) < 1e-9


@pytest.mark.sample(2)
@pytest.mark.parametrize("kept", [{}, {"context_fn": keep_attention}], ids=["layers", "attention"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_recomputation_reads_what_the_forward_read(architecture, kept):
    # Norms are in float32 here; a state of another segment would be wrong by more than a percent.
    assert difference(architecture, (6, 5, 2), use_reentrant=False, **kept) < 1e-4


def test_states_without_a_graph_are_refused():
    with pytest.raises(UnsupportedModelError, match="reentrant activation checkpointing"):
        difference("lfm2_moe", (6, 5, 2), use_reentrant=True)


def test_a_recurrence_needs_more_than_one_position():
    with pytest.raises(UnsupportedModelError, match="a single position"):
        difference("mamba2", (6, 1, 6))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 100))
def test_gradients_go_back_through_states(lengths, seed):
    """A recurrence ``y[t] = a[t] · y[t - 1] + x[t]``, in pieces."""
    generator = torch.Generator().manual_seed(seed)
    a, x = (torch.randn(sum(lengths), dtype=torch.float64, generator=generator).requires_grad_() for _ in range(2))

    def run(state, positions):
        ys = []
        for t in positions:
            state = x[t] if state is None else a[t] * state + x[t]
            ys.append(state)
        return torch.stack(ys), state

    in_one, _ = run(None, range(sum(lengths)))
    expected = torch.autograd.grad(in_one.square().sum(), (a, x), allow_unused=True)
    states, outputs, start = RecurrentStates(), [], 0
    for length in lengths:
        before = read_state(states, ("layer", start)) if start else None
        output, state = run(before, range(start, start + length))
        start += length
        states.write(("layer", start), state)
        outputs.append(carry_states(output, states, [("layer", start)], [state]))
    for output in reversed(outputs):
        output.square().sum().backward()
    torch.testing.assert_close(torch.cat([output.detach() for output in outputs]), in_one.detach())
    for parameter, gradient in zip((a, x), expected, strict=True):
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient)
    assert states.held_bytes == 0
