"""Warm-up, compute thread and load progress, without a model."""

import logging
import sys
import threading
import time

import pytest

from meshkit.errors import ConfigError
from meshkit.types import PAGE_TOKENS
from worker_svc.compute import ComputeThread
from worker_svc.config import WorkerConfig
from worker_svc.core.work import RowOutcome, StepOutcome
from worker_svc.loading import LoadProgress
from worker_svc.warmup import warm_up


class SlowExecutor:
    """Takes `per_token` seconds for each id, by a clock that the test owns."""

    def __init__(self, per_token):
        self.per_token, self.now, self.works = per_token, 0.0, []

    def launch(self, work):
        self.works.append(work)
        self.now += self.per_token * sum(len(row.ids) for row in work.rows)
        return StepOutcome(rows=tuple(RowOutcome((1,)) for _ in work.rows))

    def collect(self, handle):
        return handle


@pytest.mark.parametrize("per_token, budget", [(0.001, 384), (0.0001, 2048), (0.1, 32), (0.0, 2048)])
def test_the_budget_is_what_fits_into_the_step(monkeypatch, per_token, budget):
    executor = SlowExecutor(per_token)
    monkeypatch.setattr(time, "perf_counter", lambda: executor.now + 1e-9 * len(executor.works))
    warm = warm_up(executor, pages=64, max_context=8192, vocab_size=100, step_s=0.5)
    assert warm.max_step_tokens == budget
    for work in executor.works:
        (row,) = work.rows
        assert len(row.pages) * PAGE_TOKENS >= row.start + len(row.ids)
        assert max(row.ids) < 100
    assert len(executor.works[-1].rows[0].ids) == 1, "decode is warmed up too"


def test_warm_up_stays_inside_a_small_pool():
    executor = SlowExecutor(0.0)
    warm_up(executor, pages=1, max_context=256, vocab_size=100)
    assert max(row.start + len(row.ids) for work in executor.works for row in work.rows) <= 256


async def test_jobs_run_in_order_on_one_thread_and_report_in_the_loop():
    compute, seen = ComputeThread(), []

    def job(number):
        seen.append((number, threading.current_thread().name))
        if number == 2:
            raise ValueError("two")
        return number

    compute.submit(lambda: job(0))
    assert await compute.call(lambda: job(7)) == 7
    with pytest.raises(ValueError, match="two"):
        await compute.call(lambda: job(2))
    assert seen == [(0, "compute"), (7, "compute"), (2, "compute")]
    assert compute.stop()


async def test_stop_does_not_wait_for_a_long_job():
    compute, gate = ComputeThread(), threading.Event()
    compute.submit(lambda: gate.wait() and None)
    assert not compute.stop(0.01)
    gate.set()


def test_progress_speaks_at_a_new_phase_every_5_s_and_at_the_end(caplog):
    caplog.set_level(logging.INFO)
    now = [0.0]
    progress = LoadProgress(lambda: now[0])
    for second in range(13):
        now[0] = float(second)
        progress("read", second * 10**9, 12 * 10**9)
    progress("build", 1, 5)
    progress("build", 2, 5)
    progress("build", 5, 5)
    progress.close()
    assert [record.getMessage() for record in caplog.records] == [
        "weights 0.00/12.00 GB",
        "weights 5.00/12.00 GB 1.0 GB/s eta 7 s",
        "weights 10.00/12.00 GB 1.0 GB/s eta 2 s",
        "weights 12.00/12.00 GB 1.0 GB/s eta 0 s",
        "layers 1/5",
        "layers 5/5",
    ]


def test_health_address_is_derived_from_the_scheduler():
    assert WorkerConfig(scheduler="unix:/run/x/s.sock", group="w3").health_address == "unix:/run/x/w3.sock"
    assert WorkerConfig(scheduler="scheduler:50051").health_address == "127.0.0.1:0"
    assert WorkerConfig(listen="127.0.0.1:9").health_address == "127.0.0.1:9"


def test_an_address_that_is_none_is_refused_before_anything_loads():
    with pytest.raises(ConfigError, match="no address: write unix:"):
        WorkerConfig(grammar="/run/grammar.sock")


def test_on_a_terminal_progress_is_a_bar(monkeypatch, capsys, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = LoadProgress()
    progress("read", 5, 10)
    progress("build", 1, 5)
    progress.close()
    assert caplog.records == []
    assert "read" in capsys.readouterr().err
