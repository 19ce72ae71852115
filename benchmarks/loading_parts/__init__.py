"""What :mod:`loading` is made of: the checkpoint, the ways to load it, and what a process is seen to hold."""
