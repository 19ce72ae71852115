"""``cuboid doctor``: what stands in the way of a run on this host, each finding with its cure.

Nothing is changed, and every wait is bounded. This process imports neither torch nor what stands on it, so that a
broken installation is a finding: ``imports`` and ``pair`` are scripts, which ``child`` runs in processes of their own.

``examination`` lists the checks in order; each is a function of ``packages``, ``devices``, ``launchers``, ``network``,
``hostfile``, ``resources``, ``run_folder`` or ``all_reduce`` that yields a ``finding.Finding``.
"""
