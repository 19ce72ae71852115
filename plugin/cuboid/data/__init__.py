"""From texts, rows and conversations to tokens on disk, and from these to micro-batches; and a new tokenizer and model.

A micro-batch is a function of its number alone, so that a run resumes from any step on any number of replicas.
"""
