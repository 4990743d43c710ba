"""The grammar service under simulation: compiles by their texts, an LRU of a few entries, and the faults of a service.

It dies and comes back as another process, sometimes under another revision; it is stopped and goes on; calls and
answers are lost, compiles are slow or break. What it says of a text is fixed: `bad` never compiles, `big` is too large,
all others do. Its mask engines and their sessions are the real ones, see `masks`.
"""

import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from scheduler_svc.core.events import Compile, CompileAnswer, Compiled, GrammarStarted, Outcome
from tests.sim.masks import DEAD_MS, Attachment, MaskStream

if TYPE_CHECKING:
    from tests.sim.world import World

REFUSED = {"bad": Outcome.INVALID, "big": Outcome.TOO_LARGE}
PLACE = "/properties/x"
STANDBY_MS = 2_000  # see world
_TROUBLE = (Outcome.BUSY, Outcome.BUSY, Outcome.TIMEOUT, Outcome.CRASHED)
MS = 1_000_000


class GrammarService:
    """One actor: the compiles are a model, the masks are not."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.rng = world.rng_grammar
        self.alive = False
        self.epoch = 0
        self.boot = 0
        self.revision = 1
        self.slow = 1.0
        self.compiled: OrderedDict[bytes, str] = OrderedDict()
        self.texts: dict[bytes, str] = {}
        self.lost: deque[str] = deque()  # faults of calls to come
        self.frozen = False
        self.inbox: deque[Callable[[], Any]] = deque()
        self.streams: list[MaskStream] = []  # of this process, dialled or attached
        self.attachments: dict[str, Attachment] = {}
        self.sources: dict[bytes, str] = {}  # what this process has compiled
        self.flights: set[bytes] = set()
        self.refused: set[str] = set()  # texts whose sessions were told that there is no grammar
        self.busy_when_attached = False  # the next mask streams find it busy
        self.busy_ns = 0  # until then half of its mask messages are late
        self.told: set[tuple[int, bytes]] = set()  # (epoch of the scheduler, id): what a scheduler may name

    def start(self) -> None:
        """A fresh process with nothing compiled; the scheduler's Watch finds it after a while."""
        self.epoch += 1
        self.alive = True
        self.boot = self.rng.getrandbits(63) + 1
        self.compiled.clear()
        self.sources.clear()
        self.flights.clear()
        self.watched()

    def watched(self) -> None:
        """The scheduler opens its Watch stream, after a pause."""
        scheduler, epoch, mine = self.world.scheduler, self.world.scheduler.epoch, self.epoch
        event = GrammarStarted(self.boot)

        def tell() -> None:
            if scheduler.epoch == epoch and self.epoch == mine and self.alive:
                scheduler.deliver(event)

        self.world.after(self.rng.choice((0.5, 5, 300, 1200)), tell)

    def crash(self, down_ms: float) -> None:
        """kill -9, and another process after `down_ms`."""
        world = self.world
        self.alive, self.epoch, self.frozen = False, self.epoch + 1, False
        self.inbox.clear()
        self.attachments.clear()
        streams, self.streams = self.streams, []
        for stream in streams:
            stream.ended[1] = True
            stream.cut((self.rng.uniform(0, 5), 0))
        if world.scenario.knobs.grammar_upgrades:
            self.revision += 1
        world.faults_open += 1

        def restart() -> None:
            world.faults_open -= 1
            self.start()

        world.after(down_ms, restart)

    def freeze(self, duration_ms: float) -> None:
        """SIGSTOP, SIGCONT: what arrives meanwhile is done in order afterwards. Silence ends its streams."""
        world, epoch = self.world, self.epoch
        self.frozen = True

        def silent() -> None:
            if self.frozen and self.epoch == epoch:
                for stream in self.streams:
                    stream.cut((0, 0))

        def thaw() -> None:
            world.faults_open -= 1
            if self.epoch != epoch:
                return
            self.frozen = False
            waiting, self.inbox = self.inbox, deque()
            for action in waiting:
                self.do(action)

        world.after(DEAD_MS, silent)
        if world.scenario.knobs.standby and duration_ms > STANDBY_MS:
            world.after(STANDBY_MS, lambda: self.epoch != epoch or self.crash(200))
        world.after(duration_ms, thaw)

    def do(self, action: Callable[[], Any]) -> None:
        """In this process, now or when it goes on."""
        if self.frozen:
            self.inbox.append(action)
        elif self.alive:
            action()

    # ---- what a scheduler sees --------------------------------------------------------------------------------------

    def call(self, effect: Compile) -> None:
        """A Compile call: it runs here once, or not at all, and ends for its caller exactly once."""
        world, scheduler, epoch = self.world, self.world.scheduler, self.world.scheduler.epoch
        done = [False]

        def end(answer: CompileAnswer | None) -> None:
            if not done[0] and scheduler.epoch == epoch:
                done[0] = True
                if answer is not None and answer.outcome is Outcome.OK:
                    self.told.add((epoch, answer.grammar_id))
                scheduler.deliver(Compiled(effect.ticket, answer))

        fault = self.lost.popleft() if self.lost else ""
        world.after(effect.timeout_ms, partial(end, None))
        if fault == "compile_lost":
            return
        delay = self.rng.expovariate(1 / world.scenario.knobs.delay_ms)
        reply_lost = fault == "compile_reply_lost"
        world.after(delay, lambda: self._run(effect, (lambda answer: None) if reply_lost else end))

    def _run(self, effect: Compile, end: Callable[[CompileAnswer | None], None]) -> None:
        world, knobs, epoch = self.world, self.world.scenario.knobs, self.epoch
        if not self.alive:
            world.after(0.2, partial(end, None))
            return
        cached = self._id(effect) in self.compiled
        took = 0.1 if cached else knobs.grammar_ms * self.slow * self.rng.uniform(0.5, 2)
        trouble = not cached and self.rng.random() < knobs.grammar_trouble

        def finish() -> None:
            if self.epoch != epoch:
                end(None)  # it died meanwhile
                return
            if self.frozen:
                self.inbox.append(finish)
                return
            if trouble:
                answer = CompileAnswer(self.rng.choice(_TROUBLE), retry_after_ms=200)
            else:
                answer = self._answer(effect)
            world.after(self.rng.expovariate(1 / knobs.delay_ms), partial(end, answer))

        world.after(took, finish)

    def _answer(self, effect: Compile) -> CompileAnswer:
        mine = f"rev{self.revision}"
        if effect.grammar_rev not in ("", mine):
            return CompileAnswer(Outcome.INVALID, message="another revision", place="grammar_rev")
        if effect.text in REFUSED:
            return CompileAnswer(REFUSED[effect.text], message="it cannot work", place=PLACE)
        grammar_id = self._id(effect)
        self.texts[grammar_id] = effect.text
        self._keep(grammar_id, effect.text)
        return CompileAnswer(Outcome.OK, grammar_id, mine)

    def _keep(self, grammar_id: bytes, text: str) -> None:
        """Compiled now, or there already; who waits for it goes on."""
        self.compiled[grammar_id] = self.sources[grammar_id] = text
        self.compiled.move_to_end(grammar_id)
        for attachment in self.attachments.values():
            attachment.engine.grammar_ready(grammar_id)
            attachment.flush()
        while len(self.compiled) > self.world.scenario.knobs.grammar_cache:
            self.compiled.popitem(last=False)

    def _id(self, effect: Compile) -> bytes:
        named = f"{int(effect.kind)} {effect.text} rev{self.revision}"
        return hashlib.blake2b(named.encode(), digest_size=16).digest()

    # ---- what a worker sees -----------------------------------------------------------------------------------------

    def attach(self, stream: MaskStream, group: str, slots: int) -> Attachment:
        """A newer stream of a group replaces the older, which ends at once."""
        if self.busy_when_attached:
            self.busy_when_attached = False
            self.busy_ns = self.world.now_ns + 6 * self.world.scenario.knobs.step_ms * MS
        if (old := self.attachments.get(group)) is not None:
            old.stream.close(1)
        attachment = self.attachments[group] = Attachment(self, stream, slots, self.rng.getrandbits(63) + 1)
        return attachment

    def detach(self, stream: MaskStream) -> None:
        stream.ended[1] = True
        self.streams = [other for other in self.streams if other is not stream]
        for group, attachment in list(self.attachments.items()):
            if attachment.stream is stream:
                del self.attachments[group]

    def get(self, grammar_id: bytes) -> str | None:
        if grammar_id not in self.compiled:
            return None
        self.compiled.move_to_end(grammar_id)
        return self.compiled[grammar_id]

    def want(self, grammar_id: bytes) -> None:
        """A slot waits for a grammar that is gone: compile it again, if this process knows its source."""
        text, epoch, knobs = self.sources.get(grammar_id), self.epoch, self.world.scenario.knobs
        if text is None or grammar_id in self.flights:
            return
        self.flights.add(grammar_id)
        trouble = self.rng.random() < knobs.grammar_trouble

        def finish() -> None:
            if self.epoch != epoch:
                return
            self.flights.discard(grammar_id)
            if not trouble:
                self._keep(grammar_id, text)
                return
            self.refused.add(text)
            for attachment in self.attachments.values():
                attachment.engine.grammar_refused(grammar_id, "simulated")
                attachment.flush()

        self.world.after(knobs.grammar_ms * self.slow * self.rng.uniform(0.5, 2), lambda: self.do(finish))
