"""From text to tokens to micro-batches; and a new tokenizer and model to start from."""
