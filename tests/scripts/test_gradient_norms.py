"""Norms of gradients that a script takes by torch's functions, without an engine: of whole gradients, on every rank."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM

import cuboid
from conftest import TIMEOUT_S
from cuboid.models.certification.float64 import KeepFloat64
from cuboid.verify import SmallModel
from threaded import Threaded


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(SmallModel("llama", heads=4, kv_heads=2).config(), dtype=torch.float64)


def clipped(model, norm_type):
    """A norm, that of some parameters, and what a module of the script's own has after clipping, beside the model's."""
    linear = nn.Linear(3, 2).double()
    with torch.no_grad():
        linear.weight.fill_(0.5)
        linear.bias.zero_()
    model.zero_grad()
    ids = torch.randint(0, 100, (4, 12), generator=torch.Generator().manual_seed(1))
    (model(input_ids=ids, labels=ids, use_cache=False).loss + linear(torch.ones(3).double()).sum()).backward()
    embedding = nn.utils.get_total_norm([p.grad for n, p in model.named_parameters() if "embed" in n], norm_type)
    parameters = [*model.parameters(), *linear.parameters()]
    norm = clip_grad_norm_(parameters, 0.3, norm_type, error_if_nonfinite=True)
    return torch.stack([norm, embedding, linear.weight.grad[0, 0], nn.utils.get_total_norm(p.grad for p in parameters)])


@pytest.mark.parametrize("norm_type", [2.0, 3.0, math.inf])
def test_torch_clips_shards_by_the_norm_of_whole_gradients(model, norm_type):
    with KeepFloat64():
        expected = clipped(copy.deepcopy(model), norm_type)
    for values in Threaded(model, "1x2x2").run(lambda on_rank: clipped(on_rank, norm_type)):
        torch.testing.assert_close(values, expected, rtol=1e-9, atol=1e-9)


def test_a_copy_of_a_sharded_model_has_norms_of_its_own(model):
    with KeepFloat64():
        expected = clipped(copy.deepcopy(model), 2.0)
    for values in Threaded(model, "2x1x1").run(lambda on_rank: clipped(copy.deepcopy(on_rank), 2.0)):
        torch.testing.assert_close(values, expected, rtol=1e-9, atol=1e-9)


SMALL = SmallModel("llama", heads=4, layers=2)


def stepped(path, config):
    """The norm that all ranks clip by, of the upper layer alone, whose lower one has no gradients."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.requires_grad_(False)
    model.model.layers[1].requires_grad_(True)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    ids = torch.arange(48).view(4, 12)
    batch = {"input_ids": ids, "labels": ids}
    if config is None:
        model(**batch, use_cache=False).loss.backward()
    else:
        model = cuboid.shard(model, config).train()
        cuboid.Pipeline(model).train(iter([batch]), 1)
    parameters = [parameter for name, parameter in model.named_parameters() if name in trained]
    return float(clip_grad_norm_(parameters, 0.1)), float(nn.utils.get_total_norm(p.grad for p in parameters))


def test_stages_clip_by_the_norm_of_all_of_them_also_those_without_gradients(pool, checkpoint):
    path = checkpoint(SMALL)
    config = {"pipeline": {"engine": "seq1f1b", "stages": 2, "segments": 2, "stage_balance": "layers"}}
    for values in pool.run(2, stepped, path, config, timeout_s=TIMEOUT_S):
        assert values == pytest.approx(stepped(path, None), rel=1e-5)
