"""Pipelines of many stages on few cores, with computing emulated by sleeping; see :mod:`pipeline_emulated`."""
