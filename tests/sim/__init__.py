"""Deterministic simulation of the mesh: real cores, real protobuf, virtual time, faults far denser than in life.

`python -m tests.sim --seeds N`. The same seed is the same run, so a seed is a bug report.
"""
