"""A worker and a gateway for scheduler tests: strict about the frame contract, with tokens that name their context.

The worker keeps the ids behind every page, tail and ring, so a wrong page, a stale tail or a skipped position shows as
an assertion or as other tokens than `reference` gives.
"""

import zlib
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from meshkit import frames as f
from meshkit.types import PAGE_TOKENS, PROTO_REV, FinishReason, ModelInfo, RequestId, SamplingParams

EOS = 1
VOCAB = 50_000
MODEL = ModelInfo(name="m", revision="r", vocab_size=VOCAB, max_context=100_000, eos_ids=(EOS,), kv_layout_id="kv")


def mix(crc, token):
    return zlib.crc32(int(token).to_bytes(4, "little"), crc)


def crc_of(ids):
    crc = 0
    for i in ids:
        crc = mix(crc, i)
    return crc


def draw(crc, seed, choice, pos):
    h = zlib.crc32(b"%d %d %d %d" % (crc, seed, choice, pos))
    return EOS if h % 41 == 0 else 2 + h % (VOCAB - 2)


def ended(params, token, n_emitted):
    stops = token in params.stop_ids or (token == EOS and not params.ignore_eos)
    if stops and n_emitted >= max(1, params.min_tokens):
        return FinishReason.STOP
    return FinishReason.LENGTH if n_emitted >= params.max_tokens else FinishReason.NONE


def constrain(crc, grammar_id, out):
    """What a constrained row draws from also depends on the grammar and on all ids it has emitted."""
    return zlib.crc32(grammar_id, crc ^ crc_of(out)) if grammar_id else crc


def reference(prompt, params, seed, choice, grammar_id=b""):
    """The ids and finish reason of an undisturbed run."""
    crc, out = crc_of(prompt), []
    while True:
        token = draw(constrain(crc, grammar_id, out), seed, choice, len(out))
        out.append(token)
        crc = mix(crc, token)
        reason = ended(params, token, len(out))
        if reason:
            return out, reason


@dataclass
class Slot:
    init: f.SlotInit
    ids: list = field(default_factory=list)  # committed context
    crc: int = 0
    next: int = -1
    n_emitted: int = 0
    out: list = field(default_factory=list)
    finished: bool = False
    pages: list = field(default_factory=list)
    spare: int = -1
    spare_pos: int = 0
    exact_from: int = 0  # tails before it would not be exact
    fresh: bool = True  # nothing fed yet: start must be backed by a copy or a tail


class FakeWorker:
    def __init__(self, group="w0", boot=1, slots=4, pages=16, tails=4, ranks=1, step_tokens=4096, layers=0):
        self.hello = f.WorkerHello(
            group=group,
            boot=boot,
            build="b",
            proto_rev=PROTO_REV,
            model=replace(MODEL, layers=layers),
            ranks=ranks,
            slots=slots,
            pages=pages,
            tails=tails,
            max_gen=0,
            max_step_tokens=step_tokens,
            max_verify=1,
        )
        self.slots = {}
        self.content = {}  # page -> {offset: id}
        self.published = {}  # page -> PublishedPage
        self.tails = {}  # tail -> (ids tuple, crc)
        self.pub_tails = {}
        self.max_gen = 0
        self.step = 0
        self.frames = deque()
        self.log = []
        self.park = lambda row: False
        self.fail = lambda row: None  # -> (code, message)

    def say_hello(self):
        self.step = 0
        self.frames.clear()
        return f.WorkerHello(**{**{k: getattr(self.hello, k) for k in self.hello.__slots__}, "max_gen": self.max_gen})

    def dump(self):
        slots = []
        for n, s in sorted(self.slots.items()):
            slots.append(
                f.DumpSlot(
                    slot=n,
                    slot_gen=s.init.slot_gen,
                    request_id=s.init.request_id,
                    attempt=s.init.attempt,
                    choice=s.init.choice,
                    length=len(s.ids),
                    n_emitted=s.n_emitted,
                    next=s.next,
                    finished=s.finished,
                    last_ids=tuple(s.out[-128:]),
                    pages=tuple(s.pages),
                    spare=s.spare,
                    spare_pos=s.spare_pos,
                    grammar_id=s.init.grammar_id,
                )
            )
        return f.Dump(
            slots=tuple(slots),
            pages=tuple(self.published.values()),
            tails=tuple(f.PublishedTail(t, p) for t, p in self.pub_tails.items()),
            last=True,
        )

    # ---- one frame ----

    def run(self, fr):
        self.step += 1
        assert fr.step == self.step
        self.log.append(fr)
        freed = {slot for slot, _ in fr.frees}
        for p in fr.retire_pages:
            del self.published[p]
            assert not any(p in s.pages for n, s in self.slots.items() if n not in freed), "retired yet in use"
        for t in fr.retire_tails:
            del self.pub_tails[t]
        for slot, gen in fr.frees:
            assert self.slots.pop(slot).init.slot_gen == gen
        for i in fr.inits:
            assert i.slot not in self.slots
            assert i.slot_gen > self.max_gen
            self.max_gen = i.slot_gen
            self.slots[i.slot] = Slot(i, n_emitted=i.n_emitted, out=list(i.emitted))
        for slot, tail in fr.spares:
            assert self.slots[slot].spare < 0
            assert all(s.spare != tail for s in self.slots.values()) and tail not in self.pub_tails
            self.slots[slot].spare, self.slots[slot].spare_pos = tail, 0
            self.tails.pop(tail, None)
        for src, dst, sp, dp in fr.copies:
            a, b = self.slots[src], self.slots[dst]
            assert b.fresh and b.init.start == len(a.ids)
            b.ids, b.crc = list(a.ids), a.crc
            assert (sp < 0) == (len(a.ids) % PAGE_TOKENS == 0) and (dp < 0) == (sp < 0)
            if sp >= 0:
                assert sp == a.pages[len(a.ids) // PAGE_TOKENS] and dp not in self.published
                self.content[dp] = dict(self.content[sp])
        for slot, page in fr.appends:
            s = self.slots[slot]
            assert page // self.hello.pages == slot // self.hello.slots
            s.pages.append(page)
        for slot, tail in fr.tail_loads:
            s = self.slots[slot]
            s.ids, s.crc = list(self.tails[tail][0]), self.tails[tail][1]
            assert s.fresh and len(s.ids) == s.init.start
        return self._forward(fr)

    def _forward(self, fr):
        slots = fr.slots.tolist()
        assert len(set(slots)) == len(slots)
        ranks = [s // self.hello.slots for s in slots]
        assert ranks == sorted(ranks)
        off = fr.rank_off.tolist()
        assert [ranks[off[r] : off[r + 1]] for r in range(self.hello.ranks)] == [
            [r] * ranks.count(r) for r in range(self.hello.ranks)
        ]
        chunks, at = {}, 0
        for i, start, n, wf, sample in zip(
            fr.chunk_rows.tolist(), fr.chunk_starts.tolist(), fr.chunk_lens.tolist(), fr.chunk_write_froms.tolist(),
            fr.chunk_samples.tolist(), strict=True,
        ):  # fmt: skip
            chunks[i] = (start, fr.chunk_ids[at : at + n].tolist(), wf, sample)
            at += n
        assert at == len(fr.chunk_ids)
        assert fr.decode_only == (not chunks)
        saves = {}
        for n, pos, tail in fr.tail_saves:
            saves.setdefault(n, []).append((pos, tail))
        states, counts, tokens, spares, faults = [], [], [], [], []
        for i, n in enumerate(slots):
            s = self.slots[n]
            start, ids, write_from, sample = chunks.get(i, (len(s.ids), [s.next], 0, 1))
            if s.finished:
                states.append(f.RowState.FINISHED_BEFORE)
                counts.append(0)
                continue
            if s.fresh and start and not s.ids:
                self._replay(s, start, write_from)
            assert start == len(s.ids), "a chunk starts at the slot's length"
            assert not s.fresh or start == s.init.start
            s.fresh = False
            if sample and (fault := self.fail((n, s))):
                s.finished = True
                states.append(f.RowState.FAILED)
                counts.append(0)
                faults.append(f.RowFault(i, *fault))
                continue
            if sample and self.park((n, s)):
                if i in chunks:
                    # The forward ran, saves included; only its last token is given up.
                    self._feed(n, s, ids, saves, write_from)
                    s.next = s.ids.pop()
                    s.crc = crc_of(s.ids)
                states.append(f.RowState.PARKED)
                counts.append(0)
                continue
            crossed = self._feed(n, s, ids, saves, write_from)
            if not sample:
                states.append(f.RowState.CHUNK)
                counts.append(0)
            else:
                token = draw(constrain(s.crc, s.init.grammar_id, s.out), s.init.seed, s.init.choice, s.n_emitted)
                s.next, s.n_emitted = token, s.n_emitted + 1
                s.out.append(token)
                s.finished = bool(ended(s.init.params, token, s.n_emitted))
                states.append(f.RowState.FINISHED if s.finished else f.RowState.SAMPLED)
                counts.append(1)
                tokens.append(token)
            if crossed and s.spare >= 0 and not s.finished:
                pos = len(s.ids) // PAGE_TOKENS * PAGE_TOKENS
                assert pos >= s.exact_from, "a spare is given once a replay has become exact"
                self.tails[s.spare], s.spare_pos = (tuple(s.ids[:pos]), crc_of(s.ids[:pos])), pos
                spares.append((i, pos))
        for page in fr.publishes:
            assert page.page not in self.published and len(self.content[page.page]) == PAGE_TOKENS
            assert page.parent == -1 or page.parent in self.published
            assert page.page_gen > 0 and len(page.key) == 16
            self.max_gen = max(self.max_gen, page.page_gen)
            self.published[page.page] = page
        for tail, page in fr.publish_tails:
            assert page in self.published and tail in self.tails and tail not in self.pub_tails
            ids = self.tails[tail][0]
            assert [self.content[page][o] for o in range(PAGE_TOKENS)] == list(ids[-PAGE_TOKENS:])
            self.pub_tails[tail] = page
            for s in self.slots.values():
                if s.spare == tail:
                    s.spare, s.spare_pos = -1, 0
        return f.ResultFrame(
            step=fr.step, t_start_ns=fr.step * 10**7, t_end_ns=fr.step * 10**7 + 5 * 10**6,
            states=np.array(states, np.uint8), counts=np.array(counts, np.uint8), tokens=np.array(tokens, np.int32),
            spare_rows=np.array([r for r, _ in spares], np.int32),
            spare_positions=np.array([p for _, p in spares], np.int32), faults=tuple(faults),
        )  # fmt: skip

    def _replay(self, s, start, write_from):
        """An exact replay: older tokens count only through the pages, which must be there."""
        layers = self.hello.model.layers
        assert layers and write_from - start >= 128 + 127 * (layers - 1), "a replay is long enough to be exact"
        s.ids = [self.content[s.pages[pos // PAGE_TOKENS]][pos % PAGE_TOKENS] for pos in range(start)]
        s.crc = crc_of(s.ids)
        s.exact_from = write_from

    def _feed(self, slot, s, ids, saves, write_from=0):
        """Commit ids; True if the length crossed a page boundary."""
        before, checked = len(s.ids), -1
        for i in ids:
            pos = len(s.ids)
            page = s.pages[pos // PAGE_TOKENS]
            if pos >= write_from:
                if page != checked:
                    users = sum(page in other.pages for other in self.slots.values())
                    assert page not in self.published and users == 1, "a published or shared page is not written"
                    checked = page
                if pos % PAGE_TOKENS == 0:
                    self.content[page] = {}
                self.content[page][pos % PAGE_TOKENS] = i
            assert self.content[page][pos % PAGE_TOKENS] == i, "a page of another sequence"
            s.ids.append(i)
            s.crc = mix(s.crc, i)
        for k, page in enumerate(s.pages[: -(-len(s.ids) // PAGE_TOKENS)]):
            part = s.ids[k * PAGE_TOKENS : (k + 1) * PAGE_TOKENS]
            held = self.content[page]
            assert [held.get(o) for o in (0, len(part) // 2, len(part) - 1)] == [
                part[0],
                part[len(part) // 2],
                part[-1],
            ]
        for pos, tail in saves.get(slot, ()):
            assert before < pos <= len(s.ids) and pos % PAGE_TOKENS == 0
            assert tail not in self.pub_tails and pos >= s.exact_from
            self.tails[tail] = (tuple(s.ids[:pos]), crc_of(s.ids[:pos]))
        return len(s.ids) // PAGE_TOKENS > before // PAGE_TOKENS


@dataclass
class Stream:
    """What a gateway has of one choice."""

    ids: list = field(default_factory=list)
    reason: FinishReason = FinishReason.NONE
    error: str = ""
    kills: int = 0
    cached: int = -1


@dataclass
class Journal:
    request_id: RequestId
    prompt: list
    params: SamplingParams
    seed: int
    n: int
    priority: int = 0
    attempt: int = 0
    streams: list = field(default_factory=list)
    rows: dict = field(default_factory=dict)  # (row, gen) -> choice
    closed: bool = False
    verdict: object = None
    grammar: object = None  # the source
    grammar_id: bytes = b""


def params(max_tokens=8, **kw):
    return SamplingParams(max_tokens=max_tokens, temperature=1.0, **kw)
