"""Train a sentence encoder on pairs that mean the same, contrastively. What Cuboid adds is marked with `# cuboid`.

deepspeed --num_accelerators 4 docs/examples/embed.py MODEL PAIRS OUT

MODEL is an encoder whose mean hidden state is its embedding, such as all-MiniLM-L6-v2. A line of PAIRS has two
sentences with a tab between them; each is to be nearer to its own than to all others of a batch (van den Oord et al.
2018).
"""

import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch.nn import functional
from transformers import AutoTokenizer

import cuboid  # cuboid

STEPS, PAIRS, TEMPERATURE = 3, 8, 0.05
CONFIG = {
    "train_micro_batch_size_per_gpu": 2 * PAIRS,
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "weight_decay": 0.0, "torch_adam": True}},
    "tensor_parallel": {"mode": "3d_tensor", "mesh": {"batch": 2, "sequence": 1, "hidden": 2}},  # cuboid
}


def embed(model: Any, tokenizer: Any, sentences: list[str]) -> torch.Tensor:
    """Embeddings of length 1, ``[sentences, features]``: the mean over tokens that aren't padding."""
    batch = tokenizer(sentences, padding=True, truncation=True, max_length=256, return_tensors="pt").to(model.device)
    hidden = model(**batch).last_hidden_state  # whole, on every rank of the mesh
    mask = batch["attention_mask"].unsqueeze(-1)
    return functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def contrastive_loss(embeddings: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of finding, for each of the first half, its own among the second half, and the other way round."""
    left, right = embeddings.chunk(2)
    scores = left @ right.T / TEMPERATURE
    targets = torch.arange(len(left), device=scores.device)
    return (functional.cross_entropy(scores, targets) + functional.cross_entropy(scores.T, targets)) / 2


def main(model_path: str, pairs_path: str, out: str) -> None:
    """Train on the pairs of a file, in their order, and save the encoder and its tokenizer."""
    # Without dropout, which would make what is printed another on every mesh.
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = cuboid.from_pretrained(model_path, CONFIG, **dropout)  # cuboid: this rank reads its own slices
    engine, *_ = deepspeed.initialize(model=model.train(), config=CONFIG)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    pairs = [line.split("\t") for line in Path(pairs_path).read_text(encoding="utf-8").splitlines()]
    for step in range(STEPS):
        chosen = [pairs[(step * PAIRS + number) % len(pairs)] for number in range(PAIRS)]
        loss = contrastive_loss(embed(engine, tokenizer, [left for left, _ in chosen] + [r for _, r in chosen]))
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0:
            print(f"step {step + 1}: loss {loss.item():.6f}", flush=True)

    cuboid.save_pretrained(engine, out)  # cuboid: an ordinary checkpoint
    if engine.global_rank == 0:
        tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main(*(argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")))
