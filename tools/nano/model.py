"""DeepSeek-V4 for training: whole rows at once, BF16 products of FP32 weights, with the losses of trunk and drafter.

Weights carry the checkpoint's names (a dot in a leaf's name is written `__`), experts are stacked. The shape of a
computation never depends on its data, so that it compiles once. Serving has its own model; tests compare the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.nano.batch import BLOCK, Batch
from tools.nano.rounding import fp4_weight, fp8_weight, round_index, round_input, round_key
from worker_svc.checkpoint.config import V4Config
from worker_svc.model.rope import frequencies

HIDDEN = -1e9
SHORT_WINDOW = 20
_SPREAD = 4.0
compute_dtype = torch.bfloat16
"""Of products and streams; FP32 only to compare with the serving model."""


@dataclass(frozen=True, slots=True)
class Switches:
    """0-d bool tensors: `rounding` of weights, inputs and keys; `dense`, the indexer selects nothing yet."""

    rounding: Tensor
    dense: Tensor


@dataclass(frozen=True, slots=True)
class Losses:
    """Weighted means over a batch: trunk and drafter cross-entropy in nats, the indexer's divergence, and how far the
    C4 layers are from reading the entries that answers repeat (nats)."""

    trunk: Tensor
    draft: Tensor
    index: Tensor
    guide: Tensor

    def total(self, guide: float) -> Tensor:
        return self.trunk + 0.3 * self.draft + self.index + guide * self.guide


def _matrix(*shape: int, fan_in: int | None = None) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * (fan_in or shape[-1]) ** -0.5)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.to(compute_dtype), weight.to(compute_dtype))


def _unflat(x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
    result: Tensor = torch.unflatten(x, dim, sizes)
    return result


def _rms(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return (_rms(x) * weight).to(compute_dtype)


def _rotate(x: Tensor, turns: Tensor, sign: float = 1.0) -> Tensor:
    """x [..., d] with its last dims turned pair by pair; turns [..., r/2, 2] holds cosine and sine."""
    width = 2 * turns.shape[-2]
    cos, sin = turns[..., 0], turns[..., 1] * sign
    a, b = _unflat(x[..., -width:].float(), -1, (-1, 2)).unbind(-1)
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return torch.cat([x[..., :-width], turned.to(x.dtype)], -1)


class Hyper(nn.Module):
    """Parameters of one mixer; the maths is in `collapse`, compiled once for all mixers."""

    def __init__(self, c: V4Config, *, head: bool) -> None:
        super().__init__()
        n = c.hc_mult
        self.fn = nn.Parameter(torch.randn(n if head else c.hc_rows, n * c.hidden_size) * 0.02)
        base = torch.zeros(self.fn.shape[0])
        base[:n] = -1.1  # sigmoid 0.25: an even collapse
        if not head:
            base[2 * n :] = (4 * torch.eye(n)).flatten()  # streams begin apart
        self.base = nn.Parameter(base)
        self.scale = nn.Parameter(torch.full((1 if head else 3,), 0.1))


def _gates(x: Tensor, fn: Tensor) -> Tensor:
    return F.linear(_rms(x.flatten(2)), fn)


def collapse(x: Tensor, fn: Tensor, base: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Streams [B, T, N, D] -> sublayer input [B, T, D], post [B, T, N], comb [B, T, N, N]."""
    n, g = x.shape[2], _gates(x, fn)
    pre = torch.sigmoid(g[..., :n] * scale[0] + base[:n]) + 1e-6
    post = 2 * torch.sigmoid(g[..., n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = _unflat(g[..., 2 * n :] * scale[2] + base[2 * n :], -1, (n, n)).softmax(-1) + 1e-6
    comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
    for _ in range(19):
        comb = comb / (comb.sum(-1, keepdim=True) + 1e-6)
        comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
    return (pre.unsqueeze(-1) * x).sum(2).to(compute_dtype), post, comb


def expand(out: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The sublayer's output back into the streams; the transpose of comb mixes the old ones."""
    mixed = (comb.unsqueeze(-1) * x.unsqueeze(-2)).sum(2)
    return (post.unsqueeze(-1) * out.unsqueeze(2) + mixed).to(compute_dtype)


def head_logits(x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor, head: Tensor) -> Tensor:
    """Streams [B, T, N, D] -> logits [B, T, V], BF16 products."""
    pre = torch.sigmoid(_gates(x, fn) * scale[0] + base) + 1e-6
    return _linear(_norm((pre.unsqueeze(-1) * x).sum(2), norm), head)


def head_loss(
    x: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm: Tensor,
    head: Tensor,
    targets: Tensor,
    weights: Tensor,
) -> Tensor:
    """Weighted mean cross-entropy of `targets` [B, T]."""
    logits = head_logits(x, fn, base, scale, norm, head).float()
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum().clamp(min=1.0)


class Compressor(nn.Module):
    """One entry for every `ratio` tokens; C4 entries also read the group before."""

    def __init__(self, c: V4Config, ratio: int, width: int) -> None:
        super().__init__()
        channels = width * (2 if ratio == 4 else 1)
        self.ratio, self.width = ratio, width
        self.wkv, self.wgate = _matrix(channels, c.hidden_size), _matrix(channels, c.hidden_size)
        self.ape = nn.Parameter(_spread(width) if ratio == 4 else torch.zeros(ratio, channels))
        self.norm = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, turns: Tensor, starts: Tensor) -> Tensor:
        """x [B, T, D], turns of all positions, starts [B, n] (entries without a past) -> [B, n, width]."""
        groups = _unflat(x, 1, (-1, self.ratio))
        kv, gate = _linear(groups, self.wkv), _linear(groups, self.wgate).float() + self.ape
        if self.ratio == 4:
            kv, gate = self._with_past(kv), self._with_past(gate)
            past = torch.arange(8, device=x.device) < 4
            gate = gate.masked_fill((starts.unsqueeze(-1) & past).unsqueeze(-1), HIDDEN)
        entry = (kv.float() * gate.softmax(2)).sum(2)
        return _rotate(_norm(entry, self.norm), turns[:: self.ratio])

    def _with_past(self, x: Tensor) -> Tensor:
        """a halves of the group before, b halves of the own: [B, n, 4, 2e] -> [B, n, 8, e]."""
        before = F.pad(x[:, :-1, :, : self.width], (0, 0, 0, 0, 1, 0))
        return torch.cat([before, x[..., self.width :]], 2)


def _spread(width: int) -> Tensor:
    """A C4 ape that begins with each eighth of the channels taken from one of the eight tokens.

    From zeros, entries begin as means of eight tokens; reading single tokens out of those is hardly ever learned.
    """
    slot = torch.arange(width) * 8 // width
    token = torch.arange(4).unsqueeze(1)
    return _SPREAD * torch.cat([slot == token, slot == token + 4], 1).float()


class Indexer(nn.Module):
    """Scores of C4 entries. Trained by the divergence from what attention reads; its inputs carry no gradient."""

    def __init__(self, c: V4Config) -> None:
        super().__init__()
        self.heads, self.width = c.index_n_heads, c.index_head_dim
        self.wq_b = _matrix(self.heads * self.width, c.q_lora_rank)
        self.weights_proj = _matrix(self.heads, c.hidden_size)
        self.compressor = Compressor(c, 4, self.width)
        self.register_buffer("hadamard", _sylvester(self.width), persistent=False)

    def forward(self, x: Tensor, qr: Tensor, turns: Tensor, starts: Tensor, on: Tensor) -> Tensor:
        """x [B, T, D], qr [B, T, q_lora] -> scores [B, T, n] FP32."""
        assert isinstance(self.hadamard, Tensor)
        q = _unflat(_linear(round_input(qr, on), fp8_weight(self.wq_b, on)), -1, (self.heads, self.width))
        q = round_index(_linear(_rotate(q, turns.unsqueeze(1)), self.hadamard) * self.width**-0.5, on)
        k = round_index(_linear(self.compressor(x, turns, starts), self.hadamard) * self.width**-0.5, on)
        products = _unflat(torch.bmm(q.flatten(1, 2), k.transpose(1, 2)), 1, (-1, self.heads))
        weights = _linear(x, self.weights_proj).float() * (self.heads * self.width) ** -0.5
        scores: Tensor = (F.relu(products.float()) * weights.unsqueeze(-1)).sum(2)
        return scores


def _sylvester(size: int) -> Tensor:
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return matrix


class Attention(nn.Module):
    """Window keys of two blocks of 128 and, with a ratio, compressed entries, in one softmax with a sink."""

    def __init__(self, c: V4Config, ratio: int) -> None:
        super().__init__()
        self.ratio, self.heads, self.width, self.rope = ratio, c.num_attention_heads, c.head_dim, c.qk_rope_head_dim
        self.groups, self.top_k = c.o_groups, c.index_topk
        rows, group_rows = self.heads * self.width, c.o_groups * c.o_lora_rank
        self.wq_a, self.q_norm = _matrix(c.q_lora_rank, c.hidden_size), nn.Parameter(torch.ones(c.q_lora_rank))
        self.wq_b = _matrix(rows, c.q_lora_rank)
        self.wkv, self.kv_norm = _matrix(self.width, c.hidden_size), nn.Parameter(torch.ones(self.width))
        self.attn_sink = nn.Parameter(torch.zeros(self.heads))
        self.wo_a, self.wo_b = _matrix(group_rows, rows // c.o_groups), _matrix(c.hidden_size, group_rows)
        if ratio:
            self.compressor = Compressor(c, ratio, self.width)
        if ratio == 4:
            self.indexer = Indexer(c)

    def forward(
        self,
        y: Tensor,
        norm: Tensor,
        turns: Tensor,
        document: Tensor,
        hide: Tensor,
        short: Tensor,
        source: Tensor,
        on: Tensor,
        dense: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """y [B, T, D] before its norm; turns [T, r/2, 2] -> output [B, T, D], [indexer's divergence, guide]."""
        x = _norm(y, norm)
        rows, length, _ = x.shape
        rounded = round_input(x, on)
        qr = _norm(_linear(rounded, fp8_weight(self.wq_a, on)), self.q_norm)
        q = _unflat(_linear(round_input(qr, on), fp8_weight(self.wq_b, on)), -1, (self.heads, self.width))
        q = _rotate(_rms(q).to(compute_dtype), turns.unsqueeze(1))
        k = _rotate(_norm(_linear(rounded, fp8_weight(self.wkv, on)), self.kv_norm), turns)
        k = round_key(k, self.rope, on)
        starts = F.pad(document[:, 1:] != document[:, :-1], (1, 0), value=True)
        blocks = _unflat(k, 1, (-1, BLOCK))
        window = torch.cat([F.pad(blocks[:, :-1], (0, 0, 0, 0, 1, 0)), blocks], 2).flatten(0, 1)
        per_block = q.reshape(-1, BLOCK * self.heads, self.width)
        scores = torch.bmm(per_block, window.transpose(1, 2)).view(rows, length, self.heads, 2 * BLOCK).float()
        scores = scores * self.width**-0.5
        scores = scores.masked_fill(~self._window_seen(starts, short, length).unsqueeze(2), HIDDEN)
        extras = scores.new_zeros(2)
        if not self.ratio:
            p = (scores - self._total(scores)).exp()
            out = torch.bmm(p.to(compute_dtype).reshape(-1, BLOCK * self.heads, 2 * BLOCK), window)
            return self._output(out.view(rows, length, self.heads, -1), turns, on), extras
        entries, seen = self._entries(x, turns, starts, document, hide, on)
        index = None
        if self.ratio == 4:
            index = self.indexer(x.detach(), qr.detach(), turns, self._entry_starts(starts), on)
            index = index.masked_fill(~seen, HIDDEN)
            chosen = index.detach().topk(min(self.top_k, index.shape[-1]), -1, sorted=False).indices
            seen = seen & (torch.zeros_like(seen).scatter(-1, chosen, True) | dense)
        far = torch.bmm(q.flatten(1, 2), entries.transpose(1, 2)).view(rows, length, self.heads, -1).float()
        far = (far * self.width**-0.5).masked_fill(~seen.unsqueeze(2), HIDDEN)
        total = self._total(torch.cat([scores, far], -1))
        near_p, far_p = (scores - total).exp(), (far - total).exp()
        if index is not None:
            extras = torch.stack([self._divergence(far_p.detach(), index, seen), self._guide(far_p, source, seen)])
        near_p = near_p.to(compute_dtype).reshape(-1, BLOCK * self.heads, 2 * BLOCK)
        out = torch.bmm(near_p, window).view(rows, length * self.heads, -1)
        out = out + torch.bmm(far_p.to(compute_dtype).flatten(1, 2), entries)
        return self._output(out.view(rows, length, self.heads, -1), turns, on), extras

    def _total(self, scores: Tensor) -> Tensor:
        return torch.logaddexp(scores.logsumexp(-1), self.attn_sink).unsqueeze(-1)

    def _window_seen(self, starts: Tensor, short: Tensor, length: int) -> Tensor:
        """[B, T, 256]: the 128 tokens up to the query, in its block and, unless a document starts, the one before."""
        query = torch.arange(BLOCK, device=starts.device).unsqueeze(1)
        key = torch.arange(2 * BLOCK, device=starts.device)
        near = (key > query) & (key <= query + BLOCK)
        seen = near & ((key >= BLOCK) | ~starts[:, :, None, None])
        seen = seen & ((key > query + BLOCK - SHORT_WINDOW) | ~short[:, :, None, None])
        return seen.reshape(starts.shape[0], length, 2 * BLOCK)

    def _entry_starts(self, starts: Tensor) -> Tensor:
        """[B, n]: entries at the start of a document."""
        per_block = BLOCK // self.ratio
        first = torch.arange(per_block, device=starts.device) == 0
        return (starts.unsqueeze(-1) & first).flatten(1)

    def _entries(
        self, x: Tensor, turns: Tensor, starts: Tensor, document: Tensor, hide: Tensor, on: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Entries [B, n, d] and which the queries may read [B, T, n]."""
        entries = round_key(self.compressor(x, turns, self._entry_starts(starts)), self.rope, on)
        length = x.shape[1]
        of_entry = document.repeat_interleave(BLOCK // self.ratio, 1)
        of_query = document.repeat_interleave(BLOCK, 1)
        closed = (torch.arange(length, device=x.device).unsqueeze(1) + 1) // self.ratio
        seen = torch.arange(entries.shape[1], device=x.device) < closed
        seen = seen & (of_query.unsqueeze(2) == of_entry.unsqueeze(1))
        return entries, seen & ~hide.repeat_interleave(BLOCK, 1).unsqueeze(2)

    def _divergence(self, p: Tensor, index: Tensor, seen: Tensor) -> Tensor:
        """KL from the heads' mean attention over entries to the indexer's softmax, weighted by its mass."""
        target = p.mean(2) * seen
        mass = target.sum(-1, keepdim=True)
        target = target / (mass + 1e-9)
        found = index.masked_fill(~seen, HIDDEN).log_softmax(-1)
        return (mass.squeeze(-1) * (target * ((target + 1e-9).log() - found) * seen).sum(-1)).mean()

    def _guide(self, p: Tensor, source: Tensor, seen: Tensor) -> Tensor:
        """-log of the first half of the heads' attention on the entries that hold the token to be repeated."""
        first = source.clamp(min=0).unsqueeze(-1)
        second = (first + 1).clamp(max=p.shape[-1] - 1)
        mass = p[:, :, : self.heads // 2].mean(2)
        read = (mass.gather(-1, first) + mass.gather(-1, second)).squeeze(-1)
        known = (source >= 0) & seen.gather(-1, first).squeeze(-1)
        return ((read + 1e-3).log().neg() * known).sum() / known.sum().clamp(min=1)

    def _output(self, out: Tensor, turns: Tensor, on: Tensor) -> Tensor:
        """[B, T, H, d] -> [B, T, D]; the input of wo_a stays as it is, that of wo_b is rounded."""
        out = _unflat(_rotate(out, turns.unsqueeze(1), -1.0).flatten(2), -1, (self.groups, -1))
        weight = _unflat(fp8_weight(self.wo_a, on), 0, (self.groups, -1)).to(compute_dtype)
        mixed = torch.einsum("btgd,god->btgo", out, weight).flatten(2)
        return _linear(round_input(mixed, on), fp8_weight(self.wo_b, on))


class SharedExpert(nn.Module):
    """Parameters of the expert that every token passes."""

    def __init__(self, c: V4Config) -> None:
        super().__init__()
        inner, outer = c.moe_intermediate_size, c.hidden_size
        self.w1, self.w3, self.w2 = _matrix(inner, outer), _matrix(inner, outer), _matrix(outer, inner)


class Experts(nn.Module):
    """Routed experts, stacked [E, out, in]."""

    def __init__(self, c: V4Config) -> None:
        super().__init__()
        e, inner, outer = c.n_routed_experts, c.moe_intermediate_size, c.hidden_size
        self.w1, self.w3, self.w2 = _matrix(e, inner, outer), _matrix(e, inner, outer), _matrix(e, outer, inner)


class MoE(nn.Module):
    """All experts compute every token and the router's weights, mostly zeros, multiply: the same sums, no sorting."""

    def __init__(self, c: V4Config, *, hashed: bool) -> None:
        super().__init__()
        self.k, self.factor, self.limit, self.hashed = (
            c.num_experts_per_tok,
            c.routed_scaling_factor,
            c.swiglu_limit,
            hashed,
        )
        self.gate = _matrix(c.n_routed_experts, c.hidden_size)
        self.experts, self.shared_experts = Experts(c), SharedExpert(c)
        if hashed:
            table = torch.stack([torch.randperm(c.n_routed_experts)[: self.k] for _ in range(c.vocab_size)])
            self.register_buffer("gate__tid2eid", table)
        else:
            self.register_buffer("gate__bias", torch.zeros(c.n_routed_experts))
        self.register_buffer("load", torch.zeros(c.n_routed_experts), persistent=False)

    def forward(self, y: Tensor, norm: Tensor, ids: Tensor, on: Tensor) -> Tensor:
        """y [B, T, D] before its norm, ids [B, T] -> [B, T, D]."""
        x = _norm(y, norm)
        scores = F.softplus(F.linear(x.float(), self.gate)).sqrt()
        if self.hashed:
            assert isinstance(self.gate__tid2eid, Tensor)
            chosen = F.embedding(ids, self.gate__tid2eid)
        else:
            assert isinstance(self.gate__bias, Tensor)
            chosen = (scores.detach() + self.gate__bias).topk(self.k, -1).indices
        mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        if self.training:
            self.load.copy_(mask.detach().sum((0, 1)))  # type: ignore[operator]
        weights = scores * mask
        weights = self.factor * weights / weights.sum(-1, keepdim=True)
        x = round_input(x, on)
        e, s = self.experts, self.shared_experts
        w1, w3 = fp4_weight(e.w1, on).flatten(0, 1), fp4_weight(e.w3, on).flatten(0, 1)
        inner = _unflat(self._activate(_linear(x, w1), _linear(x, w3)), -1, (mask.shape[-1], -1))
        inner = round_input((inner * weights.unsqueeze(-1)).to(compute_dtype), on).flatten(-2)
        out = _linear(inner, fp4_weight(e.w2, on).permute(1, 0, 2).flatten(1))
        inner = self._activate(_linear(x, fp8_weight(s.w1, on)), _linear(x, fp8_weight(s.w3, on))).to(compute_dtype)
        return out + _linear(round_input(inner, on), fp8_weight(s.w2, on))

    def _activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate.float().clamp(max=self.limit)) * up.float().clamp(-self.limit, self.limit)


class Block(nn.Module):
    """One layer between its mixers."""

    def __init__(self, c: V4Config, ratio: int, *, hashed: bool) -> None:
        super().__init__()
        self.attn_norm, self.ffn_norm = (nn.Parameter(torch.ones(c.hidden_size)) for _ in range(2))
        self.attn, self.ffn = Attention(c, ratio), MoE(c, hashed=hashed)
        self.hc_attn, self.hc_ffn = Hyper(c, head=False), Hyper(c, head=False)

    def forward(self, x: Tensor, ids: Tensor, turns: Tensor, batch: Batch, switches: Switches) -> tuple[Tensor, Tensor]:
        """Streams [B, T, N, D] -> streams, [indexer's divergence, guide]."""
        a, f = self.hc_attn, self.hc_ffn
        y, post, comb = collapse(x, a.fn, a.base, a.scale)
        hide = batch.hide_c4 if self.attn.ratio == 4 else batch.hide_c128
        y, extras = self.attn(
            y,
            self.attn_norm,
            turns,
            batch.document,
            hide,
            batch.short,
            batch.source,
            switches.rounding,
            switches.dense,
        )
        x = expand(y, x, post, comb)
        y, post, comb = collapse(x, f.fn, f.base, f.scale)
        return expand(self.ffn(y, self.ffn_norm, ids, switches.rounding), x, post, comb), extras


class Draft(Block):
    """The draft layer: a window-only block over streams and the next token's embedding."""

    def __init__(self, c: V4Config) -> None:
        super().__init__(c, 0, hashed=False)
        self.e_proj, self.h_proj = (_matrix(c.hidden_size, c.hidden_size) for _ in range(2))
        self.enorm, self.hnorm, self.norm = (nn.Parameter(torch.ones(c.hidden_size)) for _ in range(3))
        self.hc_head = Hyper(c, head=True)

    def join(self, x: Tensor, embedded: Tensor, on: Tensor) -> Tensor:
        """Streams at t and the embedding of t+1 -> the block's streams."""
        e = _linear(round_input(_norm(embedded, self.enorm), on), fp8_weight(self.e_proj, on))
        return e.unsqueeze(2) + _linear(round_input(_norm(x, self.hnorm), on), fp8_weight(self.h_proj, on))


class NanoModel(nn.Module):
    """Trunk and draft layer of a config whose dimensions are multiples of 128."""

    def __init__(self, config: V4Config, length: int) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Parameter(torch.randn(config.vocab_size, config.hidden_size) * 0.5)
        self.head = _matrix(config.vocab_size, config.hidden_size)
        self.norm, self.hc_head = nn.Parameter(torch.ones(config.hidden_size)), Hyper(config, head=True)
        self.layers = nn.ModuleList(
            Block(config, config.compress_ratios[layer], hashed=config.is_hash_layer(layer))
            for layer in range(config.num_hidden_layers)
        )
        self.mtp = nn.ModuleList([Draft(config)])
        for name, compressed in (("plain_turns", False), ("compressed_turns", True)):
            angles = torch.arange(length).float().unsqueeze(1) * frequencies(config, compressed=compressed)
            self.register_buffer(name, torch.stack([angles.cos(), angles.sin()], -1), persistent=False)

    def streams(self, batch: Batch, switches: Switches) -> tuple[Tensor, Tensor]:
        """The trunk up to its head: streams [B, T, N, D] and the sums of [indexers' divergence, guide]."""
        x = F.embedding(batch.ids, self.embed).to(compute_dtype).unsqueeze(2).repeat(1, 1, self.config.hc_mult, 1)
        extras = x.new_zeros(2, dtype=torch.float32)
        for block in self.layers:
            assert isinstance(block, Block)
            x, part = block(x, batch.ids, self._turns(block.attn.ratio, batch), batch, switches)
            extras = extras + part
        return x, extras

    def draft_streams(self, x: Tensor, batch: Batch, switches: Switches) -> Tensor:
        """Streams of the draft layer: at t it knows the token t+1."""
        following = torch.roll(batch.ids, -1, 1)
        draft = self.draft
        joined = draft.join(x, F.embedding(following, self.embed), switches.rounding)
        streams: Tensor = draft(joined, following, self._turns(0, batch), batch, switches)[0]
        return streams

    @property
    def draft(self) -> Draft:
        block = self.mtp[0]
        assert isinstance(block, Draft)
        return block

    def losses(self, batch: Batch, switches: Switches) -> Losses:
        """Losses of a batch."""
        x, extras = self.streams(batch, switches)
        trunk = self._loss(x, self.hc_head, self.norm, batch, 1)
        y = self.draft_streams(x, batch, switches)
        return Losses(trunk, self._loss(y, self.draft.hc_head, self.draft.norm, batch, 2), extras[0], extras[1])

    def logits(self, batch: Batch, switches: Switches) -> tuple[Tensor, Tensor]:
        """Logits of trunk and draft layer [B, T, V], for evaluation."""
        x, _ = self.streams(batch, switches)
        y = self.draft_streams(x, batch, switches)
        h, d = self.hc_head, self.draft.hc_head
        trunk = head_logits(x, h.fn, h.base, h.scale, self.norm, self.head)
        return trunk, head_logits(y, d.fn, d.base, d.scale, self.draft.norm, self.head)

    def balance(self, rate: float) -> None:
        """Move every learned router's bias toward even load."""
        for module in self.modules():
            if isinstance(module, MoE) and not module.hashed:
                load, bias = module.load, module.gate__bias
                assert isinstance(load, Tensor) and isinstance(bias, Tensor)
                bias.add_(rate * torch.sign(load.mean() - load))

    def _turns(self, ratio: int, batch: Batch) -> Tensor:
        table = self.compressed_turns if ratio else self.plain_turns
        assert isinstance(table, Tensor)
        return table[: batch.ids.shape[1]]

    def _loss(self, x: Tensor, hyper: Hyper, norm: Tensor, batch: Batch, ahead: int) -> Tensor:
        targets = torch.roll(batch.ids, -ahead, 1)
        weights = torch.roll(batch.weights, -ahead, 1)
        weights[:, -ahead:] = 0
        return head_loss(x, hyper.fn, hyper.base, hyper.scale, norm, self.head, targets, weights)


def compile_parts(model: NanoModel) -> None:
    """Compile the pieces that repeat: attention by ratio, experts by router, mixers and heads once for all."""
    global collapse, expand, head_loss
    collapse, expand = torch.compile(collapse, dynamic=False), torch.compile(expand, dynamic=False)
    head_loss = torch.compile(head_loss, dynamic=False)
    for module in model.modules():
        if isinstance(module, (Attention, MoE)):
            module.compile(dynamic=False)


def renew_c4(model: NanoModel) -> None:
    """Forget what the C4 compressors have learned, for a training that never used them."""
    for block in model.layers:
        assert isinstance(block, Block)
        if block.attn.ratio != 4:
            continue
        for old in (block.attn.compressor, block.attn.indexer.compressor):
            old.load_state_dict(Compressor(model.config, 4, old.width).state_dict())


def parameter_count(model: NanoModel) -> int:
    """Parameters and router tables as the checkpoint counts them."""
    return sum(math.prod(p.shape) for p in model.parameters())
