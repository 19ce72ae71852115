"""What DeepSpeed's optimizer step takes, as the planner's formulas say, and that it leaves float32 gradients alone."""

import weakref
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig

import cuboid
from cuboid.distributed.topology import MeshShape
from cuboid.planner.cost.layout import Layout
from cuboid.planner.cost.memory import fullest
from cuboid.planner.description.cluster import Cluster
from cuboid.planner.estimate import estimate
from cuboid.verify import WorkerPool
from planning import description_of

SIZES = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
}
#: As on CUDA, where torch takes this way by itself.
FOREACH = {"lr": 1e-3, "foreach": True}
FUSED = {"lr": 1e-3, "fused": True}
MODES = {
    "mesh": {"tensor_parallel": {"mode": "3d_tensor", "mesh": {"batch": 1, "sequence": 1, "hidden": 1}}},
    "pipeline": {"pipeline": {"engine": "seq1f1b", "stages": 1, "segments": 2}},
}


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages of all tensors made inside, now and at most."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self._seen = weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.device.type == "cpu" and x.untyped_storage() not in self._seen:
                storage = x.untyped_storage()
                self._seen.add(storage)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._free, storage.nbytes())
        return out

    def _free(self, size):
        self.now -= size


def third_step(mode, params):
    """Peak bytes of the third optimizer step for each parameter, and whether its gradients are all bfloat16 numbers."""
    import deepspeed

    config = {**CONFIG, **MODES[mode], "optimizer": {"type": "AdamW", "params": {**params, "torch_adam": True}}}
    ids = torch.arange(16).view(1, 16)
    batch = {"input_ids": ids, "labels": ids}
    with LiveBytes() as live:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(LlamaConfig(num_attention_heads=4, **SIZES), dtype=torch.bfloat16)
        count = sum(parameter.numel() for parameter in model.parameters())
        engine, *_ = deepspeed.initialize(model=cuboid.shard(model.train(), config), config=config)
        step, peaks = engine.optimizer.step, []

        def watched(*args, **kwargs):
            gradients = [x for group in getattr(engine.optimizer, "fp32_groups_gradients", []) for x in group]
            rounded = all(torch.equal(x.bfloat16().float(), x) for x in gradients)
            live.most = live.now
            result = step(*args, **kwargs)
            peaks.append((live.most / count, rounded))
            return result

        with mock.patch.object(engine.optimizer, "step", watched):
            for _ in range(3):
                if mode == "pipeline":
                    engine.train_batch(iter([batch] * 2))
                    continue
                for _ in range(2):
                    engine.backward(engine(**batch).loss)
                    engine.step()
    return peaks[-1]


@pytest.mark.parametrize("params", [FOREACH, FUSED], ids=["foreach", "fused"])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("mode", list(MODES))
def test_what_an_optimizer_step_takes(mode, replicas, params):
    with WorkerPool(replicas) as pool:
        took, rounded = pool.run(replicas, third_step, mode, params)[0]
    # docs/planner.md: weights and states, and gradients in float32; on a mesh besides those in 16 bits, as long as they
    # are copied; torch's AdamW takes 4 more unless it is fused, when these are free again.
    if mode == "mesh":
        wanted = 2 + (18 if params is FUSED else 20) / replicas
    else:
        wanted = 6 + (12 if params is FUSED else 16) / replicas
    assert took == pytest.approx(wanted, rel=0.02)
    if mode == "pipeline":
        # Between replicas DeepSpeed sums in bfloat16, its default.
        assert rounded == (replicas > 1)


def test_the_formulas_of_the_planner_are_these():
    model = description_of(LlamaConfig(num_attention_heads=4, **{**SIZES, "num_hidden_layers": 64}))
    for replicas in (1, 2):
        for segments, wanted in ((1, 2 + 20 / replicas), (2, 6 + 16 / replicas)):
            layout = Layout(MeshShape(1, 1, 1), 1, 1, 1, replicas, segments=segments)
            memory = fullest(estimate(model, layout, Cluster.parse(f"{replicas}xH100"), 128).cost)
            units = memory.gathered + memory.activations + memory.key_value_store + memory.logits + memory.working
            states = memory.parameters + memory.gradients + memory.optimizer
            assert (states + units + memory.step) / model.parameters == pytest.approx(wanted, rel=0.01)
