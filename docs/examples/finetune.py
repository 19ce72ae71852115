"""A training script of one's own. What Cuboid adds to a plain DeepSpeed script is marked with `# cuboid`.

deepspeed --num_accelerators 8 docs/examples/finetune.py MODEL TEXT OUT
"""

import sys
from pathlib import Path

import deepspeed
from transformers import AutoTokenizer

import cuboid  # cuboid

CONFIG = str(Path(__file__).parents[2] / "configs" / "llama_2x2x2.json")
STEPS, SEQUENCE_LENGTH = 20, 128


def main(model_path: str, text: str, out: str) -> None:
    """Train a checkpoint on the beginning of a text file and save it."""
    model = cuboid.from_pretrained(model_path, CONFIG)  # cuboid: this rank reads its own slices
    engine, *_ = deepspeed.initialize(model=model.train(), config=CONFIG)

    tokenizer = AutoTokenizer.from_pretrained(model_path)
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
