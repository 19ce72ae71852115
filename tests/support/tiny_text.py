"""A text, and the smallest checkpoint with a tokenizer of it, for runs of ``cuboid train``."""

from transformers import LlamaConfig, LlamaForCausalLM

from cuboid.data.initial_model import train_tokenizer

TEXTS = [f"def function_{n}(x):\n    return x * {n}\n" * 20 for n in range(30)]


def write_model_and_text(folder, layers):
    """Write ``model``, a Llama with its tokenizer, and ``text`` into a folder."""
    config = LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    train_tokenizer(TEXTS, 300).save_pretrained(folder / "model")
    (folder / "text").write_text("".join(TEXTS))
