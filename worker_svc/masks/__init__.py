"""Token masks of constrained slots: from the grammar service of this host to the place where a step samples.

`source` is what an executor sees and says when it must call what; `book` keeps what is bound, told and answered, for
the compute thread on one side and the event loop on the other; `stream` is the connection; `wire`, `ring` its bytes.
Knows nothing of grammars: they are compiled, and followed, by the service.
"""
