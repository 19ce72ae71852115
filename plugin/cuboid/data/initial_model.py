"""A tokenizer trained on the corpus, and a small Llama with random weights, to start from."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cuboid.checkpoint.format.bounded_files import read_object
from cuboid.errors import CheckpointError

END_OF_TEXT = "<|endoftext|>"
#: Of the small Llama, by the keys of its config.
_SIZES = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}


def train_tokenizer(documents: Sequence[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of at most ``vocabulary`` entries, which can encode any text losslessly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def check_replaceable_model(folder: Path) -> None:
    """Check that :func:`write_llama` would replace no other model than one of its own.

    Raises:
        CheckpointError: it would.
    """
    sizes: dict[str, Any] = {}
    with suppress(CheckpointError):
        config = read_object(folder / "config.json")
        sizes = {name: config.get(name) for name in _SIZES}
    has_weights = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
    if has_weights and sizes != _SIZES:
        raise CheckpointError(
            f"{folder}: has a model that no `cuboid prepare` wrote, and that a new one would replace; choose another "
            "--out, move it away, or name it by --model"
        )


def write_llama(folder: Path, vocabulary: int, tokenizer: Any, seed: int) -> int:
    """Write a Llama checkpoint of about 8 million parameters (at 4096 tokens) and its tokenizer.

    It has few layers, because on a few cores the collectives of a layer cost more than its arithmetic. The head costs
    about as much as a layer, so that stages of two layers and of one layer and the head are balanced.

    Returns:
        The number of parameters.
    """
    config = LlamaConfig(
        vocab_size=vocabulary,
        **_SIZES,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return int(model.num_parameters())
