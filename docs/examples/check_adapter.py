"""Check an adapter that `adapt.py` has trained, with plain transformers and PEFT.

    python docs/examples/check_adapter.py OUT

This process never imports cuboid. It exits with 1 unless it computes the same held-out losses before and after and the
same logits, and writes the same text, token for token.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.utils import logging

#: Largest differences in float32, of losses and logits.
TOLERANCE = 1e-3


def main() -> int:
    """Compare what was reported with what this process computes; the exit status."""
    parser = argparse.ArgumentParser(description="Check an adapter with plain transformers and PEFT.")
    parser.add_argument("out", type=Path, help="folder that adapt.py wrote")
    out = parser.parse_args().out
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    heldout = torch.from_numpy(np.load(out / "heldout.npy", allow_pickle=False))
    reported = torch.from_numpy(np.load(out / "logits.npy", allow_pickle=False))
    tokenizer = AutoTokenizer.from_pretrained(report["model"])
    model: Any = AutoModelForCausalLM.from_pretrained(report["model"], dtype=torch.float32).eval()

    differences, same = {}, True
    for when in ("before", "after"):
        if when == "after":
            model = PeftModel.from_pretrained(model, out / "adapter").eval()
        with torch.no_grad():
            output = model(input_ids=heldout, labels=heldout)
        set_seed(report["seed"])
        prompt = tokenizer(report["prompt"], return_tensors="pt", return_token_type_ids=False)
        tokens = model.generate(**prompt, **report["sampling"])[0].tolist()
        differences[f"loss {when}"] = abs(float(output.loss) - report[when]["loss"])
        same &= tokens == report[when]["tokens"]
        print(f"{when}: loss {float(output.loss):.6f}, by cuboid {report[when]['loss']:.6f}")
    differences["logits"] = float((output.logits - reported).abs().max())
    assert "cuboid" not in sys.modules

    agree = same and max(differences.values()) <= TOLERANCE
    listed = ", ".join(f"{name} {difference:.0e}" for name, difference in differences.items())
    print(f"differences: {listed}; the texts are {'the same' if same else 'NOT the same'}, token for token")
    print(
        f"{'within' if agree else 'OVER'} the tolerance of {TOLERANCE:.0e}; learned: {report['before']['loss']:.3f} "
        f"to {report['after']['loss']:.3f}"
    )
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
