"""Two schedulers, each with a worker that computes nothing, behind one gateway: prefixes, refusals, kills."""

import asyncio
import json
import random
import re
import signal

import aiohttp
import pytest

from meshkit.models import DEFAULT_MODEL
from meshkit.testing import ServiceProcess, until

MODEL = ("--model", str(DEFAULT_MODEL))


class Twins:
    """The processes; `url` is the gateway's."""

    def __init__(self, folder):
        folder.chmod(0o700)
        self.folder, self.stack = folder, []
        self.schedulers, self.workers = {}, {}
        for name in "ab":
            self.scheduler(name)
            self.worker(name)
        addresses = ",".join(self.address(name) for name in "ab")
        self.log = folder / "gateway.log"
        self.gateway = self.run("gateway", "--listen-http", "127.0.0.1:0", "--scheduler", addresses, *MODEL)

    def address(self, name):
        return f"unix:{self.folder}/{name}.sock"

    def run(self, module, *args, name=""):
        process = ServiceProcess(module, *args, log=self.folder / f"{name or module}.log")
        self.stack.append(process)
        return process

    def scheduler(self, name):
        self.schedulers[name] = self.run("scheduler_svc", "--listen", self.address(name), name=f"scheduler-{name}")

    def worker(self, name):
        listen = f"unix:{self.folder}/w{name}.sock"
        self.workers[name] = self.run(
            "worker_svc", "--listen", listen, "--scheduler", self.address(name), "--backend", "sim", "--sim-step-ms",
            "20", "--slots", "8", "--pages", "400", *MODEL, name=f"worker-{name}",
        )  # fmt: skip

    async def ready(self):
        await until(lambda: "tokenizer loaded" in self.log.read_text(), 60)
        self.url = re.search(r"http://127\.0\.0\.1:\d+", self.log.read_text())[0]
        await self.both_serve()

    async def both_serve(self):
        await self.when(lambda found: all(it["attached"] and it["scheduler"]["ready"] for it in found), 60)

    async def when(self, condition, seconds=30):
        """The instances as soon as this is true of them."""
        async with asyncio.timeout(seconds):
            while not condition(found := await self.instances()):  # noqa: ASYNC110 - asked over HTTP
                await asyncio.sleep(0.03)
        return found

    async def get(self, path):
        async with aiohttp.ClientSession() as session, session.get(self.url + path) as response:
            return await (response.json() if "json" in response.content_type else response.text())

    async def instances(self):
        return (await self.get("/server_info"))["instances"]

    async def ask(self, prompt, tokens=4, **fields):
        """Whole answer of a text completion: ids, cached tokens."""
        body = {"model": "v4-nano", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "seed": 5} | fields
        body |= {"return_token_ids": True}
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.url + "/v1/completions", json=body) as response,
        ):
            answer = await response.json()
            assert response.status == 200, answer
        return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    async def stream(self, prompt, tokens, seen, **fields):
        """A streamed text completion, ids as they come; returns the finish reason."""
        body = {"model": "v4-nano", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "seed": 5} | fields
        body |= {"stream": True, "return_token_ids": True}
        finish = None
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.url + "/v1/completions", json=body) as response,
        ):
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    for choice in event["choices"]:
                        seen += choice.get("token_ids") or ()
                        finish = choice["finish_reason"] or finish
        return finish


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    made = Twins(tmp_path_factory.mktemp("twins"))
    try:
        asyncio.run(made.ready())
        yield made
        assert made.gateway.end(signal.SIGTERM) == 0
        assert "Traceback" not in made.log.read_text()
    finally:
        for process in made.stack:
            process.__exit__()


def prompt_of(seed, pages=4):
    rng = random.Random(seed)
    return [rng.randrange(100, 2000) for _ in range(pages * 256 + 20)]


async def holder(twins):
    """Index of the one instance that has an open request."""
    found = await twins.when(lambda found: sum(it["open"] > 0 for it in found) == 1)
    return next(i for i, it in enumerate(found) if it["open"])


async def test_sessions_stay_where_their_pages_are(twins):
    sessions = {number: prompt_of(number) for number in range(8)}
    for turn in range(3):
        answers = await asyncio.gather(*(twins.ask(prompt) for prompt in sessions.values()))
        hits = sum(cached >= 4 * 256 for _, cached in answers)
        assert hits == 0 if turn == 0 else hits >= 6, "all full pages of the turn before, on a busy machine of most"
        for prompt, (ids, _) in zip(sessions.values(), answers, strict=True):
            prompt += [*ids, *prompt_of(len(prompt), 1)]
    text = await twins.get("/metrics")
    sent = dict(re.findall(r'v4mesh_instance_requests_total\{instance="(\d)",reason="load"\} (\d+)', text))
    assert {"0", "1"} == set(sent) and min(map(float, sent.values())) >= 2, "first turns are spread"
    by_prefix = re.findall(r'v4mesh_instance_requests_total\{instance="\d",reason="prefix"\} (\d+)', text)
    assert sum(map(float, by_prefix)) >= 12
    assert 'vllm:num_requests_running{engine="1",model_name="v4-nano"}' in text
    assert text.count("# HELP v4mesh_core_events_total") == 1


async def test_flush_and_explain_reach_both(twins):
    prompt = prompt_of("explained")
    await twins.ask(prompt)
    async with aiohttp.ClientSession() as session:
        text = " ".join(["word"] * 600)
        async with session.post(twins.url + "/explain", json={"prompt": text}) as response:
            assert sorted(rank["instance"] for rank in (await response.json())["ranks"]) == [0, 1]
        async with session.post(twins.url + "/flush_cache") as response:
            assert response.status == 200, await response.text()
    assert [it["known_pages"] for it in await twins.instances()] == [0, 0]
    assert (await twins.ask(prompt))[1] == 0


async def test_processes_of_a_port_know_where_the_others_sent_prompts(twins, monkeypatch):
    addresses = ",".join(twins.address(name) for name in "ab")
    args = ("--listen-http", "127.0.0.1:0", "--processes", "2", "--scheduler", addresses, *MODEL)
    parent = twins.run("gateway", *args, name="pair")
    log = twins.folder / "pair.log"
    await until(lambda: log.read_text().count("tokenizer loaded") == 2, 60)
    monkeypatch.setattr(twins, "url", re.search(r"http://127\.0\.0\.1:\d+(?= with)", log.read_text())[0])
    for _ in range(4):  # whichever process answers
        await twins.both_serve()
    prompt = prompt_of("wanders")
    for turn in range(8):  # each on a connection of its own
        ids, cached = await twins.ask(prompt)
        assert cached >= 4 * 256 or turn == 0
        prompt += [*ids, *prompt_of(f"turn{turn}", 1)]
        await asyncio.sleep(0.3)  # ten times a second they tell each other
    by_prefix = re.findall(
        r'instance_requests_total\{instance="\d",reason="prefix"\} (\d+)', await twins.get("/metrics")
    )
    assert sum(map(float, by_prefix)) == 7
    assert parent.end(signal.SIGTERM) == 0


async def test_a_running_request_goes_on_at_the_other_when_its_scheduler_is_killed(twins):
    """Its worker has no scheduler any more, so only the journal knows what the client has."""
    prompt, whole, seen = prompt_of("moved"), [], []
    assert await twins.stream(prompt, 150, whole) == "length" and len(whole) == 150
    running = asyncio.create_task(twins.stream(prompt, 150, seen))
    index = await holder(twins)
    await until(lambda: len(seen) > 5, 30)
    name = "ab"[index]
    twins.schedulers[name].process.kill()
    async with asyncio.timeout(30):
        assert await running == "length"
    assert seen == whole, "no id lost, doubled or drawn anew"
    assert f'v4mesh_instance_moves_total{{instance="{index}",reason="lost"}} 1.0' in await twins.get("/metrics")
    info = (await twins.instances())[index]
    assert info["attached"] is False and (await twins.get("/server_info"))["ready"] is True
    ids, _ = await twins.ask(prompt_of("alone"))
    assert len(ids) == 4, "new ones are served by the one that is left"
    twins.scheduler(name)
    await twins.both_serve()


async def test_before_a_token_a_kill_costs_a_moment(twins):
    """All slots are taken, so it waits in the queue of one scheduler when that one is killed."""
    seen = [[] for _ in range(16)]
    fillers = [asyncio.create_task(twins.stream(prompt_of(f"f{i}", 1), 3000, ids)) for i, ids in enumerate(seen)]
    await until(lambda: all(seen), 30)
    waiting = asyncio.create_task(twins.ask(prompt_of("queued", 2), tokens=3))
    found = await twins.when(lambda found: sorted(it["open"] for it in found) == [8, 9])
    index = next(i for i, it in enumerate(found) if it["open"] == 9)
    twins.schedulers["ab"[index]].process.kill()
    found = await twins.when(lambda found: not found[index]["attached"] and found[1 - index]["open"] > 8, 1.5)
    assert found[1 - index]["open"] == 9, "it queues at the other one; running ones are given time"
    for task in fillers:
        task.cancel()
    await asyncio.gather(*fillers, return_exceptions=True)
    async with asyncio.timeout(20):
        ids, _ = await waiting
    assert len(ids) == 3
    twins.scheduler("ab"[index])


async def test_one_that_drains_gets_nothing_new(twins):
    await twins.both_serve()
    seen = []
    running = asyncio.create_task(twins.stream(prompt_of("drained"), 100, seen))
    index = await holder(twins)
    await until(lambda: len(seen) > 3, 30)
    twins.schedulers["ab"[index]].process.send_signal(signal.SIGTERM)
    for number in range(6):
        ids, _ = await twins.ask(prompt_of(f"new{number}", 1))
        assert len(ids) == 4
    async with asyncio.timeout(20):
        assert await running == "length" and len(seen) == 100
    assert twins.schedulers["ab"[index]].process.wait(10) == 0
