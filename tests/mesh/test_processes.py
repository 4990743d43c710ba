"""Scheduler and worker as real processes with a real forward: start, kill -9, drain, refusals, what they map."""

import asyncio
import logging
import mmap
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from meshkit.models import DEFAULT_MODEL
from meshkit.testing import GatewayProbe, ServiceProcess, until
from meshkit.types import FinishReason
from scheduler_svc.__main__ import main as scheduler_main
from worker_svc.__main__ import main as worker_main
from worker_svc.checkpoint.census import preset
from worker_svc.checkpoint.generate import generate_checkpoint

RUST_MARKS = (b"/rustc/", b"rust_eh_personality")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    generate_checkpoint(preset("tiny"), folder, seed=3)
    return folder


class Mesh:
    def __init__(self, folder, model):
        self.folder, self.model = folder, model
        self.scheduler_address, self.worker_address = f"unix:{folder}/s.sock", f"unix:{folder}/w0.sock"

    def scheduler(self):
        return ServiceProcess("scheduler_svc", "--listen", self.scheduler_address, log=self.folder / "scheduler.log")

    def worker(self):
        args = ("--scheduler", self.scheduler_address, "--model", str(self.model), "--group", "w0", "--threads", "1")
        return ServiceProcess("worker_svc", *args, "--deterministic", "--slots", "4", log=self.folder / "worker.log")


@pytest.fixture
def mesh(tmp_path, model):
    return Mesh(tmp_path, model)


async def run_one(gateway, prompt, max_tokens):
    (row,) = await gateway.accepted(prompt, max_tokens=max_tokens, temperature=0.8, ignore_eos=True)
    await until(lambda: row in gateway.finished, 60)
    assert gateway.finished[row] is FinishReason.LENGTH
    return gateway.tokens[row]


async def test_kill_9_of_worker_and_of_scheduler(mesh):
    """One mesh, one request after the other: whole; worker killed under it; scheduler killed under it; drained."""
    prompt = [3 + at % 400 for at in range(300)]
    with mesh.scheduler() as scheduler, mesh.worker() as worker:
        await scheduler.ready(mesh.scheduler_address)
        await worker.ready(mesh.worker_address)
        async with GatewayProbe(mesh.scheduler_address) as gateway:
            whole = await run_one(gateway, prompt, 60)
            assert len(whole) == 60

            (row,) = await gateway.accepted(prompt, max_tokens=60, temperature=0.8, ignore_eos=True)
            await until(lambda: len(gateway.tokens.get(row, ())) > 10, 30)
            worker.process.kill()
            assert row not in gateway.finished
            with mesh.worker() as again:
                await until(lambda: row in gateway.finished, 60)
                assert gateway.tokens[row] == whole, "same seed, same ids: nothing lost, doubled or redrawn"

                start = time.monotonic()
                scheduler.process.kill()
                await until(lambda: gateway.closed is not None, 5)
                assert time.monotonic() - start < 2
                with mesh.scheduler() as fresh:
                    await fresh.ready(mesh.scheduler_address, 20)  # ready only once the worker has attached again
                    async with GatewayProbe(mesh.scheduler_address) as other:
                        assert await run_one(other, prompt, 60) == whole
                    assert again.end(signal.SIGTERM) == 0
                    assert fresh.end(signal.SIGTERM) == 0
    log = (mesh.folder / "worker.log").read_text()
    assert re.search(r"KV: \d+ pages x [\d.]+ MB \+ 4 slots x .* = [\d.]+ GB of [\d.]+ GB free", log)
    assert re.search(r"warm-up ok in [\d.]+ s: decode step [\d.]+ ms, chunks of \d+ tokens", log)
    assert "Traceback" not in log


async def test_drain_lets_a_running_request_finish(mesh):
    with mesh.scheduler() as scheduler, mesh.worker() as worker:
        await worker.ready(mesh.worker_address)
        await scheduler.ready(mesh.scheduler_address)
        async with GatewayProbe(mesh.scheduler_address) as gateway:
            (row,) = await gateway.accepted(range(3, 90), max_tokens=40, ignore_eos=True)
            scheduler.process.send_signal(signal.SIGTERM)
            await until(lambda: row in gateway.finished, 30)
            assert len(gateway.tokens[row]) == 40
            await until(lambda: gateway.closed is not None, 10)
        assert scheduler.process.wait(10) == 0
        assert worker.end(signal.SIGINT) == 130


async def test_worker_answers_health_before_it_is_ready(mesh):
    with mesh.worker() as worker:  # no scheduler: it loads all the same and keeps dialling
        await worker.ready(mesh.worker_address, service="")
        assert "READY" not in worker.log.read_text()
        assert worker.end(signal.SIGTERM) == 0, "leaving does not wait for the load"


@pytest.fixture
def refused(capsys):
    """Run a service's main in this process; it must end with this status and text."""
    root = logging.getLogger()
    before = root.handlers[:], root.level

    def run(main, args, status, text):
        assert main([str(arg) for arg in args]) == status
        said = capsys.readouterr().err
        assert re.search(text, said), said
        assert "Traceback" not in said

    yield run
    root.handlers[:], root.level = before


def test_refusals_of_options_and_addresses(tmp_path, refused):
    config = tmp_path / "v4mesh.toml"
    config.write_text("[scheduler]\n\n[worker]\nkv_cache_dtyp = 'fp8'\n")
    taken = tmp_path / "taken.sock"
    refused(worker_main, ["--config", config], 3, r"KEY  unknown option kv_cache_dtyp .*v4mesh.toml:4\)")
    refused(scheduler_main, ["--depth", 4], 3, r"KEY  \[scheduler\] depth = 4 \(flag --depth\): must be 1, 2 or 3")
    refused(scheduler_main, ["--listen", "0.0.0.0:0"], 3, "KEY  .*insecure = true")
    refused(scheduler_main, ["--dept", 1], 2, "No such option.*--depth")
    refused(worker_main, ["--device", "cuda"], 4, "GPU_NONE  --device cuda: torch sees no GPU")
    with socket.socket(socket.AF_UNIX) as holder:
        holder.bind(str(taken))
        holder.listen()
        refused(scheduler_main, ["--listen", f"unix:{taken}"], 5, "PORT  unix:.*taken.sock is in use by pid")


@pytest.mark.parametrize(
    "args, status, text",
    [
        (("--model", "/nowhere/none"), 6, "MODEL_DIR  there is no folder"),
        (("--quantization", "fp7"), 3, "fp7.*There is: .*fp4"),
        (("--kv-memory", "1k"), 7, "MEMORY  the KV pools do not fit\n.*pages x .*\n.*budget"),
    ],
)
def test_refusals_of_models_and_sizes(tmp_path, refused, args, status, text):
    options = ["--scheduler", f"unix:{tmp_path}/s.sock", "--threads", 1, *args]
    refused(worker_main, options, status, text)


@pytest.mark.parametrize("module", ["scheduler_svc", "gateway"])
async def test_control_plane_maps_no_rust(tmp_path, module):
    """What a fresh process maps while it serves, file by file."""
    if module == "gateway":
        args = (
            "--listen-http",
            "127.0.0.1:0",
            "--scheduler",
            f"unix:{tmp_path}/none.sock",
            "--model",
            str(DEFAULT_MODEL),
        )
    else:
        args = ("--listen", f"unix:{tmp_path}/s.sock")
    with ServiceProcess(module, *args, log=tmp_path / "log") as service:
        end = time.monotonic() + 20
        while "listening on" not in service.log.read_text():
            assert service.process.poll() is None and time.monotonic() < end, service.log.read_text()
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        files = [Path(name) for name in service.mapped_files() if Path(name).is_file()]
    assert any("grpc" in str(file) for file in files)
    assert not [str(file) for file in files if "torch" in str(file)]
    assert [str(file) for file in files if holds_rust(file)] == []


def holds_rust(file):
    with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return any(content.find(mark) >= 0 for mark in RUST_MARKS)


def test_the_rust_check_can_fail():
    tokenizers = pytest.importorskip("tokenizers")
    assert any(holds_rust(file) for file in Path(tokenizers.__file__).parent.glob("*.so"))


async def test_worker_gives_up_on_a_scheduler_only_where_told_so(mesh):
    args = ("--scheduler", f"unix:{mesh.folder}/none.sock", "--model", str(mesh.model), "--threads", "1")
    with ServiceProcess("worker_svc", *args, "--scheduler-wait-s", "1", log=mesh.folder / "worker.log") as worker:
        assert await asyncio.to_thread(worker.process.wait, 60) == 8
        assert re.search(
            r"PEER  scheduler at unix:.*none.sock: there is no such socket.*of 1 s", worker.log.read_text()
        )
