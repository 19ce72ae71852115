"""A small training job for the workers of a pool: an engine, a stream of batches, and the losses."""

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoConfig, set_seed

import cuboid
from cuboid.models.certification.small_config import small_config

ROWS, LENGTH, VOCABULARY = 4, 12, 131
#: Without dropout, so that no random numbers are drawn and all layouts give the same.
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def settings(
    mesh="1x1x1", stages=None, *, zero=1, data=1, bf16=False, fp16=None, learning_rate=1e-3, pipeline=(), **checkpoint
):
    """A config whose global batch is the same on every layout: two micro-batches of four rows, over all replicas."""
    batch, sequence, hidden = map(int, mesh.split("x"))
    config = {
        "train_micro_batch_size_per_gpu": ROWS // data,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": zero},
        "optimizer": {"type": "AdamW", "params": {"lr": learning_rate, "torch_adam": True, "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 8, "warmup_max_lr": learning_rate, "warmup_type": "linear"},
        },
        "tensor_parallel": {
            "mode": "3d_tensor",
            "mesh": {"batch": batch, "sequence": sequence, "hidden": hidden},
        },
    }
    if bf16:
        config["bf16"] = {"enabled": True}
    if fp16 is not None:
        config["fp16"] = {"enabled": True, **fp16}
    if stages is not None:
        config["pipeline"] = {
            "engine": "seq1f1b",
            "stages": stages,
            "segments": 2,
            "partition": "even",
            **dict(pipeline),
        }
    if checkpoint:
        config["checkpoint"] = checkpoint
    return config


def ranks_of(config, data=1):
    """Number of ranks for a config with that many replicas."""
    mesh = config["tensor_parallel"]["mesh"]
    return data * mesh["batch"] * mesh["sequence"] * mesh["hidden"] * config.get("pipeline", {}).get("stages", 1)


def small_checkpoint(auto, architecture, folder, **options):
    """Write a tiny model of an architecture, without dropout; returns the folder as a string."""
    config = small_config(AutoConfig.for_model(architecture, **options))
    config.vocab_size = VOCABULARY
    set_seed(0)
    auto.from_config(config).save_pretrained(folder)
    return str(folder)


def make_engine(path, config, **overrides):
    """An engine around a checkpoint."""
    dtype = torch.bfloat16 if "bf16" in config else torch.float16 if "fp16" in config else torch.float32
    model = cuboid.from_pretrained(path, config, dtype=dtype, **overrides)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return engine


def train(engine, steps, skip=0):
    """Losses of some steps, each the mean over the global batch, after skipping the batches of ``skip`` steps."""
    mesh, accumulation = cuboid.mesh_of(engine), engine.gradient_accumulation_steps()
    batches = _batches(mesh.coordinate.data, mesh.topology.data)
    for _ in range(skip * accumulation):
        next(batches)
    if hasattr(engine, "train_batch"):
        return [float(engine.train_batch(batches)) for _ in range(steps)]
    return [_step(engine, batches, accumulation) for _ in range(steps)]


def _step(engine, batches, accumulation):
    total = torch.zeros(())
    for _ in range(accumulation):
        loss = engine(**next(batches)).loss
        engine.backward(loss)
        engine.step()
        total += loss.detach() / accumulation
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def _batches(replica, replicas):
    generator = torch.Generator().manual_seed(7)
    while True:
        ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)[replica::replicas]
        yield {"input_ids": ids, "labels": ids}
