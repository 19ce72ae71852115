"""LoRA whose factors are in another dtype than the model: float32 beside 16 bits, PEFT's default."""

import copy
from contextlib import nullcontext

import pytest
import torch
from test_lora import Adapted, adapted, batch, built, inner_names
from test_lora_stages import Staged

from cuboid.models.certification.float64 import KeepFloat64
from threaded import step_of

pytest.importorskip("peft", reason="PEFT isn't installed")
from peft import PeftModel


def step(autocast=None):
    def with_autocast(model):
        with nullcontext() if autocast is None else torch.autocast("cpu", autocast):
            loss = model(**micro_batch(), use_cache=False).loss
        loss.backward()
        return loss.detach()

    return with_autocast


def micro_batch():
    rows = batch()
    # In a pipeline, the last position has no label.
    rows["labels"][:, -1] = -100
    return rows


def gradients_of(model):
    return {name: x.grad for name, x in inner_names(model).items() if x.requires_grad}


def distance(these, others):
    """Between two sets of gradients, relative to the second one."""
    squares = [
        ((these[name].double() - other.double()).square().sum(), other.double().square().sum())
        for name, other in others.items()
    ]
    difference, size = map(sum, zip(*squares, strict=True))
    return float((difference / size).sqrt())


class Expected:
    """What plain PEFT gives in a dtype, and what it would give of the same values in float64."""

    def __init__(self, dtype, autocast=None, **options):
        self.model = built("llama", kv_heads=2).to(dtype)
        plain = adapted(copy.deepcopy(self.model), **options)
        exact = copy.deepcopy(plain).double()
        self.plain, self.step = plain, step(autocast)
        self.loss = float(self.step(plain))
        self.gradients = gradients_of(plain)
        assert {gradient.dtype for gradient in self.gradients.values()} == {torch.float32}
        with KeepFloat64():
            self.exact_loss = float(step_of(**micro_batch())(exact))
        self.exact_gradients = gradients_of(exact)

    def check(self, loss, gradients, *, same_operations):
        assert gradients.keys() == self.gradients.keys()
        assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
        error = distance(self.gradients, self.exact_gradients)
        # Sums in another order are rounded elsewhere, and no more.
        assert distance(gradients, self.exact_gradients) < 1.6 * error
        assert distance(gradients, self.gradients) < 1.6 * error
        if same_operations:
            # A CPU's kernels may sum fewer rows in another order.
            assert float(loss) == pytest.approx(self.loss, rel=0.01 * error)
        else:
            assert float(loss) == pytest.approx(self.exact_loss, rel=0.1 * error)


CASES = [
    (torch.bfloat16, None, "1x2x1"),
    (torch.bfloat16, None, "2x1x1"),
    (torch.bfloat16, None, "2x2x2"),
    (torch.float16, None, "1x1x2"),
    (torch.float16, None, "2x1x1"),
    (torch.bfloat16, torch.bfloat16, "1x2x1"),
    (torch.float32, torch.bfloat16, "2x1x1"),
]


@pytest.mark.sample(2, ci="others")
@pytest.mark.parametrize(("dtype", "autocast", "mesh"), CASES, ids=str)
def test_factors_in_float32_are_multiplied_as_in_plain_peft(dtype, autocast, mesh):
    expected = Expected(dtype, autocast)
    threaded = Adapted(expected.model, mesh)
    losses = threaded.run(step(autocast))
    gradients = threaded.whole(lambda parameter: parameter.grad)
    # Ranks of `batch` have whole products, of fewer rows.
    expected.check(losses[0], gradients, same_operations=mesh == "2x1x1")


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(
    ("dtype", "mesh", "lengths"), [(torch.bfloat16, "1x1x1", (5, 4, 3)), (torch.float16, "1x2x1", (8, 4))], ids=str
)
def test_factors_in_float32_in_segments(tmp_path, dtype, mesh, lengths):
    expected, staged = Expected(dtype), Staged(built("llama", kv_heads=2).to(dtype), mesh)
    expected.plain.save_pretrained(tmp_path)
    staged.models = [PeftModel.from_pretrained(model, tmp_path, is_trainable=True) for model in staged.models]
    losses = staged.step(micro_batch(), lengths)
    expected.check(losses[0], staged.gradients(), same_operations=mesh == "1x1x1")


def test_parameters_that_are_cast_after_the_model_was_sharded_keep_their_dtypes():
    """Small ones of a layer share a collective, but never a dtype."""
    threaded = Adapted(built("llama", kv_heads=2).bfloat16(), "2x1x1")

    def is_cast(name):
        return "q_proj.lora_" in name

    for model in threaded.models:
        for name, parameter in model.named_parameters():
            if is_cast(name):
                parameter.data = parameter.data.bfloat16()
    threaded.run(step())
    gradients = threaded.whole(lambda parameter: parameter.grad)
    assert {gradient.dtype for name, gradient in gradients.items() if is_cast(name)} == {torch.bfloat16}
    assert {gradient.dtype for name, gradient in gradients.items() if not is_cast(name)} == {torch.float32}


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_merging_rounds_once_as_in_plain_peft(dtype):
    expected = Expected(dtype)
    threaded = Adapted(expected.model, "1x2x2")
    threaded.run(lambda model: model.merge_adapter())
    expected.plain.merge_adapter()
    merged = threaded.whole(lambda parameter: parameter.detach())
    for name, parameter in inner_names(expected.plain).items():
        assert torch.equal(merged[name], parameter), name
