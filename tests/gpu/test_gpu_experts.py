"""Products grouped by expert, by CUDA's kernel where there is one, against float64."""

import pytest
import torch

from cuboid.tensor3d.experts.dispatch import Dispatch, has_kernel, multiply_rows, multiply_transposed

#: Largest error in relation to the largest element.
TOLERANCES = {torch.bfloat16: 1e-2, torch.float32: 1e-3}


def chosen_experts(case, tokens, count, device):
    """Two experts of each token: any, the same for all tokens, or all but those that nobody chooses."""
    if case == "one":
        return torch.tensor([[1, 3]], device=device).expand(tokens, 2)
    experts = torch.rand(tokens, count, generator=torch.Generator(device).manual_seed(0), device=device)
    if case == "some":
        experts[:, ::2] = -1
    return experts.topk(2).indices


@pytest.mark.parametrize("tokens", [1, 61, 2048])
@pytest.mark.parametrize("case", ["any", "some", "one"])
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_grouped_products_are_right(device, dtype, case, tokens):
    count, into, out = 8, 256, 512
    generator = torch.Generator(device).manual_seed(1)

    def made(*shape):
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float64).to(dtype)

    dispatch = Dispatch.of(chosen_experts(case, tokens, count, device), count)
    x, y, weight = made(2 * tokens, into), made(2 * tokens, out), made(count, out, into).transpose(1, 2)
    knows_one = device.type == "cuda" and torch.cuda.get_device_capability()[0] in (9, 10)
    assert has_kernel(x, weight) == (knows_one and dtype == torch.bfloat16)
    of_expert = torch.nn.functional.one_hot(dispatch.experts.long(), count).double()
    wide = [tensor.double() for tensor in (x, y, weight)]
    rows = torch.stack([wide[0][row] @ wide[2][expert] for row, expert in enumerate(dispatch.experts.tolist())])
    sums = torch.einsum("re,rk,rn->ekn", of_expert, wide[0], wide[1])
    for mine, exact in ((multiply_rows(x, weight, dispatch), rows), (multiply_transposed(x, y, dispatch), sums)):
        error = (mine.double() - exact).abs().max() / exact.abs().max()
        assert error < TOLERANCES[dtype]
