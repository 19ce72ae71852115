"""Callbacks of the Hugging Face ``Trainer``: stop and save, figures of each step, and what to do about a bad loss.

They work with the ``Trainer`` and with :class:`~cuboid.integrations.trainer.CuboidTrainer`, on meshes and in pipelines.
docs/trainer.md says what users see.
"""
