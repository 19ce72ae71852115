"""What is computed: two parts of GPT-2 with one block, the same weights and batch for everyone, and the truth; and
which part of a whole tensor a rank holds, whoever cut it.

A GPT-2 block is what Colossal-AI's 3-D layers can build too: LayerNorms, linear layers with biases, causal attention,
GELU. Only torch and transformers are needed here, so that an environment without Cuboid can take part.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

_SEED = 20240607
#: The vocabulary isn't used; it must be there.
_VOCABULARY = 128
#: For each dim of the whole tensor the indices, int64, of what a rank holds: its part is their outer product.
Place = tuple[torch.Tensor, ...]
#: A rank's part of a tensor, and where it belongs.
Piece = tuple[torch.Tensor, Place]


@dataclass(frozen=True)
class Block:
    """Sizes, and which part of the model runs."""

    part: str  # "mlp" (linear H→4H, GELU, linear 4H→H) or "layer" (the whole block)
    batch: int = 8
    length: int = 512
    hidden: int = 512
    heads: int = 8

    @property
    def title(self) -> str:
        what = {"mlp": "linear, GELU, linear", "layer": "transformer layer"}[self.part]
        return f"{what}: B={self.batch}, S={self.length}, H={self.hidden}, {self.heads} heads, float32"

    @property
    def path(self) -> str:
        return {"mlp": "transformer.h.0.mlp", "layer": "transformer.h.0"}[self.part]

    def model(self) -> GPT2LMHeadModel:
        """The whole model, every time with the same weights, whatever the version of transformers draws at first.

        Biases aren't zero and norms aren't one, for errors in them would be hidden.
        """
        config = GPT2Config(
            n_embd=self.hidden,
            n_head=self.heads,
            n_layer=1,
            n_positions=self.length,
            vocab_size=_VOCABULARY,
            activation_function="gelu",
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            attn_implementation="sdpa",
        )
        model = GPT2LMHeadModel(config)
        generator = torch.Generator().manual_seed(_SEED)
        with torch.no_grad():
            for name, parameter in sorted(model.named_parameters()):
                is_norm = "ln_" in name and name.endswith("weight")
                scale = 0.1 if parameter.dim() == 1 else 0.02
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator) + is_norm)
        return model

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Input and output gradient, ``[B, S, H]`` each, the same every time."""
        generator = torch.Generator().manual_seed(_SEED)
        shape = (self.batch, self.length, self.hidden)
        return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)

    @functools.cache  # noqa: B019 -- there are two of them
    def truth(self) -> dict[str, torch.Tensor]:
        """One process in float64: "output", "input" for the input's gradient, and every weight's gradient by name."""
        part = self.model().get_submodule(self.path).double()
        x, dy = (tensor.double() for tensor in self.tensors())
        x.requires_grad_()
        y = part(x)
        y.backward(dy)
        gradients = {name: p.grad for name, p in part.named_parameters() if p.grad is not None}
        return {"output": y.detach(), "input": x.grad, **gradients}

    def numbers(self) -> dict[str, Any]:
        return {**asdict(self), "dtype": "float32"}


BLOCKS = (Block("mlp"), Block("layer"))
QUICK = (Block("mlp", 8, 32, 64, 8), Block("layer", 8, 32, 64, 8))


def everything(size: int) -> torch.Tensor:
    """Indices of a dim that isn't cut."""
    return torch.arange(size)


def chunk(size: int | torch.Tensor, index: int, pieces: int) -> torch.Tensor:
    """Indices in one of so many equal pieces of a dim, or of what is left of it."""
    whole = everything(size) if isinstance(size, int) else size
    return whole.chunk(pieces)[index]


def take(whole: torch.Tensor, place: Place) -> torch.Tensor:
    return whole[torch.meshgrid(*place, indexing="ij")].contiguous()


def relative_error(
    whole: torch.Tensor, pieces: Iterable[Piece], add_up: Callable[[torch.Tensor], Any] = lambda _: None
) -> float:
    """How far the pieces are from ``whole``: ‖pieces − their places in whole‖ / ‖the same places of whole‖.

    The norms are Frobenius norms in float64 over all pieces together; what several ranks hold counts several times in
    both. Infinite where a number isn't finite, or where an element of ``whole`` is in no piece.
    ``add_up`` adds a tensor up over all ranks, where there are others.
    """
    found = torch.zeros(whole.shape, dtype=torch.int32)
    squares = torch.zeros(2, dtype=torch.float64)
    for part, place in pieces:
        index = torch.meshgrid(*place, indexing="ij")
        expected = whole[index].double()
        if part.shape == expected.shape:
            difference = (part.detach().double() - expected).square().sum()
            squares += torch.stack([difference, expected.square().sum()])
            found[index] = 1
        else:
            squares += math.inf
    add_up(squares)
    add_up(found)
    difference, magnitude = squares.tolist()
    if not found.all() or not math.isfinite(difference) or magnitude == 0.0:
        return math.inf
    return math.sqrt(difference / magnitude)
