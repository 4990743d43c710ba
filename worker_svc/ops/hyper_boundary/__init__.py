"""What stands between two sublayers: the output goes back into the streams, and the next input comes out of them.

Two calls per boundary. `post_mix` (or `embed_mix` before the first sublayer) writes the new streams and leaves the
next mixer's partial sums in the workspace; `pre_norm` (or `head_norm` after the last one) turns those into mixing
weights, collapses the streams, normalises, and quantises. Streams are BF16 [T, 4, D], everything else as stated;
outputs are the caller's. CPU tensors run plain torch, CUDA tensors two Triton kernels.
"""

from __future__ import annotations

from torch import Tensor

from worker_svc.ops import registry
from worker_svc.ops.hyper_boundary import ref
from worker_svc.ops.hyper_boundary.mixer import STREAMS, BoundaryRules, Mixer, Workspace, prepare_mixer

__all__ = [
    "STREAMS",
    "BoundaryRules",
    "Mixer",
    "Workspace",
    "embed_mix",
    "head_norm",
    "post_mix",
    "pre_norm",
    "prepare_mixer",
]


def embed_mix(ids: Tensor, embed: Tensor, x_out: Tensor, mixer: Mixer, workspace: Workspace) -> None:
    """ids int32/int64 [T], embed BF16 [V, D] -> x_out [T, 4, D]: every stream is the embedding."""
    _check_streams(x_out)
    assert ids.shape == x_out.shape[:1] and embed.shape[1] == x_out.shape[2], (ids.shape, embed.shape)
    if registry.on_kernel("hyper_boundary", x_out.is_cuda):
        from worker_svc.ops.hyper_boundary import triton

        triton.embed_mix(ids, embed, x_out, mixer, workspace)
    else:
        ref.embed_mix(ids, embed, x_out)


def post_mix(
    x_in: Tensor,
    x_out: Tensor,
    post: Tensor,
    comb: Tensor,
    mixer: Mixer,
    workspace: Workspace,
    *,
    out: Tensor | None = None,
    rows: Tensor | None = None,
    shared: Tensor | None = None,
) -> None:
    """x_out[t, k] = post[t, k] o[t] + sum_j comb[t, j, k] x_in[t, j]; x_out may be x_in.

    post FP32 [T, 4], comb FP32 [T, 16] (row-major j, k). o is `out` BF16 [T, D], or the experts' combine:
    the FP32 sum of `rows` BF16 [T * K, D] over a token's K rows plus `shared` BF16 [T, D]. `out` may come as FP32
    [parts, T, D] of a split product.
    """
    _check_streams(x_in)
    _check_streams(x_out)
    tokens, _, width = x_out.shape
    assert post.shape == (tokens, STREAMS) and comb.shape == (tokens, STREAMS * STREAMS), (post.shape, comb.shape)
    if out is None:
        assert rows is not None and shared is not None and shared.shape == (tokens, width), "rows and shared, or out"
        assert rows.shape[1] == width and rows.shape[0] % max(tokens, 1) == 0, (rows.shape, tokens)
    else:
        assert rows is None and shared is None and out.shape[-2:] == (tokens, width), "rows and shared, or out"
    if registry.on_kernel("hyper_boundary", x_out.is_cuda):
        from worker_svc.ops.hyper_boundary import triton

        triton.post_mix(x_in, x_out, post, comb, mixer, workspace, out, rows, shared)
    else:
        ref.post_mix(x_in, x_out, post, comb, out, rows, shared)


def pre_norm(
    x: Tensor,
    mixer: Mixer,
    workspace: Workspace,
    norm_weight: Tensor,
    rules: BoundaryRules,
    *,
    y: Tensor,
    post: Tensor,
    comb: Tensor,
    q: Tensor | None = None,
    sf: Tensor | None = None,
    sf2: Tensor | None = None,
) -> None:
    """The next sublayer's input from the streams that the last call wrote.

    norm_weight FP32 [D]. y BF16 [T, D]: collapsed, RMS-normed. q E4M3 [T, D] with power-of-two scales sf FP32
    [T, D / 128] of any strides (sf2: the same numbers a second time, in another layout), taken from the rounded y.
    post FP32 [T, 4] and comb FP32 [T, 16]: for the `post_mix` after that sublayer.
    """
    _check_streams(x)
    assert mixer.outputs == (2 + STREAMS) * STREAMS and norm_weight.shape == x.shape[2:], (mixer.outputs, x.shape)
    assert (q is None) == (sf is None) and (sf2 is None or sf is not None), "codes and scales come together"
    if registry.on_kernel("hyper_boundary", x.is_cuda):
        from worker_svc.ops.hyper_boundary import triton

        triton.pre_norm(x, mixer, workspace, norm_weight, rules, y, post, comb, q, sf, sf2)
    else:
        ref.pre_norm(x, mixer, norm_weight, rules, y, post, comb, q, sf, sf2)


def head_norm(
    x: Tensor, mixer: Mixer, workspace: Workspace, norm_weight: Tensor, rules: BoundaryRules, rows: Tensor, z: Tensor
) -> None:
    """The final collapse and norm of tokens `rows` int32 [n] -> z BF16 [n, D]; `mixer` is hc_head's (4 outputs)."""
    _check_streams(x)
    assert mixer.outputs == STREAMS and z.shape == (rows.shape[0], x.shape[2]), (mixer.outputs, z.shape)
    if registry.on_kernel("hyper_boundary", x.is_cuda):
        from worker_svc.ops.hyper_boundary import triton

        triton.head_norm(x, mixer, workspace, norm_weight, rules, rows, z)
    else:
        ref.head_norm(x, mixer, norm_weight, rules, rows, z)


def _check_streams(x: Tensor) -> None:
    assert x.dim() == 3 and x.shape[1] == STREAMS and x.is_contiguous(), x.shape
