"""The sequence-level pipeline Seq1F1B (arXiv 2406.03488): schedules as data, and the runtime that executes them.

A training step uses this folder as follows:

1. ``schedule/partition.py`` cuts each sequence into segments that cost the same (``schedule/unit_costs.py``).
2. ``schedule/schedules.py`` gives each rank a tuple of actions (``schedule/actions.py``): forward or backward of one
   segment of one micro-batch on one stage. ``schedule/dependencies.py`` defines what an action depends on.
3. ``schedule/validation.py`` proves the schedule complete and free of deadlocks, ``schedule/lowering.py`` inserts the
   sends and receives, and ``schedule/simulator.py`` predicts times and memory.
4. ``runtime/executor.py`` executes a rank's actions in order, ``runtime/p2p.py`` moves hidden states between stages,
   and ``runtime/profiler.py`` records when each action ran.
5. In each layer, ``attention/chunked_attention.py`` lets a segment attend to itself and to the KV cache of the segments
   before it (``attention/kv_cache.py``), with the fused kernels of ``attention/kernels.py``.
"""
