"""`v4mesh restart`: a whole mesh is replaced under streams, without one noticing; and what it says when it cannot."""

import contextlib
import http.client
import json
import re
import socket
import tempfile
import threading
from pathlib import Path

import pytest

from meshkit.cli.main import main
from meshkit.cli.restart import in_turn
from meshkit.exit_codes import Exit
from tests.cli.test_up import Up, gone, url_of

pytestmark = pytest.mark.timeout(300)
BODY = {"model": "v4-nano", "prompt": "a fox", "max_tokens": 200, "ignore_eos": True, "seed": 1, "stream": True}


@pytest.fixture
def mesh(tmp_path: Path):
    tmp_path.chmod(0o700)
    quick = ("--backend", "sim", "--grammar", "off", "--standby", "--gateway-processes", "2")
    up = Up("up", "--port", "0", "--run-dir", str(tmp_path), "--deterministic", *quick)
    try:
        up.wait_for(r"^ready in ")
        yield up, tmp_path
    finally:
        up.close()


class Client(threading.Thread):
    """Streams one answer after the other, some on the connection of the one before, until told to stop."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.address = url.removeprefix("http://")
        self.answers: list[list[int]] = []
        self.trouble: list[str] = []
        self.stopping = False
        self.start()

    def run(self) -> None:
        while not self.stopping and not self.trouble:
            with contextlib.closing(http.client.HTTPConnection(self.address, timeout=60)) as connection:
                for _ in range(2):
                    connection.request("POST", "/v1/completions", json.dumps(BODY | {"return_token_ids": True}))
                    reply = connection.getresponse()
                    raw = reply.read().decode()
                    if reply.status != 200 or '"error"' in raw or not raw.endswith("data: [DONE]\n\n"):
                        self.trouble.append(f"{reply.status} {raw[-300:]}")
                        return
                    events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
                    ids = [it for event in events for choice in event["choices"] for it in choice["token_ids"] or []]
                    self.answers.append(ids)
                    if reply.getheader("Connection") == "close":
                        break


def test_every_process_is_replaced_and_no_client_notices(mesh: tuple[Up, Path], capfd: pytest.CaptureFixture[str]):
    up, folder = mesh
    before = {name: process.pid for name, process in up.services().items()}
    clients = [Client(url_of(up)) for _ in range(4)]
    up.until(lambda: all(client.answers for client in clients))
    assert main(["restart", "--run-dir", str(folder)]) == 0
    said = capfd.readouterr().err
    restarted = re.findall(r"^(\S+) +restarted in", said, re.MULTILINE)
    assert restarted == ["scheduler-standby", "scheduler", "worker", "gateway"]
    seen = len(clients[0].answers)
    up.until(lambda: len(clients[0].answers) >= seen + 2)
    for client in clients:
        client.stopping = True
    for client in clients:
        client.join()
    assert [client.trouble for client in clients] == [[]] * 4
    answers = [answer for client in clients for answer in client.answers]
    assert len(answers[0]) == 200 and all(answer == answers[0] for answer in answers)
    after = up.services()
    assert set(after) == set(before) and all(after[name].pid != pid for name, pid in before.items())
    assert up.output.count("left after") == 4 and "killed" not in up.output and "restarting in" not in up.output
    second = Up("up", "--port", "0", "--run-dir", str(folder), "--backend", "sim", "--grammar", "off")
    assert second.process.wait(30) == Exit.CONFIG and "another mesh runs in" in second.output
    second.close()
    up.process.terminate()
    assert up.process.wait(20) == 0
    assert gone(list(after.values())) and not (folder / "up.sock").exists()


def test_what_it_cannot_do_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert main(["restart", "--run-dir", str(tmp_path)]) == Exit.PEER
    assert "v4mesh up" in capsys.readouterr().err
    assert main(["restart", "--drain-timeout", "-1"]) == Exit.USAGE
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with contextlib.ExitStack() as held:
        for name in ("v4mesh-a", "v4mesh-b", "v4mesh-dead"):
            (tmp_path / name).mkdir()
            sock = held.enter_context(socket.socket(socket.AF_UNIX))
            sock.bind(str(tmp_path / name / "up.sock"))
            if name != "v4mesh-dead":
                sock.listen()
        assert main(["restart"]) == Exit.USAGE
        said = capsys.readouterr().err
        assert "v4mesh-a" in said and "v4mesh-b" in said and "v4mesh-dead" not in said and "--run-dir" in said


def test_a_standby_goes_first_and_gateways_last():
    names = ["scheduler", "scheduler-standby", "grammar", "grammar-standby", "worker", "gateway"]
    turns = ["scheduler-standby", "scheduler", "grammar-standby", "grammar", "worker", "gateway"]
    assert in_turn(names) == turns
    assert in_turn(["gateway", "scheduler", "worker"]) == ["scheduler", "worker", "gateway"]
