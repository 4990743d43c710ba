"""The forward on a GPU: weights and pools as the kernels read them, CUDA graphs, an executor."""
