"""Several schedulers, each with a model instance of its own, behind one gateway: which one gets a request."""
