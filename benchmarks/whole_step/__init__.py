"""The parts of training_step.py: who takes part, what a rank does, and what comes of the numbers."""
