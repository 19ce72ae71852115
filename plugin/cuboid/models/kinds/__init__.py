"""Kinds of models, by what they compute from a micro-batch: a file for each, and the list of all in ``registry``."""
