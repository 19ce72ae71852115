"""The files of a checkpoint: published atomically, and read as untrusted input."""
