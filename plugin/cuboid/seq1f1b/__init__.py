"""The sequence-level pipeline Seq1F1B (arXiv 2406.03488): schedules as data, and what carries them out.

Start with :mod:`cuboid.seq1f1b.schedule.actions`, the vocabulary, and :mod:`cuboid.seq1f1b.schedule.schedules`.
"""
