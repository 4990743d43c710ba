"""A stopped service is named with what to type, once; one that goes on or is replaced is no longer."""

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from meshkit.cli.stopped import Stopped


@pytest.fixture
def process() -> Iterator[psutil.Process]:
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as started:
        yield psutil.Process(started.pid)
        started.kill()


def test_a_stopped_service_is_named_once_and_once_more_when_it_goes_on(process: psutil.Process):
    watch, pids = Stopped(), {"worker": process.pid}
    assert watch.look(pids) == []
    process.suspend()
    while process.status() != psutil.STATUS_STOPPED:
        pass
    assert watch.look(pids) == []  # it may be for a moment
    ((name, text),) = watch.look(pids)
    assert name == "worker" and f"kill -CONT {process.pid}" in text and f"kill -9 {process.pid}" in text
    assert watch.look(pids) == []
    process.resume()
    while process.status() == psutil.STATUS_STOPPED:
        pass
    assert watch.look(pids) == [("worker", "goes on")]
    assert watch.look(pids) == []


def test_a_stopped_service_that_is_killed_is_the_supervisors_to_report(process: psutil.Process):
    watch = Stopped()
    process.suspend()
    while process.status() != psutil.STATUS_STOPPED:
        pass
    assert [len(watch.look({"worker": process.pid})) for _ in range(3)] == [0, 1, 0]
    assert watch.look({}) == []
    assert watch.look({"worker": 1}) == []
