"""Open what a run has trained with plain transformers, and check its held-out loss.

    python docs/examples/evaluate.py RUN [--tokens 60]

RUN is the folder that `cuboid train --out` wrote. This process never imports cuboid: it is the proof that the result is
an ordinary Hugging Face checkpoint. It computes the held-out loss on the same blocks, writes it and a sample of text
into RUN/report.json, and exits with 1 where the two losses differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

#: Largest relative difference of the two losses, by the dtype of the weights.
TOLERANCES = {"float32": 1e-3, "bfloat16": 1e-2, "float16": 1e-2}
BATCH = 8
PROMPT = "def "


def main() -> int:
    """Evaluate one run; the exit status."""
    parser = argparse.ArgumentParser(description="Check a trained checkpoint with plain transformers.")
    parser.add_argument("run", type=Path, help="folder that `cuboid train --out` wrote")
    parser.add_argument("--tokens", type=int, default=60, help="length of the sample")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    report_path = arguments.run / "report.json"
    if not report_path.is_file():
        print(f"{report_path} does not exist: the run has not finished", file=sys.stderr)
        return 1
    report = json.loads(report_path.read_text(encoding="utf-8"))
    dtype, device = report["dtype"], report["device"].split(":")[0]
    model = AutoModelForCausalLM.from_pretrained(arguments.run / "model", dtype=getattr(torch, dtype)).to(device).eval()
    blocks = torch.from_numpy(np.load(arguments.run / "heldout_blocks.npy", allow_pickle=False)).to(device)

    ours, theirs = report["losses"]["heldout_last"], heldout_loss(model, blocks)
    difference = abs(ours - theirs) / abs(theirs)
    report["losses"].update(heldout_transformers=theirs, relative_difference=difference)
    report["sample"] = sample(model, AutoTokenizer.from_pretrained(arguments.run / "model"), arguments.tokens)
    report_path.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    assert "cuboid" not in sys.modules

    agree = difference <= TOLERANCES[dtype]
    print(f"sample: {report['sample']}")
    print(
        f"held-out loss: {ours:.6f} by cuboid, {theirs:.6f} by plain transformers; relative difference "
        f"{difference:.1e}, {'within' if agree else 'OVER'} the tolerance of {TOLERANCES[dtype]:.0e} for {dtype}"
    )
    return 0 if agree else 1


@torch.no_grad()
def heldout_loss(model: Any, blocks: torch.Tensor) -> float:
    """Mean loss per predicted token, in nats, over all blocks ``[blocks, sequence_length]``.

    A token that isn't to be learned, such as a user's, is in them as ``~id``.
    """
    total, count = 0.0, 0
    for rows in blocks.split(BATCH):
        labels = rows.masked_fill(rows < 0, -100)
        predictions = int((labels[:, 1:] != -100).sum())
        if predictions:
            ids = torch.where(rows < 0, ~rows, rows)
            total += float(model(input_ids=ids, labels=labels).loss) * predictions
        count += predictions
    return total / count


def sample(model: Any, tokenizer: Any, tokens: int) -> str:
    """A short continuation of a prompt, the same each time."""
    torch.manual_seed(0)
    prompt = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False).to(model.device)
    output = model.generate(**prompt, max_new_tokens=tokens, do_sample=True, temperature=0.7, top_k=50)
    return str(tokenizer.decode(output[0], skip_special_tokens=True))


if __name__ == "__main__":
    sys.exit(main())
