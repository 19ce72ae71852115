"""3-D tensor parallelism (arXiv 2105.14450): the layers of a transformer on a batch × sequence × hidden mesh."""
