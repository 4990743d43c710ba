"""Rotary position embedding on adjacent pairs of the last dims, in place."""

from torch import Tensor

from worker_svc.ops.rope import ref


def rotate_(x: Tensor, turns: Tensor) -> Tensor:
    """x [..., d] float, turns [..., r/2] complex (e^(i p f)), broadcast: turns pairs (2i, 2i+1) of the last r dims.

    Returns x. Conjugate turns undo it.
    """
    assert turns.is_complex() and not turns.is_conj() and 2 * turns.shape[-1] <= x.shape[-1]
    return ref.rotate_(x, turns)
