"""The CPU forward's glue fused by torch's compiler, ahead of time.

Torch's Inductor turns each piece of `pieces` into one shared object for any number of tokens, in a process of its own,
before the worker is ready; serving only calls what was loaded. So nothing is compiled, guarded or retraced later, and
the next start finds the objects where this one left them. `prepare` is the door.
"""

from worker_svc.compiled_glue.library import GlueError, prepare

__all__ = ["GlueError", "prepare"]
