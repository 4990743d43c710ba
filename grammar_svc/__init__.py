"""The grammar service. Not built yet: `v4mesh grammar` says so and refuses to start."""
