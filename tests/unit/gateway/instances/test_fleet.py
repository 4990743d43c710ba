"""Several scripted schedulers behind one mesh: refusals and losses send a request elsewhere, once and with its ids."""

from dataclasses import replace
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest

from gateway.errors import ApiError
from gateway.instances.fleet import Fleet
from gateway.journal.entry import new_entry, resumed
from gateway.journal.events import Emit, Ended, Refused, Start
from gateway.siblings.hub import Hub
from gateway.siblings.member import Member
from meshkit.frames import SchedulerStatus, Verdict
from meshkit.obs import Metrics
from meshkit.testing import until
from meshkit.types import FinishReason, GrammarKind, GrammarSource, ModelInfo, RequestId, SamplingParams

MODEL = ModelInfo(name="m", revision="r", vocab_size=100, max_context=64, eos_ids=(1,), kv_layout_id="k")
STATUS = SchedulerStatus(ready=True, model=MODEL, slots_total=16, slots_free=16, pages_total=100, pages_free=90)
RID = RequestId(b"r" * 16)


class Client:
    """Stands for a MeshClient: does what the test says."""

    def __init__(self, status=STATUS):
        self.status, self.attached = status, True
        self.on_lost = lambda: None
        self.open = {}
        self.gone, self.aborted, self.stops = [], [], []
        self.refusal = None
        self.pages, self.busy = 5, 0

    def start(self, start, sink):
        if self.refusal is not None:
            sink(Refused(start.request_id, *self.refusal))
        else:
            self.open[start.request_id] = (start, sink, new_entry(start, 100, 0))

    def say(self, ids, cached=0, choice=0):
        for start, sink, entry in self.open.values():
            entry.choices[choice].ids.extend(ids)
            sink(Emit(start.request_id, choice, len(entry.choices[choice].ids) - len(ids), ids, (), cached))

    def end(self, choice=0):
        for start, sink, entry in list(self.open.values()):
            entry.choices[choice].open = False
            sink(Ended(start.request_id, choice, FinishReason.STOP))

    def take_back(self, request_id):
        found = self.open.pop(request_id, None)
        return None if found is None else resumed(found[2], 0)

    def accepted(self, request_id):
        return request_id in self.open

    def client_gone(self, request_id):
        self.gone.append(request_id)
        self.open.pop(request_id, None)

    def abort(self, request_id):
        self.aborted.append(request_id)

    def stop_choice(self, request_id, choice, keep):
        self.stops.append((choice, keep))

    async def flush_cache(self):
        return self.pages, self.busy

    async def explain(self, page_keys, tokens):
        return [{"why": "hit"}]


@pytest.fixture
def rig():
    return Rig()


class Rig:
    def __init__(self, count=3):
        self.clients = [Client() for _ in range(count)]
        self.metrics = Metrics()
        self.fleet = Fleet([f"unix:/{i}" for i in range(count)], self.clients, Random(3), self.metrics)
        self.answers = []

    def start(self, n=1, **fields):
        request = Start(
            request_id=RID, prompt=np.arange(600, dtype=np.int32), page_keys=(b"a" * 16, b"b" * 16),
            params=SamplingParams(max_tokens=20), seed=1, n=n, tenant="", priority=0, deadline_ms=9_000, **fields,
        )  # fmt: skip
        self.fleet.start(request, self.answers.append)

    def holders(self):
        return [i for i, client in enumerate(self.clients) if RID in client.open]

    def counted(self, name, **labels):
        lines = [line for line in self.metrics.render().decode().splitlines() if line.startswith(name + "{")]
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(it in line for it in wanted))


async def test_a_request_runs_at_one_place_and_is_forgotten_at_its_end(rig):
    rig.start(n=2)
    (at,) = rig.holders()
    rig.clients[at].say((4, 5), cached=256)
    rig.clients[at].end(0)
    assert rig.fleet.instances[at].open == 1 and rig.fleet.accepted(RID)
    rig.clients[at].end(1)
    assert [type(answer) for answer in rig.answers] == [Emit, Ended, Ended]
    assert [it.open for it in rig.fleet.instances] == [0, 0, 0] and rig.fleet.instances[at].known_pages == 2
    rig.fleet.client_gone(RID)
    assert not rig.clients[at].gone, "nothing was open"


async def test_stop_abort_and_leave_reach_the_right_one(rig):
    rig.start(n=2)
    (at,) = rig.holders()
    rig.fleet.stop_choice(RID, 0, 3)
    rig.fleet.abort(RID)
    assert (rig.clients[at].stops, rig.clients[at].aborted) == ([(0, 3)], [RID])
    assert rig.fleet.instances[at].open == 1
    rig.fleet.client_gone(RID)
    assert rig.clients[at].gone == [RID] and rig.fleet.instances[at].open == 0


@pytest.mark.parametrize("verdict", [Verdict.QUEUE_FULL, Verdict.NO_WORKER, Verdict.DRAINING])
async def test_who_is_refused_for_now_is_tried_elsewhere(rig, verdict):
    rig.clients[0].refusal = rig.clients[1].refusal = (verdict, "not now", 700)
    rig.start()
    assert rig.holders() == [2] and not rig.answers
    assert rig.counted("v4mesh_instance_moves_total", reason="refused") == len(rig.fleet._routes[RID].tried)
    rig.clients[2].end()
    assert [type(answer) for answer in rig.answers] == [Ended]


async def test_the_client_hears_of_one_refusal_the_most_hopeful(rig):
    for client, wait in zip(rig.clients, (900, 300, 600), strict=True):
        client.refusal = (Verdict.QUEUE_FULL, "full", wait)
    rig.start()
    assert rig.answers == [Refused(RID, Verdict.QUEUE_FULL, "full", 300)]
    assert [it.open for it in rig.fleet.instances] == [0, 0, 0]
    rig.answers.clear()
    rig.start()
    assert len(rig.answers) == 1, "all have just refused: one is asked, not three"
    assert rig.counted("v4mesh_instance_requests_total") == 4


async def test_what_can_never_work_is_not_tried_again(rig):
    for client in rig.clients:
        client.refusal = (Verdict.INVALID, "no", 0)
    rig.start()
    assert len(rig.answers) == 1 and rig.counted("v4mesh_instance_requests_total") == 1


async def test_a_request_that_is_too_large_goes_where_there_is_more_room(rig):
    rig.clients[2].status = replace(STATUS, pages_total=500, running=16)
    for client in rig.clients[:2]:
        client.refusal = (Verdict.NEVER_FITS, "too large", 0)
    rig.start()
    assert rig.holders() == [2] and not rig.answers
    assert rig.counted("v4mesh_instance_requests_total") == 2, "the other small one is not asked"


async def test_without_a_token_a_lost_scheduler_is_left_at_once(rig):
    rig.start()
    (at,) = rig.holders()
    rig.clients[at].attached = False
    rig.fleet._leave(at)
    (now,) = rig.holders()
    assert now != at
    rig.clients[now].say((7,))
    rig.clients[now].end()
    assert [type(answer) for answer in rig.answers] == [Emit, Ended]
    assert rig.counted("v4mesh_instance_moves_total", reason="lost", instance=at) == 1


async def test_with_tokens_it_is_given_time_and_they_are_taken_along(rig):
    source = GrammarSource(kind=GrammarKind.REGEX, text="a+")
    rig.start(n=2, grammar=source)
    (at,) = rig.holders()
    rig.clients[at].say((4, 5))
    rig.clients[at].end(1)
    entry = rig.clients[at].open[RID][2]
    entry.attempt, entry.kills, entry.grammar_rev = 2, 1, "v7"
    rig.clients[at].attached = False
    rig.fleet._leave(at)
    assert rig.holders() == [at]
    rig.fleet._down_ns[at] -= 10**10
    rig.fleet._leave(at)
    (now,) = rig.holders()
    assert now != at
    start, _, again = rig.clients[now].open[RID]
    assert (start.emitted, start.attempts, start.kills) == (((4, 5), None), 2, 1)
    assert start.grammar == replace(source, grammar_rev="v7") == again.grammar and start.deadline_ms == 9_000
    assert [choice.open for choice in again.choices] == [True, False] and not again.untouched
    rig.clients[now].say((6,))
    rig.clients[now].end(0)
    assert rig.answers[-2].base == 2 and not rig.fleet._routes


async def test_one_that_comes_back_keeps_its_requests(rig):
    rig.start()
    (at,) = rig.holders()
    rig.clients[at].say((4,))
    rig.clients[at].attached = False
    rig.fleet._leave(at)
    rig.clients[at].attached = True
    rig.fleet._leave(at)
    assert rig.fleet._down_ns[at] == 0 and rig.holders() == [at]


async def test_there_may_be_nowhere_to_go(rig):
    rig.start()
    (at,) = rig.holders()
    for client in rig.clients:
        client.attached = False
    rig.fleet._leave(at)
    assert rig.holders() == [at] and not rig.answers


async def test_one_status_for_all(rig):
    small = replace(STATUS, model=replace(MODEL, max_context=32), running=3, slots_total=4)
    rig.clients[1].status = small
    status = rig.fleet.status
    assert (status.running, status.slots_total, status.pages_total, status.model.max_context) == (3, 36, 300, 32)
    assert rig.fleet.status is status and status.ready
    rig.clients[0].status = replace(STATUS, draining=True, ready=False)
    assert rig.fleet.status.model == status.model and not rig.fleet.status.draining
    for client in rig.clients:
        client.attached = False
    assert rig.fleet.status.ready is False and rig.fleet.status.slots_total == 0
    for client in rig.clients:
        client.status = None
    assert rig.fleet.status is None


async def test_another_model_gets_no_requests(rig, caplog):
    for client in rig.clients[1:]:
        client.status = replace(STATUS, model=replace(MODEL, revision="other"))
    for _ in range(4):
        rig.start()
        assert rig.holders() == [0]
        rig.fleet.client_gone(RID)
    assert caplog.text.count("another model") == 2


async def test_flush_and_explain_ask_all_that_are_there(rig):
    rig.start()
    (at,) = rig.holders()
    rig.clients[at].say((4,))
    rig.clients[at].end()
    gone = (at + 1) % 3
    rig.clients[gone].attached = False
    assert await rig.fleet.flush_cache() == (10, 0)
    assert rig.fleet.instances[at].known_pages == 0
    explained = await rig.fleet.explain((), 5)
    assert [it["instance"] for it in explained] == [i for i in range(3) if i != gone]
    for client in rig.clients:
        client.attached = False
    with pytest.raises(ApiError, match="no scheduler"):
        await rig.fleet.flush_cache()


async def test_gateways_of_one_port_tell_each_other_where_prompts_went(tmp_path):
    rigs = [Rig(), Rig()]
    hub = Hub(2)
    await hub.start(tmp_path / "hub.sock")
    members = [await Member.join(SimpleNamespace(mesh=rig.fleet), str(tmp_path / "hub.sock")) for rig in rigs]
    try:
        rigs[0].start()
        (at,) = rigs[0].holders()
        await until(lambda: rigs[1].fleet.instances[at].known_pages == 2, 5)
        rigs[1].start()
        assert rigs[1].holders() == [at] and rigs[1].counted("v4mesh_instance_requests_total", reason="prefix") == 1
    finally:
        for member in members:
            await member.stop()
        await hub.stop()
