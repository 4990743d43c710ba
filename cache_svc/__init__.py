"""The tiered KV cache service. Not built yet: `v4mesh cache` says so and refuses to start."""
