"""Training in pipeline stages, each a mesh. What Cuboid adds to a plain DeepSpeed script is marked with `# cuboid`.

deepspeed --num_accelerators 8 docs/examples/pipeline.py MODEL TEXT OUT
"""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import deepspeed
import torch
from transformers import AutoTokenizer

import cuboid  # cuboid

CONFIG = str(Path(__file__).parents[2] / "configs" / "llama_2_stages_1x2x2.json")
STEPS, SEQUENCE_LENGTH = 20, 256


def micro_batches(blocks: torch.Tensor, rows: int) -> Iterator[dict[str, torch.Tensor]]:
    """Micro-batches as a data loader gives them, without end: input_ids and labels `[rows, SEQUENCE_LENGTH]`."""
    for first in itertools.count(0, rows):
        input_ids = blocks[[(first + row) % len(blocks) for row in range(rows)]]
        yield {"input_ids": input_ids, "labels": input_ids}


def main(model_path: str, text: str, out: str) -> None:
    """Train a checkpoint on the beginning of a text file and save it, with a picture of a step's schedule."""
    config = cuboid.load_config(CONFIG)
    config["pipeline"]["trace"] = f"{out}/trace"
    model = cuboid.from_pretrained(model_path, config)  # cuboid: this rank reads its own slices of its own stage
    engine, *_ = deepspeed.initialize(model=model, config=config)

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    ids = tokenizer(Path(text).read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    blocks = ids[: len(ids) // SEQUENCE_LENGTH * SEQUENCE_LENGTH].view(-1, SEQUENCE_LENGTH)
    batches = micro_batches(blocks, engine.train_micro_batch_size_per_gpu())
    for step in range(STEPS):
        loss = engine.train_batch(batches)  # a whole optimizer step: gradient_accumulation_steps micro-batches
        if engine.global_rank == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)

    cuboid.save_pretrained(engine, out)  # cuboid: an ordinary checkpoint, whole


if __name__ == "__main__":
    main(*(argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")))
