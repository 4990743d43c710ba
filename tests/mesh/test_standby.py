"""A warm scheduler: takes over the socket when the serving one is killed or leaves, and goes when it is told to."""

import signal
import time

import pytest

from meshkit.cli.preflight import free_port
from meshkit.testing import GatewayProbe, ServiceProcess, until
from scheduler_svc.__main__ import main


@pytest.fixture
def start(tmp_path):
    tmp_path.chmod(0o700)
    started, port = [], free_port("127.0.0.1")

    def one(name):
        args = ("--listen", f"unix:{tmp_path}/s.sock", "--standby", "--metrics-port", str(port))
        started.append(ServiceProcess("scheduler_svc", *args, log=tmp_path / name))
        return started[-1]

    yield one
    for process in started:
        process.__exit__()


async def logged(service, word):
    await until(lambda: word in service.log.read_text(), 30)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_the_standby_serves_when_the_first_one_ends(tmp_path, start, number):
    address = f"unix:{tmp_path}/s.sock"
    first = start("first")
    await first.ready(address, service="")
    second = start("second")
    await logged(second, "standing by")
    async with GatewayProbe(address) as gateway:
        first.process.send_signal(number)
        await until(lambda: gateway.closed is not None, 5)
    ended = time.monotonic()
    await second.ready(address, service="")
    assert time.monotonic() - ended < 2.0, "it was there already"  # some 50 ms on an idle machine
    assert first.process.wait(10) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
    async with GatewayProbe(address) as gateway:
        assert gateway.attach_id
    third = start("third")
    await logged(third, "standing by")
    assert third.end(signal.SIGINT) == 130
    assert second.end(signal.SIGTERM) == 0


def test_there_is_no_standby_without_a_lock(capsys):
    assert main(["--listen", "127.0.0.1:0", "--standby"]) == 3
    assert "standby = 'true'" in capsys.readouterr().err.replace("True", "'true'")
