"""Training that saves, and resumes from where it was, on the same layout or on another one.

deepspeed --num_accelerators 8 docs/examples/resume.py MODEL TEXT OUT configs/llama_2x2x2.json
deepspeed --num_accelerators 4 docs/examples/resume.py MODEL TEXT OUT my_smaller_mesh.json
"""

import sys
from pathlib import Path

import deepspeed
from transformers import AutoTokenizer

import cuboid

STEPS, SAVE_EVERY, SEQUENCE_LENGTH = 10, 5, 128


def main(model_path: str, text: str, out: str, config_path: str) -> None:
    """Train ten steps more than there are, and save every five."""
    config = cuboid.load_config(config_path)
    config["checkpoint"] = {"keep_last": 2, "asynchronous": True}
    model = cuboid.from_pretrained(model_path, config)
    engine, *_ = deepspeed.initialize(model=model.train(), config=config)
    first = 0
    if (Path(out) / "latest").exists():
        _, client_state = engine.load_checkpoint(out)
        first = client_state["step"]

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    batch = engine.train_micro_batch_size_per_gpu()
    ids = tokenizer(Path(text).read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    blocks = ids[: len(ids) // SEQUENCE_LENGTH * SEQUENCE_LENGTH].view(-1, SEQUENCE_LENGTH)
    for step in range(first, first + STEPS):
        rows = [(step * batch + row) % len(blocks) for row in range(batch)]
        input_ids = blocks[rows].to(engine.device)
        loss = engine(input_ids=input_ids, labels=input_ids).loss
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
        if (step + 1) % SAVE_EVERY == 0:
            engine.save_checkpoint(out, client_state={"step": step + 1})  # returns before the files are there
    engine.wait_for_checkpoint()


if __name__ == "__main__":
    main(*(argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")))
