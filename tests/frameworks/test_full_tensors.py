"""DeepSpeed's functions that read and write a parameter's whole tensors, on meshes, where each rank has a shard."""

import copy

import deepspeed
import pytest
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_update_full_grad_vectorized,
    zero_to_fp32,
)
from transformers import AutoModelForCausalLM

import cuboid
from cuboid.errors import CheckpointError, CuboidError
from cuboid.verify import SmallModel
from training import ROWS, _batches, settings

#: Of a vocabulary that no mesh divides.
SMALL = SmallModel("llama", heads=4, kv_heads=2)
NAMES = ("model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight", "model.norm.weight", "lm_head.weight")


def read(path, config):
    """On each rank: gradients, then weights and first moments of a step by gradients of length 1, then a moment and the
    weight that were set.
    """
    model = cuboid.from_pretrained(path, config, dtype=torch.float32).train()
    engine = deepspeed.initialize(model=model, config=copy.deepcopy(config))[0]
    parameters = dict(engine.module.named_parameters())
    engine.backward(engine(**next(_batches(0, 1))).loss)
    gradients = {name: safe_get_full_grad(parameters[name]).clone() for name in NAMES}
    safe_update_full_grad_vectorized(
        [parameters[name] for name in NAMES], lambda gradient, _: gradient / gradient.norm()
    )
    with pytest.raises(CuboidError, match="safe_get_full_fp32_param takes whole tensors"):
        safe_get_local_fp32_param(parameters["lm_head.weight"])
    engine.step()
    moments = {name: safe_get_full_optimizer_state(parameters[name], "exp_avg").clone() for name in NAMES}
    weights = {name: safe_get_full_fp32_param(parameters[name]).clone() for name in NAMES}
    saved = cuboid.full_state_dict(engine)
    head = parameters["lm_head.weight"]
    safe_set_full_optimizer_state(head, torch.ones_like(weights["lm_head.weight"]), "exp_avg")
    safe_set_full_fp32_param(head, weights["lm_head.weight"] + 1)
    after = safe_get_full_fp32_param(head), safe_get_full_optimizer_state(head, "exp_avg")
    with pytest.raises(CuboidError, match=r"safe_set_full_fp32_param: the value has the shape \(3, 3\)"):
        safe_set_full_fp32_param(head, torch.zeros(3, 3))
    return gradients, moments, weights, {name: saved.get(name) for name in NAMES}, after


@pytest.mark.parametrize("mesh", ["1x2x1", "2x1x1"])
def test_they_are_whole_on_every_rank(pool, checkpoint, mesh):
    config = settings(mesh) | {"gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": ROWS}
    config["gradient_clipping"] = 0.0
    path = checkpoint(SMALL)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    plain(**next(_batches(0, 1))).loss.backward()
    for gradients, moments, weights, saved, (head, moment) in pool.run(2, read, path, config):
        for name in NAMES:
            expected = plain.get_parameter(name).grad
            torch.testing.assert_close(gradients[name], expected, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(moments[name], expected / expected.norm() * 0.1, rtol=1e-4, atol=1e-6)
            if saved[name] is not None:
                assert torch.equal(weights[name], saved[name])
        assert torch.equal(head, weights["lm_head.weight"] + 1)
        assert moment.unique().tolist() == [1.0]


@pytest.mark.parametrize("tag", [None, "global_step3"])
def test_deepspeeds_way_to_float32_weights_says_that_a_checkpoint_of_cuboid_needs_none(tmp_path, tag):
    (tmp_path / "global_step3").mkdir()
    (tmp_path / "latest").write_text("global_step3")
    with pytest.raises(FileNotFoundError, match=r"can.t find"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), tag)
    (tmp_path / "global_step3" / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="global_step3 is a checkpoint of Cuboid, and a Hugging Face checkpoint"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), tag)
