"""docker-compose.yml, read by the real Compose binary and run as local processes: the same commands and health checks.

Not covered: what only an engine does (images, users, capabilities, networks, tmpfs).
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshkit.cli.preflight import free_port
from meshkit.models import DEFAULT_MODEL

ROOT = Path(__file__).parents[2]
COMPOSE = Path(sys.executable).parent / "docker-compose"
START_LIMIT_S = 100.0  # a busy machine; `python -m benchmarks startup` holds the promise


def compose(*args: str, **variables: str) -> str:
    done = subprocess.run(
        [COMPOSE, "-f", ROOT / "docker-compose.yml", *args],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return json.loads(compose("--profile", "cpu", "config", "--format", "json"))


def test_compose_accepts_the_file_and_every_profile():
    assert set(compose("config", "--services").split()) == {"scheduler", "scheduler-standby", "gateway"}
    every = {"scheduler", "scheduler-standby", "gateway", "worker-cpu", "grammar", "grammar-standby"}
    assert set(compose("--profile", "cpu", "config", "--services").split()) == every


def test_the_obs_profile_watches_without_opening_anything():
    """Boards and stores on loopback alone; the services keep their lack of a network and send spans over a socket."""
    endpoint = "unix:///run/v4mesh/otel.sock"
    text = compose(
        "--profile", "cpu", "--profile", "obs", "config", "--format", "json",
        OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, V4MESH_PUBLIC_METRICS="true",
    )  # fmt: skip
    services = json.loads(text)["services"]
    watchers = {"otel-collector", "jaeger", "prometheus", "grafana"}
    assert watchers <= set(services)
    assert all(port["host_ip"] == "127.0.0.1" for name in watchers for port in services[name].get("ports", ()))
    for name in set(services) - watchers:
        assert services[name]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"] == endpoint, name
    assert services["scheduler"]["network_mode"] == "none"
    assert services["gateway"]["environment"]["V4MESH_GATEWAY_PUBLIC_METRICS"] == "true"
    mounted = [it["source"] for name in watchers for it in services[name].get("volumes", ()) if it["type"] == "bind"]
    assert mounted and all(Path(source).exists() for source in mounted)
    collector = (ROOT / "deploy/obs/collector.yaml").read_text()
    assert "endpoint: /run/v4mesh/otel.sock" in collector and "transport: unix" in collector
    assert "gateway:8000" in (ROOT / "deploy/obs/prometheus.yml").read_text()


def test_nothing_is_published_beyond_loopback_unless_asked(config: dict[str, Any]):
    (port,) = config["services"]["gateway"]["ports"]
    assert (port["host_ip"], port["published"], port["target"]) == ("127.0.0.1", "8000", 8000)
    assert not config["services"]["scheduler"].get("ports")
    asked = json.loads(compose("config", "--format", "json", V4MESH_BIND="0.0.0.0", V4MESH_PORT="9000"))
    (port,) = asked["services"]["gateway"]["ports"]
    assert (port["host_ip"], port["published"]) == ("0.0.0.0", "9000")


def test_services_run_with_the_least_they_need(config: dict[str, Any]):
    for service in config["services"].values():
        assert service["user"] == "10001:10001"
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["restart"] == "on-failure:5"
    assert "mode=0700" in config["volumes"]["run"]["driver_opts"]["o"]


def test_the_gateway_does_not_wait_for_weights(config: dict[str, Any]):
    assert set(config["services"]["gateway"]["depends_on"]) == {"scheduler"}
    for service in config["services"].values():
        assert service["healthcheck"]["start_period"] == "40m0s"


def test_scheduler_worker_and_both_grammar_services_name_one_socket(config: dict[str, Any]):
    commands = {name: service["command"] for name, service in config["services"].items()}
    (socket,) = {flag[flag.index("--grammar") + 1] for name, flag in commands.items() if "--grammar" in flag}
    assert {name for name, flag in commands.items() if "--grammar" in flag} == {
        "scheduler",
        "scheduler-standby",
        "worker-cpu",
    }
    assert commands["scheduler"] == commands["scheduler-standby"] and "--standby" in commands["scheduler"]
    assert commands["grammar"] == commands["grammar-standby"] and socket in commands["grammar"]
    ring = commands["grammar"][commands["grammar"].index("--ring-dir") + 1]
    for name in ("grammar", "grammar-standby", "worker-cpu"):  # the ring lies where all three can map it
        assert ring in [volume["target"] for volume in config["services"][name]["volumes"]]


def test_the_images_dockerfile_targets_exist(config: dict[str, Any]):
    stages = [line.split()[-1] for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("FROM")]
    source = (ROOT / "docker-compose.yml").read_text()
    targets = {line.split("target: ")[1].rstrip("}") for line in source.splitlines() if "build: {" in line}
    assert targets <= set(stages)


class Local:
    """A compose service as a process of this machine: paths and addresses inside the container become ours."""

    def __init__(self, service: dict[str, Any], run: Path, port: int) -> None:
        self.service = service
        self.changes = {
            "/run/v4mesh": str(run),
            "/model": str(DEFAULT_MODEL),
            "0.0.0.0:8000": f"127.0.0.1:{port}",
            "http://127.0.0.1:8000": f"http://127.0.0.1:{port}",
        }
        self.env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'protos' / 'gen'}"}
        self.process = subprocess.Popen(
            self.line(service["command"]), env=self.env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )

    def line(self, command: list[str]) -> list[str]:
        assert command[0] == "v4mesh"
        words = command[1:]
        for inside, outside in self.changes.items():
            words = [w.replace(inside, outside) for w in words]
        return [sys.executable, "-m", "meshkit.cli", *words]

    def healthy(self) -> bool:
        kind, *command = self.service["healthcheck"]["test"]
        assert kind == "CMD"
        return subprocess.run(self.line(command), env=self.env, capture_output=True, check=False).returncode == 0

    def wait(self, condition: Callable[[], bool]) -> None:
        """Asks in this process: a health check costs an interpreter, and a loading worker needs the cores."""
        deadline = time.monotonic() + START_LIMIT_S
        while not condition():
            assert self.process.poll() is None, self.process.stderr and self.process.stderr.read()
            assert time.monotonic() < deadline, "not up in time"
            time.sleep(0.1)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
        return self.process.returncode


@pytest.fixture
def mesh(config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Local], int]]:
    """All services in the order that depends_on asks for, each healthy; the worker may still be loading."""
    run = tmp_path_factory.mktemp("run")
    run.chmod(0o700)
    port = free_port("127.0.0.1")
    services = config["services"]
    order = sorted(services, key=lambda name: len(services[name].get("depends_on") or {}))
    running: dict[str, Local] = {}
    try:
        for name in order:
            assert set(services[name].get("depends_on") or {}) <= running.keys()
            running[name] = Local(services[name], run, port)
            if name == "scheduler":
                running[name].wait((run / "scheduler.sock").exists)
                assert running[name].healthy()
        yield running, port
    finally:
        for local in reversed(running.values()):
            if local.process.poll() is None:
                local.stop()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


@pytest.mark.timeout(240)
def test_the_compose_file_serves_a_chat_as_processes(mesh: tuple[dict[str, Local], int]):
    running, port = mesh
    running["worker-cpu"].wait(lambda: answers(f"http://127.0.0.1:{port}/ready"))
    running["grammar"].wait(running["grammar"].healthy)
    assert {name: local.healthy() for name, local in running.items()} == dict.fromkeys(running, True)
    body = {"model": "v4-nano", "messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 8}
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10) as reply:
        body["model"] = json.load(reply)["data"][0]["id"]
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as reply:
        answer = json.load(reply)
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] == 8
    shaped = {**body, "max_tokens": 60, "regex": "[0-9]{4}-[a-f]{3}", "chat_template_kwargs": {"thinking": False}}
    request.data = json.dumps(shaped).encode()
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert re.fullmatch("[0-9]{4}-[a-f]{3}", json.load(reply)["choices"][0]["message"]["content"])
    order = ("gateway", "worker-cpu", "grammar-standby", "grammar", "scheduler-standby", "scheduler")
    assert [running[name].stop() for name in order] == [0] * len(order)
