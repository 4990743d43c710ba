"""The grammar service: compiles constraints and keeps one matcher per constrained slot.

It stands alone so far: no other service calls it, and requests that need it are refused by the gateway.
"""
