"""What is known of Hugging Face models: the only packages from here down to the mesh that import transformers."""
