"""The names that `SGLANG_TORCH_COMPILE_MODE` takes, and what `--enable-torch-compile` comes to on a GPU."""

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
NOTHING_ON_A_GPU = (
    "the GPU forward lies in kernels already: what is left to torch is under 0.1 % of a decode step and of a prompt "
    "(one H200, 64 rows, 16,384 tokens)"
)
"""Kernels of torch itself: one of 225 in the step, 3.6 of 6,739 us; 13 us of the prompt's 114 ms."""
