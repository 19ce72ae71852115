"""Train a new model, of a config.json and no weights. What Cuboid adds to a plain DeepSpeed script is marked.

deepspeed --num_accelerators 8 docs/examples/scratch.py FOLDER TEXT OUT

FOLDER has a config.json and a tokenizer.
"""

import sys
from pathlib import Path

import deepspeed
import torch
from transformers import AutoConfig, AutoTokenizer

import cuboid  # cuboid

CONFIG = str(Path(__file__).parents[2] / "configs" / "llama_2x2x2.json")
STEPS, SEQUENCE_LENGTH = 20, 128


def main(folder: str, text: str, out: str) -> None:
    """Train on the beginning of a text file and save the model."""
    torch.manual_seed(0)  # the same on all ranks: weights follow from it, on every mesh and on one rank alike
    model = cuboid.from_config(AutoConfig.from_pretrained(folder), CONFIG)  # cuboid: this rank makes its own slices
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = engine.train_micro_batch_size_per_gpu()
    ids = tokenizer(Path(text).read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    blocks = ids[: len(ids) // SEQUENCE_LENGTH * SEQUENCE_LENGTH].view(-1, SEQUENCE_LENGTH)
    for step in range(STEPS):
        rows = [(step * batch + row) % len(blocks) for row in range(batch)]
        input_ids = blocks[rows].to(engine.device)  # every rank of a mesh is given the same rows
        loss = engine(input_ids=input_ids, labels=input_ids).loss
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)

    cuboid.save_pretrained(engine, out)  # cuboid: an ordinary checkpoint


if __name__ == "__main__":
    main(*(argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")))
