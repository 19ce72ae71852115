"""Everything about Hugging Face models. Below this package, no package imports transformers."""
