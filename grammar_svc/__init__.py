"""The grammar service: compiles constraints and keeps one matcher per constrained slot.

The scheduler has grammars compiled here, the worker of the same host sends sampled tokens and reads masks. A second
process of the same command line stands by.
"""
