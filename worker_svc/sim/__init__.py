"""A worker without a model: same protocol and slot machine, time from a cost model, tokens from a hash."""
