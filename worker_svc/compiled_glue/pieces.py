"""What is compiled: one pure function per piece of `model.glue`, its example inputs, and which sizes may vary.

Written for fusion: no in-place steps, no complex numbers, no numpy. `plain` is the same call of the plain path, from
the same inputs: the oracle. A piece is here because it won at one token and at 256, or up to `most`
(measured by `benchmarks forward_step`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from worker_svc.model.glue import Glue, GlueShapes
from worker_svc.ops.hyper_mix import ref as hyper_mix
from worker_svc.ops.swiglu_experts import clamped_swiglu

Outputs = Tensor | tuple[Tensor, ...]
EXTRA = 24
"""Columns of an example behind those that a piece reads."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A size that may vary: axes of one name are equal, but for what `plus` adds. The compiler counts on `least`."""

    name: str
    least: int = 1
    plus: int = 0


TOKENS = Axis("tokens")


@dataclass(frozen=True, slots=True)
class Piece:
    """`axes` has, per input, which dimensions vary; `most` tokens, above which the plain path is faster (0: never)."""

    function: Callable[[GlueShapes], Callable[..., Outputs]]
    example: Callable[[GlueShapes, int, Generator], tuple[Tensor, ...]]
    axes: Callable[[GlueShapes], tuple[Mapping[int, Axis], ...]]
    plain: Callable[..., Outputs]
    most: int = 0


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().sum(-1, keepdim=True) * (1.0 / x.shape[-1]) + eps)


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    """x [..., d], turns [..., r/2, 2] of (cos, sin): pairs of the last r dims turned."""
    half = turns.shape[-2]
    kept, last = x[..., : x.shape[-1] - 2 * half], x[..., x.shape[-1] - 2 * half :]
    (a, b), (cos, sin) = last.reshape(*last.shape[:-1], half, 2).unbind(-1), turns.unbind(-1)
    return torch.cat([kept, torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)], -1)


def _boundary(s: GlueShapes) -> Callable[..., Outputs]:
    def boundary(mixes: Tensor, x: Tensor, base: Tensor, weight: Tensor) -> Outputs:
        mixes = mixes * _inverse_rms(x.flatten(1), s.norm_eps) + base
        pre, post, comb = hyper_mix.mix_weights(mixes, s.streams, s.iterations, s.hc_eps)
        y = hyper_mix.collapse(x, pre)
        return y * _inverse_rms(y, s.norm_eps) * weight, post, comb

    return boundary


def _expand(s: GlueShapes) -> Callable[..., Outputs]:
    def expand(out: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Outputs:
        mixed = post.unsqueeze(-1) * out.unsqueeze(1)
        for stream in range(s.streams):
            mixed = mixed + comb[:, stream, :, None] * x[:, stream, None, :]
        return mixed

    return expand


def _head(s: GlueShapes) -> Callable[..., Outputs]:
    def head(mixes: Tensor, x: Tensor, base: Tensor, weight: Tensor) -> Outputs:
        gates = torch.sigmoid(mixes * _inverse_rms(x.flatten(1), s.norm_eps) + base) + s.hc_eps
        y = hyper_mix.collapse(x, gates)
        return y * _inverse_rms(y, s.norm_eps) * weight

    return head


def _latents(s: GlueShapes) -> Callable[..., Outputs]:
    def latents(stack: Tensor, q_weight: Tensor, kv_weight: Tensor, turns: Tensor) -> Outputs:
        latent, kv = stack[:, : s.latent], stack[:, s.latent : s.latent + s.head_dim]
        kv = kv * _inverse_rms(kv, s.norm_eps) * kv_weight
        return latent * _inverse_rms(latent, s.norm_eps) * q_weight, _turned(kv, turns)

    return latents


def _queries(s: GlueShapes) -> Callable[..., Outputs]:
    def queries(stack: Tensor, turns: Tensor) -> Outputs:
        q = stack[:, : s.heads * s.head_dim].reshape(stack.shape[0], s.heads, s.head_dim)
        return _turned(q * _inverse_rms(q, s.norm_eps), turns.unsqueeze(1))

    return queries


def _states(s: GlueShapes) -> Callable[..., Outputs]:
    at = s.latent + s.head_dim

    def states(product: Tensor, bias: Tensor, positions: Tensor) -> Outputs:
        return product[:, at:] + bias[positions % bias.shape[0]]

    return states


def _compress(s: GlueShapes) -> Callable[..., Outputs]:
    def compress(values: Tensor, scores: Tensor, weight: Tensor, turns: Tensor) -> Outputs:
        entries = (scores.softmax(1) * values).sum(1)
        return _turned(entries * _inverse_rms(entries, s.norm_eps) * weight, turns)

    return compress


def _allowed(s: GlueShapes) -> Callable[..., Outputs]:
    scale = s.head_dim**-0.5

    def allowed(scores: Tensor, hidden: Tensor, sink: Tensor) -> Outputs:
        scores, sink = scores * scale + hidden.unsqueeze(1), sink.unsqueeze(1)
        top = torch.maximum(scores.amax(-1, keepdim=True), sink)
        probs = (scores - top).exp()
        return probs / (probs.sum(-1, keepdim=True) + (sink - top).exp())

    return allowed


def _softmax(s: GlueShapes) -> Callable[..., Outputs]:
    scale = s.head_dim**-0.5

    def softmax(scores: Tensor, sink: Tensor) -> Outputs:
        scores, sink = scores * scale, sink.unsqueeze(1)
        top = torch.maximum(scores.amax(-1, keepdim=True), sink)
        probs = (scores - top).exp()
        return probs / (probs.sum(-1, keepdim=True) + (sink - top).exp())

    return softmax


def _activate(s: GlueShapes) -> Callable[..., Outputs]:
    def activate(hidden: Tensor, scale: Tensor) -> Outputs:
        gate, up = hidden[:, : s.intermediate].clamp_max(s.limit), hidden[:, s.intermediate :]
        return gate / (1 + torch.exp(-gate)) * up.clamp(-s.limit, s.limit) * scale

    return activate


def _scores(logits: Tensor) -> Tensor:
    return (torch.log1p(torch.exp(-logits.abs())) + logits.clamp_min(0)).sqrt()


def _weighed(scores: Tensor, experts: Tensor, factor: float) -> Tensor:
    chosen = scores.gather(1, experts)
    return chosen / chosen.sum(-1, keepdim=True) * factor


def _route(s: GlueShapes) -> Callable[..., Outputs]:
    def route(logits: Tensor, bias: Tensor) -> Outputs:
        scores = _scores(logits)
        experts = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices[:, : s.top_k]
        return experts, _weighed(scores, experts, s.factor)

    return route


def _weigh(s: GlueShapes) -> Callable[..., Outputs]:
    def weigh(logits: Tensor, experts: Tensor) -> Outputs:
        return _weighed(_scores(logits), experts, s.factor)

    return weigh


def _plain_softmax(glue: Glue, scores: Tensor, sink: Tensor) -> Tensor:
    """As attention in plain torch has it, between its two products."""
    scaled = torch.cat([scores * glue.shapes.head_dim**-0.5, sink.unsqueeze(1)], -1)
    return scaled.softmax(-1)[:, :-1]


def _plain_allowed(glue: Glue, scores: Tensor, hidden: Tensor, sink: Tensor) -> Tensor:
    scaled = scores * glue.shapes.head_dim**-0.5 + hidden.unsqueeze(1)
    return torch.cat([scaled, sink.view(1, -1, 1).expand(len(scores), -1, 1)], -1).softmax(-1)[..., :-1]


def _normal(*sizes: int, draw: Generator) -> Tensor:
    return torch.randn(*sizes, generator=draw)


def _turns(s: GlueShapes, tokens: int, draw: Generator) -> Tensor:
    angles = _normal(tokens, s.rope_dim // 2, draw=draw)
    return torch.stack([angles.cos(), angles.sin()], -1)


def _state_inputs(s: GlueShapes, tokens: int, draw: Generator) -> tuple[Tensor, ...]:
    """Of a C4 or a C128 layer."""
    slots, width = (4, 96) if tokens % 2 else (128, 40)
    product = _normal(tokens, s.latent + s.head_dim + width, draw=draw)
    return product, _normal(slots, width, draw=draw), torch.arange(7, 7 + tokens)


def _window_inputs(s: GlueShapes, windows: int, draw: Generator) -> tuple[Tensor, ...]:
    slots, width = (8, s.head_dim) if windows % 2 else (128, s.rope_dim + 64)
    scores = _normal(windows, slots, width, draw=draw)
    scores[0, :4] = -torch.inf  # a first entry has no window before its own
    return _normal(windows, slots, width, draw=draw), scores, _normal(width, draw=draw), _turns(s, windows, draw)


def _chunk_inputs(s: GlueShapes, queries: int, draw: Generator) -> tuple[Tensor, ...]:
    seen = torch.rand(queries, queries + 5, generator=draw) > 0.4
    scores = _normal(queries, s.heads, queries + 5, draw=draw) * s.head_dim**0.5
    return scores, torch.where(seen, 0.0, -torch.inf), _normal(s.heads, draw=draw)


def _mixer_inputs(s: GlueShapes, outputs: int, tokens: int, draw: Generator) -> tuple[Tensor, ...]:
    sizes = ((tokens, outputs), (tokens, s.streams, s.hidden), (outputs,), (s.hidden,))
    return tuple(_normal(*size, draw=draw) for size in sizes)


_PER_TOKEN = {0: TOKENS}
_FIXED: Mapping[int, Axis] = {}

PIECES: Mapping[str, Piece] = {
    "boundary": Piece(
        _boundary,
        lambda s, n, draw: _mixer_inputs(s, (2 + s.streams) * s.streams, n, draw),
        lambda s: (_PER_TOKEN, _PER_TOKEN, _FIXED, _FIXED),
        lambda glue, mixes, *rest: glue.boundary(mixes.clone(), *rest),
    ),
    "expand": Piece(
        _expand,
        lambda s, n, draw: tuple(
            _normal(n, *size, draw=draw)
            for size in ((s.hidden,), (s.streams, s.hidden), (s.streams,), (s.streams, s.streams))
        ),
        lambda s: (_PER_TOKEN,) * 4,
        lambda glue, *args: glue.expand(*args),
    ),
    "head": Piece(
        _head,
        lambda s, n, draw: _mixer_inputs(s, s.streams, n, draw),
        lambda s: (_PER_TOKEN, _PER_TOKEN, _FIXED, _FIXED),
        lambda glue, mixes, *rest: glue.head(mixes.clone(), *rest),
    ),
    "latents": Piece(
        _latents,
        lambda s, n, draw: (
            _normal(n, s.latent + s.head_dim + n % 3 * EXTRA, draw=draw),
            _normal(s.latent, draw=draw),
            _normal(s.head_dim, draw=draw),
            _turns(s, n, draw),
        ),
        # One more than the columns that are read: for as many the compiler would make a special case. The index
        # arithmetic is the same, and the check at start meets both.
        lambda s: ({0: TOKENS, 1: Axis("width", s.latent + s.head_dim + 1)}, _FIXED, _FIXED, _PER_TOKEN),
        lambda glue, stack, q, kv, turns: glue.latents(stack, q, kv, torch.view_as_complex(turns)),
    ),
    "queries": Piece(
        _queries,
        lambda s, n, draw: (_normal(n, s.heads * s.head_dim + n % 3 * EXTRA, draw=draw), _turns(s, n, draw)),
        lambda s: ({0: TOKENS, 1: Axis("width", s.heads * s.head_dim + 1)}, _PER_TOKEN),
        lambda glue, stack, turns: glue.queries(stack, torch.view_as_complex(turns)),
    ),
    "states": Piece(
        _states,
        _state_inputs,
        lambda s: (
            {0: TOKENS, 1: Axis("width", 2, plus=s.latent + s.head_dim)},
            {0: Axis("period", 2), 1: Axis("width", 2)},
            _PER_TOKEN,
        ),
        lambda glue, product, bias, at: glue.states(product, glue.shapes.latent + glue.shapes.head_dim, bias, at),
    ),
    "compress": Piece(
        _compress,
        _window_inputs,
        lambda s: (
            {0: TOKENS, 1: Axis("slots", 2), 2: Axis("entry", s.rope_dim + 2)},
            {0: TOKENS, 1: Axis("slots", 2), 2: Axis("entry", s.rope_dim + 2)},
            {0: Axis("entry", s.rope_dim + 2)},
            _PER_TOKEN,
        ),
        lambda glue, values, scores, weight, turns: glue.compress(values, scores, weight, torch.view_as_complex(turns)),
    ),
    "allowed": Piece(
        _allowed,
        _chunk_inputs,
        lambda s: ({0: TOKENS, 2: Axis("keys")}, {0: TOKENS, 1: Axis("keys")}, _FIXED),
        _plain_allowed,
    ),
    "softmax": Piece(
        _softmax,
        lambda s, n, draw: (_normal(s.heads, n, draw=draw) * s.head_dim**0.5, _normal(s.heads, draw=draw)),
        lambda s: ({1: Axis("keys")}, _FIXED),
        _plain_softmax,
    ),
    "activate": Piece(
        _activate,
        lambda s, n, draw: (_normal(n, 2 * s.intermediate, draw=draw) * 8, _normal(n, 1, draw=draw)),
        lambda s: (_PER_TOKEN, _PER_TOKEN),
        lambda glue, hidden, scale: clamped_swiglu(hidden, glue.shapes.limit) * scale,
    ),
    "route": Piece(
        _route,
        lambda s, n, draw: (_normal(n, s.experts, draw=draw), _normal(s.experts, draw=draw)),
        lambda s: (_PER_TOKEN, _FIXED),
        lambda glue, *args: glue.route(*args),
        most=256,
    ),
    "weigh": Piece(
        _weigh,
        lambda s, n, draw: (
            _normal(n, s.experts, draw=draw),
            torch.rand(n, s.experts, generator=draw).argsort(1)[:, : s.top_k].contiguous(),
        ),
        lambda s: (_PER_TOKEN, _PER_TOKEN),
        lambda glue, *args: glue.weigh(*args),
        most=128,
    ),
}
