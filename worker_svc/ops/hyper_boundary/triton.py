"""The boundary as two passes over the streams, each a Triton kernel in two forms: for few and for many tokens.

Pass 1 splits tokens and channels: it mixes the sublayer's output into the streams and sums, per split, the next
mixer's products (tensor cores, BF16 streams times the mixer's high and low halves) and what the norm needs. Pass 2
splits again: every program adds the partial sums (a few hundred numbers), so no third launch and no atomics. At few
tokens one token is spread over many programs, and the norm's sum of squares comes from the products of the streams,
|sum_j pre_j x_j|^2 = sum_jk pre_j pre_k <x_j, x_k>. At many tokens a program owns a token and squares what it made;
the Sinkhorn loops run in programs of their own, a token per thread.
"""
# ruff: noqa: ANN001, ANN202
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="import-untyped"

from dataclasses import dataclass

import triton
from torch import Tensor

from worker_svc import tuning
from worker_svc.ops import invariant
from worker_svc.ops.hyper_boundary.collapse import collapse_norm
from worker_svc.ops.hyper_boundary.mix import mix_few, mix_many
from worker_svc.ops.hyper_boundary.mixer import BoundaryRules, Mixer, Workspace
from worker_svc.ops.partial_sums import parts_of

EMBED, OUTPUT, EXPERTS = 0, 1, 2
_COLUMNS = Workspace.COLUMNS
GRAM_TOKENS = 64
"""Up to here a token's channels are spread over several programs of pass 2."""
WEIGHT_TOKENS = 32
"""Tokens of a program that makes post and comb of many, one per thread of a warp."""


@dataclass(frozen=True, slots=True)
class Split:
    """How pass 1 is cut: tokens and channels per tile, tiles per program, programs along the channels, warps, pipeline
    stages; registers of a thread at most, 0 for as many as it takes. `benchmarks gpu_ops --parts boundary_cuts` tries
    others."""

    tokens: int
    channels: int
    tiles: int
    parts: int
    warps: int
    stages: int = 2
    registers: int = 0

    @property
    def gram(self) -> bool:
        """True if every program holds one tile: then the products of streams cost one reduction."""
        return self.tiles == 1


def split(tokens: int, width: int) -> Split:
    """Enough programs for the whole chip at any number of tokens, and at most 8 parts above GRAM_TOKENS.

    In deterministic mode (`ops.invariant`) the cut of a middling step serves all: parts are what sums are made of.
    """
    if invariant.on():
        return built_in_split(GRAM_TOKENS + 1, width)
    cut = tuning.value(split_name(tokens), None)
    return built_in_split(tokens, width) if cut is None else split_of(cut, tokens, width)


def split_name(tokens: int) -> str:
    """The choice (see `tuning.choices`) that cuts a boundary of so many tokens."""
    if tokens <= GRAM_TOKENS:
        return "hyper_boundary.split_16" if tokens <= 16 else "hyper_boundary.split_64"
    return "hyper_boundary.split_1024" if tokens <= 1024 else "hyper_boundary.split_more"


def split_of(cut: tuple[int, ...], tokens: int, width: int) -> Split:
    """A measured cut: tokens, channels and warps of a tile up to GRAM_TOKENS; above, the most parts behind the
    channels, and stages and registers behind the warps. The built-in one where its tiles do not divide the width."""
    if width % cut[1]:
        return built_in_split(tokens, width)
    if len(cut) == 3:
        rows, channels, warps = cut
        return Split(rows, channels, 1, -(-width // channels), warps)
    rows, channels, parts, warps, stages, registers = cut
    tiles = -(-width // (channels * parts))
    return Split(rows, channels, tiles, -(-width // (channels * tiles)), warps, stages, registers)


def built_in_split(tokens: int, width: int) -> Split:
    """What an H200 liked best."""
    if tokens <= GRAM_TOKENS:
        channels = min(64 if tokens <= 16 else 128, width)
        return Split(16, channels, 1, -(-width // channels), 4)
    channels, parts, stages = (64, 8, 3) if tokens <= 1024 else (64, 4, 2)
    tiles = -(-width // (channels * parts))
    return Split(16, channels, tiles, -(-width // (channels * tiles)), 4, stages)


def embed_mix(ids: Tensor, embed: Tensor, x_out: Tensor, mixer: Mixer, workspace: Workspace) -> None:
    """See the door."""
    _pass1(x_out, x_out, x_out, x_out, x_out, x_out, ids, embed, mixer, workspace, EMBED)


def post_mix(
    x_in: Tensor,
    x_out: Tensor,
    post: Tensor,
    comb: Tensor,
    mixer: Mixer,
    workspace: Workspace,
    out: Tensor | None,
    rows: Tensor | None,
    shared: Tensor | None,
) -> None:
    """See the door."""
    if out is not None:
        _pass1(x_in, x_out, out, out, post, comb, post, x_in, mixer, workspace, OUTPUT, summed=parts_of(out, 2))
    else:
        assert rows is not None and shared is not None
        per_token = rows.shape[0] // max(x_in.shape[0], 1)
        _pass1(x_in, x_out, rows, shared, post, comb, post, x_in, mixer, workspace, EXPERTS, per_token=per_token)


def pre_norm(
    x: Tensor,
    mixer: Mixer,
    workspace: Workspace,
    norm_weight: Tensor,
    rules: BoundaryRules,
    y: Tensor,
    post: Tensor,
    comb: Tensor,
    q: Tensor | None,
    sf: Tensor | None,
    sf2: Tensor | None,
) -> None:
    """See the door."""
    none = y  # never read: the kernel's flags say which arguments are there
    _pass2(x, mixer, workspace, norm_weight, rules, None, y, post, comb, q, sf, sf2, none)


def head_norm(
    x: Tensor, mixer: Mixer, workspace: Workspace, norm_weight: Tensor, rules: BoundaryRules, rows: Tensor, z: Tensor
) -> None:
    """See the door."""
    _pass2(x, mixer, workspace, norm_weight, rules, rows, z, z, z, None, None, None, z)


def _pass1(
    x_in, x_out, out, shared, post, comb, ids, embed, mixer, workspace, source, *, per_token=1, summed=1
):  # fmt: skip
    tokens, _, width = x_out.shape
    if tokens == 0:
        return
    cut = split(tokens, width)
    assert tokens * cut.parts * _COLUMNS <= workspace.partials.numel(), "the workspace is for fewer tokens"
    assert width % cut.channels == 0, (width, cut.channels)
    kernel, along = (mix_few, {"PARTS": cut.parts}) if cut.gram else (mix_many, {"TILES": cut.tiles})
    limit = {"maxnreg": cut.registers} if cut.registers else {}
    kernel[(triton.cdiv(tokens, cut.tokens), cut.parts)](
        x_in,
        x_out,
        out,
        shared,
        post,
        comb,
        ids,
        embed,
        mixer.both,
        workspace.partials,
        tokens,
        WIDTH=width,
        OUTPUTS=mixer.outputs,
        SOURCE=source,
        PER_TOKEN=per_token,
        SUMMED=summed,
        TOKENS=cut.tokens,
        CHANNELS=cut.channels,
        **along,
        **limit,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )


def _pass2(x, mixer, workspace, norm_weight, rules, rows, y, post, comb, q, sf, sf2, none):
    tokens, _, width = x.shape
    asked = tokens if rows is None else rows.shape[0]
    if asked == 0:
        return
    cut = split(tokens, width)
    block = triton.next_power_of_2(width)
    if cut.gram:
        block = min(128 if tokens <= 16 or invariant.on() else 512, block)
    pieces = triton.cdiv(width, block)
    scales = none if sf is None else sf
    twice = scales if sf2 is None else sf2
    head = rows is not None
    makers = 0 if cut.gram or head else triton.cdiv(asked, WEIGHT_TOKENS)
    collapse_norm[(asked + makers, pieces + (cut.gram and not head))](
        x,
        workspace.partials,
        mixer.scale,
        mixer.base,
        norm_weight,
        none if rows is None else rows,
        y,
        none if q is None else q,
        scales,
        twice,
        post,
        comb,
        asked,
        tokens,
        makers,
        scales.stride(0),
        scales.stride(1),
        twice.stride(0),
        twice.stride(1),
        WIDTH=width,
        PARTS=cut.parts,
        PARTS_POW2=triton.next_power_of_2(cut.parts),
        GRAM=cut.gram,
        HEAD=head,
        QUANT=q is not None,
        TWICE=sf2 is not None,
        ITERATIONS=rules.iterations,
        EPS=rules.eps,
        NORM_EPS=rules.norm_eps,
        PIECES=pieces,
        BLOCK=block,
        TOKENS=WEIGHT_TOKENS,
        num_warps=1 if block <= 128 else 4 if block <= 1024 else 8,
    )
