"""The worker's slot machine: torch-free, no I/O."""
