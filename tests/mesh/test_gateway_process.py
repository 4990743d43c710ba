"""The gateway as a process: answers before there is a mesh, refuses with reasons, leaves on a signal."""

import asyncio
import json
import signal
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from gateway.__main__ import main
from meshkit.models import DEFAULT_MODEL
from meshkit.testing import ServiceProcess, until


def ask(url: str) -> tuple[int, dict, dict]:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return answer.status, json.load(answer), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error), dict(error.headers)


async def at_socket(path: str, route: str) -> bytes:
    """The raw answer of a server on a unix socket."""
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(f"GET {route} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    return answer


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def test_answers_without_a_mesh_and_drains(tmp_path):
    port, log = free_port(), tmp_path / "gateway.log"
    args = (
        "--listen-http",
        f"127.0.0.1:{port}",
        "--scheduler",
        f"unix:{tmp_path}/s.sock",
        "--model",
        str(DEFAULT_MODEL),
        "--listen-admin",
        f"unix:{tmp_path}/admin.sock",
    )
    with ServiceProcess("gateway", *args, log=log) as process:
        await until(lambda: "listening" in log.read_text(), 20)
        assert b"sglang:http_requests_total" in await at_socket(f"{tmp_path}/admin.sock", "/metrics")
        status, body, _ = await asyncio.to_thread(ask, f"http://127.0.0.1:{port}/health")
        assert (status, body) == (200, {"status": "ok"})
        await until(lambda: "tokenizer loaded" in log.read_text(), 20)
        status, body, headers = await asyncio.to_thread(ask, f"http://127.0.0.1:{port}/ready")
        assert status == 503 and "scheduler" in body["error"]["message"] and headers["Retry-After"]
        assert process.end(signal.SIGTERM) == 0


def refused(capfd, *args: str) -> tuple[int, str]:
    status = main(args)
    return status, capfd.readouterr().err


def test_a_port_in_use_names_who_holds_it(capfd):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        status, text = refused(capfd, "--listen-http", address, "--model", str(DEFAULT_MODEL))
    assert status == 5 and text.startswith(f"PORT  {address} is in use by pid ") and "--port 0" in text


@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        (["--model", "/nowhere/model"], 6, "/nowhere/model"),
        (["--model", str(DEFAULT_MODEL), "--max-choices", "0"], 3, "max_choices"),
        (["--model", str(DEFAULT_MODEL), "--api-key-file", "/nowhere/keys"], 3, "api-key-file"),
        (["--model", str(DEFAULT_MODEL), "--listen-http", "0.0.0.0:0"], 3, "insecure"),
        (["--model", str(DEFAULT_MODEL), "--listen-admin", "0.0.0.0:0"], 3, "insecure"),
        (["--model", str(DEFAULT_MODEL), "--listen-admin", "nonsense"], 3, "no address"),
        (["--model", str(DEFAULT_MODEL), "--listen-admin", "127.0.0.1:0", "--processes", "2"], 3, "listen_admin"),
        ([], 3, "model is required"),
        (["--no-such-flag"], 2, "no-such-flag"),
    ],
)
def test_refusals_say_what_to_do(capfd, args, status, words):
    found, text = refused(capfd, *args, *([] if "--listen-http" in args else ["--listen-http", "127.0.0.1:0"]))
    assert found == status and words in text and "Traceback" not in text


def test_a_bad_key_file_names_the_line(capfd, tmp_path: Path):
    keys = tmp_path / "keys"
    keys.write_text("good-enough-key\nshort\n")
    args = ["--model", str(DEFAULT_MODEL), "--listen-http", "127.0.0.1:0", "--api-key-file", str(keys)]
    status, text = refused(capfd, *args)
    assert status == 3 and f"{keys}:2" in text


def test_a_broken_tokenizer_ends_the_process_with_its_reason(capfd, tmp_path: Path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes((DEFAULT_MODEL / "config.json").read_bytes())
    (folder / "tokenizer.json").write_text("{")
    status, text = refused(capfd, "--model", str(folder), "--listen-http", "127.0.0.1:0")
    assert status == 6 and "tokenizer.json" in text
