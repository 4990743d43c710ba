"""Deterministic simulation of the mesh: real cores, real protobuf, virtual time, faults far denser than in life.

`python -m tests.sim --seeds N`. The same seed is the same run, so a seed is a bug report; `--seed S` shrinks one.

scenario (what a seed means) -> world (time, processes, network, faults) -> checker (invariants, what clients saw);
device and reference are the hash model that stands for the executor; shrink, runner, mutants and saved use them.
"""
