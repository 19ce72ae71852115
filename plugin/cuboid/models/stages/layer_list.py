"""Finds the list of a model's layers, for what cuts them and what counts their costs."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


def layer_list(model: PreTrainedModel) -> str | None:
    """Name of the ``nn.ModuleList`` with ``num_hidden_layers`` modules, or of any length if there is none.

    Of several, it is the one with the most parameters. None if the model has no lists.
    """
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    # In an encoder-decoder's config, the number may be the encoder's. A list inside a layer is never the largest.
    candidates = {name: module for name, module in lists.items() if len(module) == count} or lists
    return max(candidates, key=lambda name: sum(p.numel() for p in candidates[name].parameters()), default=None)
