"""Random life of a small mesh: whatever happens, every pool adds up and clients get what an undisturbed run gives."""

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshkit.frames import Verdict
from meshkit.types import FinishReason
from scheduler_svc.core.events import Flush
from tests.unit.scheduler.fake import FakeWorker
from tests.unit.scheduler.mesh import Mesh

ENDS = ("deadline", "request_poisoned", "never_fits")


class Life:
    """Draws knobs and events from one seed; checks streams against the reference at the end."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.mesh = Mesh(
            seed,
            depth=rng.randint(1, 3),
            chunk_tokens=rng.choice([3, 40, 300, 2000]),
            bypass=rng.choice([0, 2, 32]),
            scan=rng.choice([1, 64]),
            poison_kills=rng.choice([2, 100]),
            lost_frame_ms=10**9,  # these workers idle while time passes
        )
        self.shape = {
            "slots": rng.randint(1, 5),
            "pages": rng.choice([3, 4, 5, 9, 16]),
            "tails": rng.randint(0, 5),
            "layers": rng.choice([0, 2, 3]),
            "ranks": rng.choice([1, 1, 2]),
            "step_tokens": rng.choice([2, 64, 4096]),
        }
        self.stems = [[rng.randrange(2, 50_000) for _ in range(1100)] for _ in range(2)]
        self.boots = 1
        self.journals = []
        self.groups = ["w0"] if rng.random() < 0.7 else ["w0", "w1"]
        self.park_rate = rng.choice([0, 0, 0.2])
        for group in self.groups:
            self.start_worker(group)
        self.gates = [self.mesh.gate(name=f"g{i}") for i in range(rng.randint(1, 2))]

    def start_worker(self, group):
        self.boots += 1
        old = self.mesh.workers.get(group)
        worker = FakeWorker(group=group, boot=self.boots, **self.shape)
        worker.park = lambda row: self.rng.random() < self.park_rate
        if old is not None and old.conn in self.mesh.conns and self.rng.random() < 0.5:
            self.mesh.lose(old)  # else the new stream opens before the old one's death is noticed
        self.mesh.worker(worker)

    # ---- events ----

    def submit(self):
        rng, m = self.rng, self.mesh
        n = rng.choice([1, 1, 1, 2, 3])
        j = m.journal(self.prompt(), n, priority=rng.randint(0, 1), max_tokens=rng.choice([1, 4, 30, 280, 280]),
                      ignore_eos=rng.random() < 0.5, top_logprobs=rng.choice([-1, -1, 0]))  # fmt: skip
        j.gate = rng.choice(self.gates)
        m.submit(j.gate, journal=j, remaining_ms=rng.choice([600_000, 600_000, 2_000]))
        if j.verdict.verdict is Verdict.ACCEPTED:
            self.journals.append(j)
        else:
            assert j.verdict.verdict in (Verdict.NEVER_FITS, Verdict.QUEUE_FULL), j.verdict

    def prompt(self):
        """Of its own, a stem, a stem that goes on differently, or the next turn of an earlier request."""
        rng = self.rng
        size = rng.choice([1, 2, 5, 100, 255, 256, 257, 512, 600])
        stem, kind = rng.choice(self.stems), rng.randrange(5)
        own = [rng.randrange(2, 50_000) for _ in range(rng.randint(1, 80))]
        if kind == 0:
            return stem[:size]
        if kind == 1:
            return stem[: 256 * rng.randint(1, 4)] + own
        if kind == 2 and self.journals:
            before = rng.choice(self.journals)
            return (before.prompt + before.streams[0].ids + own)[:1200]
        return size

    def flush(self):
        self.mesh.event(Flush())

    def open_journals(self):
        return [j for j in self.journals if not j.closed and not all(s.reason for s in j.streams)]

    def cancel(self):
        if self.open_journals():
            j = self.rng.choice(self.open_journals())
            self.mesh.close_choices(j.gate, j)

    def stop_choice(self):
        if self.open_journals():
            j = self.rng.choice(self.open_journals())
            c = self.rng.randrange(j.n)
            if not j.streams[c].reason:
                self.mesh.close_choices(j.gate, j, [c], stop=True)
                j.streams[c].reason = FinishReason.ABORT

    def steps(self):
        for _ in range(self.rng.randint(1, 30)):
            self.mesh.step(self.rng.choice(list(self.mesh.workers.values())))

    def repeat_submit(self):
        if self.open_journals():
            j = self.rng.choice(self.open_journals())
            if j.sub.attach_id == j.gate.attach_id:
                assert self.mesh.call(j.sub) == j.verdict

    def break_worker(self):
        w = self.rng.choice(list(self.mesh.workers.values()))
        self.mesh.redial(w, held=self.rng.random() < 0.7)

    def crash_worker(self):
        self.start_worker(self.rng.choice(self.groups))

    def away_and_back(self):
        w = self.rng.choice(list(self.mesh.workers.values()))
        if w.conn in self.mesh.conns:
            self.mesh.lose(w)
        self.steps()
        self.mesh.advance(self.rng.choice([100, 6_000]))
        self.mesh.redial(w)

    def gateway_redials(self):
        g = self.rng.choice(self.gates)
        if self.rng.random() < 0.5:
            self.mesh.lose(g)
            self.steps()
        self.mesh.gate(g)
        self.steps()
        self.mesh.resubmit(g, [j for j in self.journals if j.gate is g])

    def wait(self):
        self.mesh.advance(self.rng.choice([10, 300, 1500]))

    # ---- the whole ----

    def live(self, events):
        kinds = [self.submit] * 6 + [self.steps] * 14 + [self.cancel, self.stop_choice, self.wait, self.repeat_submit]
        kinds += [self.flush]
        kinds += [self.break_worker, self.crash_worker, self.away_and_back, self.gateway_redials]
        for _ in range(events):
            self.rng.choice(kinds)()
        self.rest()

    def rest(self):
        m = self.mesh
        for w in m.workers.values():
            w.park = lambda row: False
        for _ in range(30):
            m.run(20_000)
            m.advance(1000)
            if not self.open_journals() and not any(w.frames for w in m.workers.values()):
                break
        assert not self.open_journals(), "every request ends"
        m.advance(6000)
        for j in self.journals:
            for c, s in enumerate(j.streams):
                ids, reason = m.reference(j, c)
                assert s.ids == ids[: len(s.ids)], "what came is what an undisturbed run gives"
                assert s.error in ("", *ENDS)
                if not s.error and not j.closed and s.reason is not FinishReason.ABORT:
                    assert (s.ids, s.reason) == (ids, reason)
        m.idle()


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32), st.integers(5, 45))
def test_random_life(seed, events):
    Life(seed).live(events)
