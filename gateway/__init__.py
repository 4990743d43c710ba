"""The gateway: REST and SSE in, tokens out. Owns the journal of its open requests and nothing else."""
