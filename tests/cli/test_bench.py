"""`v4mesh bench` against a scripted server: what it sends, what it counts, when it fails."""

import asyncio
import json
import time
from pathlib import Path

import pytest

from meshkit.cli.http_client import Endpoint
from meshkit.cli.load import LoadPlan, make_bodies, percentile, run_load
from meshkit.cli.main import main
from meshkit.exit_codes import Exit
from tests.cli.conftest import Script


def plan(**changes: object) -> LoadPlan:
    values = {
        "model": "fake",
        "num_prompts": 6,
        "concurrency": 2,
        "request_rate": 0.0,
        "input_len": 10,
        "output_len": 3,
        "warmup": 1,
        "seed": 3,
        "timeout_s": 10.0,
    }
    return LoadPlan(**(values | changes))  # type: ignore[arg-type]


def test_a_closed_loop_is_measured_without_its_warm_up(
    server: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "run.json"
    args = ["--num-prompts", "5", "--concurrency", "2", "--warmup", "3", "--output-len", "2", "--output", str(out)]
    assert main(["bench", "--url", server.url, *args]) == 0
    assert len(server.bodies) == 8
    assert all(b["ignore_eos"] and b["max_tokens"] == 2 for b in server.bodies)
    report = json.loads(out.read_text())
    assert (report["requests"], report["completed"], report["errors"]) == (5, 5, {})
    assert report["config"]["seed"] == 0
    assert report["config"]["model"] == "fake"
    assert report["prompt_tokens_mean"] == 224
    assert report["ttft_ms"]["p50"] > 0
    table = capsys.readouterr().out
    assert "5 of 5 requests" in table
    assert all(row in table for row in ("TTFT", "ITL", "TPOT", "E2E"))


def test_no_more_than_the_concurrency_is_in_flight(server: Script):
    server.delay_s = 0.02
    began = time.perf_counter()
    result = asyncio.run(run_load(Endpoint.parse(server.url), plan(warmup=0)))
    per_request = 3 * 0.02
    assert time.perf_counter() - began >= 3 * per_request
    assert result.seconds < 6 * per_request + 0.5


def test_an_open_loop_keeps_its_rate_however_slow_the_answers(server: Script):
    server.delay_s = 0.15
    result = asyncio.run(run_load(Endpoint.parse(server.url), plan(request_rate=100.0, num_prompts=8, warmup=0)))
    assert all(not t.error for t in result.turns)
    assert result.seconds < 8 * 3 * 0.15 / 2


def test_rejects_count_as_errors_and_against_goodput(server: Script, capsys: pytest.CaptureFixture[str]):
    server.status = 429
    assert (
        main(["bench", "--url", server.url, "--num-prompts", "2", "--goodput", "ttft:2s", "--json"]) == Exit.THRESHOLD
    )
    report = json.loads(capsys.readouterr().out)
    assert report["errors"] == {"429 queue is full": 2}
    assert report["goodput_share"] == 0
    assert main(["bench", "--url", server.url, "--num-prompts", "2"]) == Exit.PEER


@pytest.mark.parametrize(("limits", "status"), [("ttft:10s,itl:1s,e2e:60s", 0), ("itl:1us", Exit.THRESHOLD)])
def test_goodput_decides_the_exit_code(server: Script, limits: str, status: int):
    server.delay_s = 0.002
    assert main(["bench", "--url", server.url, "--num-prompts", "2", "--goodput", limits]) == status


@pytest.mark.parametrize("limits", ["ttft", "ttft:soon", "speed:2s", "ttft:2s,"])
def test_a_limit_that_is_none_is_a_usage_error(limits: str, capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "--url", "http://127.0.0.1:9", "--goodput", limits]) == Exit.USAGE
    assert "--goodput" in capsys.readouterr().err


def test_the_same_seed_asks_the_same(server: Script):
    first, second, other = (make_bodies(plan(seed=seed), 2.0) for seed in (3, 3, 4))
    assert first == second
    assert first != other
    assert len({b["messages"][0]["content"] for b in first}) == len(first) == 7
    assert all(len(b["messages"][0]["content"].split()) == 5 for b in first)


def test_percentiles_are_nearest_rank():
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.9, 0.99, 1.0)] == [50, 90, 99, 100]
    assert percentile([7.0], 0.5) == 7
    assert percentile([], 0.5) == 0
