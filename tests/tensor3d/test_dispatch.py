"""Rows that are sorted by expert, and products of each expert's own rows, against the obvious way of computing them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cuboid.errors import CuboidError
from cuboid.tensor3d.experts import dispatch as dispatching
from cuboid.tensor3d.experts.dispatch import Dispatch, multiply_rows, multiply_transposed

FEATURES, OUTPUTS = 3, 5


@st.composite
def choices(draw):
    """Choices of some tokens, often with experts that nobody or everybody chose, and the number of experts."""
    count, tokens = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    per_token = draw(st.integers(1, count))
    rows = st.permutations(range(count)).map(lambda experts: experts[:per_token])
    alike = draw(st.booleans())
    chosen = [draw(rows)] * tokens if alike else [draw(rows) for _ in range(tokens)]
    return torch.tensor(chosen), count


def numbers(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@given(choices())
def test_rows_are_sorted_and_belong_to_their_tokens(case):
    chosen, count = case
    dispatch = Dispatch.of(chosen, count)
    assert sorted(dispatch.choices.tolist()) == list(range(chosen.numel()))
    assert torch.equal(chosen.flatten()[dispatch.choices], dispatch.experts)
    for expert, (start, stop) in enumerate(dispatch.spans):
        assert (dispatch.experts[start:stop] == expert).all()
        assert stop - start == (chosen == expert).sum()
        # The order of the tokens, on every rank.
        assert torch.equal(dispatch.tokens[start:stop], dispatch.tokens[start:stop].sort()[0])


@given(choices())
def test_sums_over_tokens_are_the_transpose_of_rows(case):
    chosen, count = case
    dispatch = Dispatch.of(chosen, count)
    x, y = numbers(len(chosen), FEATURES), numbers(chosen.numel(), FEATURES)
    torch.testing.assert_close((dispatch.rows(x) * y).sum(), (x * dispatch.token_sums(y)).sum())


@given(choices())
def test_products_are_those_of_each_row_by_itself(case):
    chosen, count = case
    dispatch = Dispatch.of(chosen, count)
    x, weight = numbers(chosen.numel(), FEATURES), numbers(count, FEATURES, OUTPUTS)
    expected = torch.einsum("rk,rkn->rn", x, weight[dispatch.experts])
    torch.testing.assert_close(multiply_rows(x, weight, dispatch), expected)
    by_out = weight.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(multiply_rows(x, by_out, dispatch), expected)
    y = numbers(chosen.numel(), OUTPUTS)
    of_expert = torch.nn.functional.one_hot(dispatch.experts.long(), count).double()
    sums = torch.einsum("re,rk,rn->ekn", of_expert, x, y)
    torch.testing.assert_close(multiply_transposed(x, y, dispatch), sums)


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="this torch has no grouped product")
@given(choices())
def test_the_kernel_is_given_what_it_takes(case):
    chosen, count = case
    dispatch = Dispatch.of(chosen, count)
    x, y = numbers(chosen.numel(), 8).bfloat16(), numbers(chosen.numel(), 16).bfloat16()
    weight = numbers(count, 16, 8).bfloat16().transpose(1, 2)
    expected = multiply_rows(x, weight, dispatch), multiply_transposed(x, y, dispatch)
    with pytest.MonkeyPatch.context() as patch:
        # On a CPU torch computes the same without a kernel for it.
        patch.setattr(dispatching, "has_kernel", lambda *_: True)
        actual = multiply_rows(x, weight, dispatch), multiply_transposed(x, y, dispatch)
    for product, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(product, other, rtol=2e-2, atol=2e-2)
    without_rows = [expert for expert, (start, stop) in enumerate(dispatch.spans) if start == stop]
    assert not actual[1][without_rows].any()


def test_rows_for_the_kernel_begin_at_sixteen_bytes():
    aligned = torch.zeros(4, 8, dtype=torch.bfloat16)
    assert dispatching._is_aligned(aligned)
    assert dispatching._is_aligned(torch.zeros(2, 16, 8, dtype=torch.bfloat16).transpose(1, 2))
    assert not dispatching._is_aligned(torch.zeros(4, 9, dtype=torch.bfloat16))
    assert not dispatching._is_aligned(torch.zeros(64, dtype=torch.bfloat16)[1:33].view(4, 8))
    assert not dispatching._is_aligned(torch.zeros(4, 12, dtype=torch.bfloat16)[:, :8])
    assert not dispatching.has_kernel(aligned)


def test_an_expert_that_there_is_not_is_an_error():
    dispatch = Dispatch.of(torch.tensor([[0, 3]]), 3)
    with pytest.raises(CuboidError, match="a router chose expert 3, and there are 3"):
        multiply_rows(numbers(2, FEATURES), numbers(3, FEATURES, OUTPUTS), dispatch)
