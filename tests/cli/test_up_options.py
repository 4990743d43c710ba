"""What options of `v4mesh up` become on the services' command lines; nothing is started."""

import json
import shlex

import pytest

from meshkit.cli import main


def lines(capsys, *args):
    """The printed command lines by service."""
    assert main.main(["up", "--launcher", "print", *args]) == 0
    printed = [shlex.split(line) for line in capsys.readouterr().out.splitlines() if line.strip()]
    return {
        line[line.index("meshkit.cli") + 1] if "meshkit.cli" in line else line[1]: line
        for line in printed
        if len(line) > 2
    }


def test_grpc_and_gateway_processes_reach_the_gateway(capsys):
    gateway = lines(capsys, "--port", "8123", "--grpc-port", "8124", "--gateway-processes", "3")["gateway"]
    assert gateway[gateway.index("--listen-grpc") + 1] == "127.0.0.1:8124"
    assert gateway[gateway.index("--processes") + 1] == "3"
    plain = lines(capsys, "--port", "8123")["gateway"]
    assert "--listen-grpc" not in plain and "--processes" not in plain


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--port", "8123", "--grpc-port", "8123"], "grpc_port"),
        (["--grpc-port", "70000"], "grpc_port"),
        (["--gateway-processes", "0"], "gateway_processes"),
    ],
)
def test_values_that_cannot_be_are_refused(capsys, args, words):
    assert main.main(["up", "--launcher", "print", "--json", *args]) == 3
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert words in error["fact"]
