"""Layers in steps of few tokens, as those of a generation are: what counts is the number of messages, not their bytes.

Weights stay where they are. Tokens go to them, and one message completes the outputs of all products of an input
(``few_tokens.py``); a norm in front of them sends its statistics with it (``late_norm.py``).
"""
