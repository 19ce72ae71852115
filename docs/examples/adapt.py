"""Fine-tune a model on a text of another kind with LoRA on a mesh, and let it write before and after.

deepspeed --num_accelerators 4 docs/examples/adapt.py MODEL OUT [--text FILE] [--config FILE] [--steps N]

Without a text, it learns fables of one sentence. OUT gets PEFT's folder `adapter`, and in `report.json`, `heldout.npy`
and `logits.npy` what `check_adapter.py` compares with plain transformers and PEFT.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, set_seed

import cuboid

CONFIG = Path(__file__).parents[2] / "configs" / "lora_1x2x2.json"
LENGTH, HELD_OUT = 64, 8
#: Of the samples: check_adapter.py draws the same.
SEED, TOKENS, DRAWING = 0, 50, {"do_sample": True, "temperature": 0.7, "top_k": 50}

ANIMALS = ("fox", "owl", "bear", "hare", "mole", "crow")
KINDS = ("old", "small", "grey", "quick", "kind", "lost")
PLACES = ("by the river", "in the wood", "on the hill", "at the gate")
ENDS = ("and asked for bread", "and sang a song", "and said good day", "and ran away")


def fables(count: int) -> str:
    """So many sentences such as "One day the old fox met the lost owl by the river and sang a song."."""
    draw = random.Random(SEED)
    lines = []
    for _ in range(count):
        (first, second), (kind, other) = draw.sample(ANIMALS, 2), draw.sample(KINDS, 2)
        met = f"the {kind} {first} met the {other} {second}"
        lines.append(f"One day {met} {draw.choice(PLACES)} {draw.choice(ENDS)}.\n")
    return "".join(lines)


def main() -> None:
    """Train an adapter; every rank runs this."""
    parser = argparse.ArgumentParser(description="Fine-tune with LoRA on a mesh.")
    parser.add_argument("model", help="folder of a checkpoint with its tokenizer")
    parser.add_argument("out", type=Path, help="folder for the adapter and the report")
    parser.add_argument("--text", type=Path, help="a text file; by default fables")
    parser.add_argument("--config", default=str(CONFIG), help="DeepSpeed config with a mesh")
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps")
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    arguments = parser.parse_args()

    set_seed(SEED)  # the factors of an adapter are drawn on every rank
    model = cuboid.from_pretrained(arguments.model, arguments.config)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=arguments.config)

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    text = fables(1600) if arguments.text is None else arguments.text.read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt").input_ids[0].to(engine.device)
    blocks = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    blocks, heldout = blocks[:-HELD_OUT], blocks[-HELD_OUT:]
    prompt = " ".join(text.split()[:2])
    start = tokenizer(prompt, return_tensors="pt").input_ids.to(engine.device)

    def look() -> dict[str, Any]:
        """The held-out loss, the logits of the held-out blocks, and a sample."""
        engine.eval()
        with torch.no_grad():
            output = model(input_ids=heldout, labels=heldout)
        set_seed(SEED)
        sample = model.generate(input_ids=start, max_new_tokens=TOKENS, **DRAWING)[0]
        engine.train()
        return {"loss": output.loss.item(), "logits": output.logits, "tokens": sample.tolist()}

    def say(line: str) -> None:
        if engine.global_rank == 0:
            print(line, flush=True)

    before = look()
    say(f"held-out loss {before['loss']:.4f}; it writes: {tokenizer.decode(before['tokens'])!r}")
    rows = engine.train_micro_batch_size_per_gpu()
    for step in range(arguments.steps):
        for micro_batch in range(engine.gradient_accumulation_steps()):
            first = (step * engine.gradient_accumulation_steps() + micro_batch) * rows
            batch = blocks[[(first + row) % len(blocks) for row in range(rows)]]  # the same on all ranks of a mesh
            loss = engine(input_ids=batch, labels=batch).loss
            engine.backward(loss)
            engine.step()
        if (step + 1) % 20 == 0:
            say(f"step {step + 1}: loss {loss.item():.4f}")
    after = look()
    say(f"held-out loss {after['loss']:.4f}; it writes: {tokenizer.decode(after['tokens'])!r}")

    model.save_pretrained(arguments.out / "adapter")  # all ranks call it, one writes
    if engine.global_rank == 0:
        np.save(arguments.out / "heldout.npy", heldout.cpu().numpy(), allow_pickle=False)
        np.save(arguments.out / "logits.npy", after.pop("logits").float().cpu().numpy(), allow_pickle=False)
        del before["logits"]
        report = {
            **{"model": arguments.model, "prompt": prompt, "before": before, "after": after},
            **{"sampling": {"max_new_tokens": TOKENS, **DRAWING}, "seed": SEED},
            "trained_parameters": {
                "model": model.get_nb_trainable_parameters()[0],
                "rank": sum(map(torch.numel, trained)),
            },
        }
        (arguments.out / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
