"""Where a sequence's keys and states live: page pools, rings, tails. Tensors and index arithmetic, no policy."""
