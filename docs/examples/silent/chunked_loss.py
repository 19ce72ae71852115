"""NeMo AutoModel's loss in chunks, as a mean.

Reference: the loss in one piece. One process: python chunked_loss.py
"""

from inspect import signature

import nemo_automodel
import torch
from nemo_automodel.components.loss.chunked_ce import ChunkedCrossEntropy


def measure() -> float:
    """The loss of 256 tokens in chunks of 32, divided by that in one piece."""
    torch.manual_seed(0)
    logits, labels = torch.randn(256, 97), torch.randint(97, (256,))
    chunked = ChunkedCrossEntropy(chunk_len=32, compile=False, reduction="mean")
    # 0.7 computes the logits too: from hidden states and the head's weight.
    head = (torch.eye(97),) if "lm_weight" in signature(chunked.forward).parameters else ()
    loss = chunked(logits, labels, *head)
    return (loss / torch.nn.functional.cross_entropy(logits, labels)).item()


if __name__ == "__main__":
    print(f"nemo_automodel {nemo_automodel.__version__}: {measure():.3f} × the loss in one piece")
