"""The files of a checkpoint: written so that they are whole or absent, and read without trusting them."""
