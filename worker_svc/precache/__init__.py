"""Compiling every GPU kernel of a model before it is served: the steps a worker runs at start, over empty weights."""
