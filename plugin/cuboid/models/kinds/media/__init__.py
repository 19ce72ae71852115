"""Causal language models in which features of images or of audio take the place of some embeddings.

A *tower*, with a projector behind it, computes the features of a micro-batch's images, or of its clips of audio. The
model's own code puts them where ``input_ids`` have placeholders, so it must see whole sequences and whole embeddings:
these are gathered once, and split where the first layer of the language model begins. Every rank of sequence × hidden
computes the same features, of what is in its rows of `batch`.

:mod:`~cuboid.models.batch.row_media` says which those are, ``with_text`` has the kinds, ``features`` what is mixed into
the classes of models, and the others make small inputs for probes.
"""
