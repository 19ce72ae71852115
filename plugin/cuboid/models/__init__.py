"""Everything that depends on Hugging Face models. No package in a lower layer imports transformers."""
