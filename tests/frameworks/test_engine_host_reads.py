"""What the host reads of tensors in an optimizer step of DeepSpeed's: its own few numbers, and ours that the docs list.

DeepSpeed's engine asks its accelerator for streams and memory, which a device without values hasn't (see
``tensor3d/test_host_sync.py``). So it runs on CPU ranks here, and every call is noted that would wait for a GPU.
"""

import traceback
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

import cuboid
from conftest import TIMEOUT_S
from cuboid.verify import SmallModel, WorkerPool

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}
MESH = {"mode": "3d_tensor", "mesh": {"sequence": 2}}
STAGES = {"engine": "seq1f1b", "stages": 2, "segments": 2, "certification": "verified"}
BF16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
#: Calls that give the host a tensor's values.
READS = ("item", "tolist", "cpu", "numpy", "nonzero", "equal", "__bool__", "__float__", "__int__", "__index__")

#: Of ours: that the ranks of a mesh have the same batch, once for each forward; and of a pipeline, once for each step,
#: three numbers that are read together, and on ranks that are given the data whether they are to train on it, in how
#: many micro-batches, and how long its sequences are.
#: The state of the host's own generator, and a number of it, are no tensors of a device.
SAME_BATCH = {("batch_check.py", "tolist"): 1, ("generator_check.py", "numpy"): 1}
COUNTED = {("broadcast.py", "tolist"): 1, ("stage_randomness.py", "__int__"): 1}
TOLD = {("broadcast.py", "tolist"): 3}
#: Of DeepSpeed's: whether a gradient overflowed, and twice whether their norm is a number.
ZERO = {("stage_1_and_2.py", "item"): 1, ("utils.py", "__bool__"): 2}
#: Whether the norm is a number, and whether it is clipped.
BF16_OPTIMIZER = {("utils.py", "__bool__"): 2}


class HostReads(TorchFunctionMode):
    """Inside, reads are noted in :attr:`found`, by the file that calls and the method."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        caller = Path(traceback.extract_stack(limit=2)[0].filename)
        # Its count of steps is in the host's memory, also where the parameters are on a GPU.
        if name in READS and "optim" not in caller.parts:
            self.found[caller.name, name] += 1
        return func(*args, **(kwargs or {}))


def reads_of_third_step(config):
    import deepspeed

    dtype = torch.bfloat16 if "bf16" in config else torch.float32
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SmallModel("llama", layers=2).config(), dtype=dtype).train()
    engine, *_ = deepspeed.initialize(model=cuboid.shard(model, config), config=config)
    ids = torch.arange(4 * 16).view(4, 16) % 131
    for _ in range(3):
        with HostReads() as reads:
            if "pipeline" in config:
                engine.train_batch(iter([{"input_ids": ids, "labels": ids}] * 2))
            else:
                engine.backward(engine(input_ids=ids, labels=ids).loss)
                engine.step()
    return reads.found


@pytest.mark.sample(1, ci=1)
@pytest.mark.parametrize(
    ("sections", "wanted"),
    [
        ({"tensor_parallel": MESH, **BF16}, {**SAME_BATCH, **ZERO}),
        ({"tensor_parallel": MESH}, SAME_BATCH),
        ({"pipeline": STAGES, "gradient_accumulation_steps": 2, **BF16}, {**COUNTED, **BF16_OPTIMIZER}),
        ({"pipeline": STAGES, "gradient_accumulation_steps": 2}, COUNTED),
    ],
    ids=["mesh-bf16", "mesh", "stages-bf16", "stages"],
)
def test_a_step_of_deepspeed_reads_no_more_of_a_device_than_is_listed(sections, wanted):
    with WorkerPool(2) as workers:
        first, other = workers.run(2, reads_of_third_step, {**CONFIG, **sections}, timeout_s=TIMEOUT_S)
    assert first == wanted
    assert other == ({**wanted, **TOLD} if "pipeline" in sections else wanted)
