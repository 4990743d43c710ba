"""`v4mesh chat` against a scripted server: streaming, reasoning, numbers, refusals, pipes."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from meshkit.cli.http_client import Endpoint
from meshkit.cli.main import main
from meshkit.cli.turn import Turn
from meshkit.exit_codes import Exit, ProblemsError
from tests.cli.conftest import Script, text_event, usage_event


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def no_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal())


def test_one_question_streams_the_answer(server: Script, capsys: pytest.CaptureFixture[str]):
    args = [
        "chat",
        "--url",
        server.url,
        "-q",
        "hi",
        "--stats",
        "--seed",
        "7",
        "--effort",
        "high",
        "--system",
        "Be kind.",
    ]
    assert main(args) == 0
    out, err = capsys.readouterr()
    assert out == "Once upon\n"
    assert "TTFT " in err
    assert "224 prompt tokens, 192 from cache · 2 new" in err
    (body,) = server.bodies
    assert body["messages"] == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]
    assert (body["model"], body["stream"], body["seed"], body["reasoning_effort"]) == ("fake", True, 7, "high")
    assert body["stream_options"] == {"include_usage": True}


def test_reasoning_is_dimmed_on_colours_and_set_apart_without(
    server: Script, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    server.events = [text_event(reasoning="Hm."), text_event("Yes."), usage_event(1, 2)]
    assert main(["chat", "--url", server.url, "-q", "hi"]) == 0
    assert capsys.readouterr().out == "Hm.\n\nYes.\n"
    monkeypatch.setenv("CLICOLOR_FORCE", "1")
    assert main(["chat", "--url", server.url, "-q", "hi"]) == 0
    assert capsys.readouterr().out == "\x1b[2mHm.\x1b[0m\nYes.\n"


def test_text_from_a_pipe_is_the_question(server: Script, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe\n"))
    assert main(["chat", "--url", server.url]) == 0
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "from a pipe"}]


def test_text_from_a_pipe_follows_the_question(server: Script):
    done = subprocess.run(
        [sys.executable, "-m", "meshkit.cli", "chat", "--url", server.url, "-q", "Summarise:"],
        input="a long text\n",
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout == "Once upon\n"
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "Summarise:\n\na long text"}]


def test_a_conversation_remembers_and_forgets(
    server: Script, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    said = iter(["hello", "", "again", "/new", "fresh", "/nonsense", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    assert main(["chat", "--url", server.url]) == 0
    assert [[m["content"] for m in b["messages"]] for b in server.bodies] == [
        ["hello"],
        ["hello", "Once upon", "again"],
        ["fresh"],
    ]
    err = capsys.readouterr().err
    assert err.count("TTFT") == 3
    assert "no command /nonsense" in err


def test_the_end_of_input_leaves(server: Script, monkeypatch: pytest.MonkeyPatch):
    def end(prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", end)
    assert main(["chat", "--url", server.url]) == 0


def test_as_json(server: Script, capsys: pytest.CaptureFixture[str]):
    assert main(["chat", "--url", server.url, "-q", "hi", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["content"], answer["prompt_tokens"], answer["completion_tokens"]) == ("Once upon", 224, 2)


def test_without_a_mesh_it_says_what_to_type(capsys: pytest.CaptureFixture[str]):
    assert main(["chat", "--url", "http://127.0.0.1:9", "-q", "hi"]) == Exit.PEER
    err = capsys.readouterr().err
    assert "PEER  no mesh answers at http://127.0.0.1:9" in err
    assert "v4mesh up" in err


def test_a_refusal_and_a_broken_stream_are_told_apart(server: Script, capsys: pytest.CaptureFixture[str]):
    server.status = 429
    assert main(["chat", "--url", server.url, "-q", "hi"]) == Exit.PEER
    assert "REFUSED  queue is full" in capsys.readouterr().err
    server.status, server.finish = 200, False
    assert main(["chat", "--url", server.url, "-q", "hi"]) == Exit.PEER
    assert "BROKEN  the stream ended early" in capsys.readouterr().err
    server.events = [{"error": {"message": "the worker died", "code": 500}}]
    assert main(["chat", "--url", server.url, "-q", "hi"]) == Exit.PEER
    assert "BROKEN  the worker died" in capsys.readouterr().err


def test_the_key_comes_from_a_file_or_the_environment(
    server: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "key").write_text("# ours\nalice sk-file-1  # until May\nbob sk-file-2\n")
    assert main(["chat", "--url", server.url, "-q", "hi", "--api-key-file", str(tmp_path / "key")]) == 0
    monkeypatch.setenv("V4MESH_API_KEY", "sk-env")
    assert main(["chat", "--url", server.url, "-q", "hi"]) == 0
    assert server.keys == ["Bearer sk-file-1", "Bearer sk-env"]
    assert main(["chat", "--url", server.url, "-q", "hi", "--api-key-file", "/nonexistent"]) == Exit.CONFIG
    assert "--api-key-file /nonexistent: No such file" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["chat", "-q", "hi"], ["chat", "-q", "hi", "--model", "m"], ["bench"]])
def test_a_key_that_is_missing_or_wrong_is_no_missing_mesh(
    server: Script, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    server.wanted_key = "sk-right-1"
    assert main([*command, "--url", server.url]) == Exit.CONFIG
    err = capsys.readouterr().err
    assert f"UNAUTHORIZED  {server.url} wants an API key\n  fix: --api-key-file FILE" in err
    (tmp_path / "key").write_text("sk-wrong-1\n")
    assert main([*command, "--url", server.url, "--api-key-file", str(tmp_path / "key")]) == Exit.CONFIG
    err = capsys.readouterr().err
    assert f"UNAUTHORIZED  {server.url} does not know this API key" in err
    assert "no mesh answers" not in err


@pytest.mark.parametrize("text", ["short\n", "# nothing\n", "one two three-words\n"])
def test_a_key_file_is_read_as_strictly_as_the_gateway_does(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "key").write_text(text)
    assert main(["chat", "-q", "hi", "--api-key-file", str(tmp_path / "key")]) == Exit.CONFIG
    assert str(tmp_path / "key") in capsys.readouterr().err


@pytest.mark.parametrize("question", ["", "  "])
def test_an_empty_question_is_a_usage_error(server: Script, question: str, capsys: pytest.CaptureFixture[str]):
    assert main(["chat", "--url", server.url, "-q", question]) == Exit.USAGE
    assert "-q is empty" in capsys.readouterr().err
    assert server.bodies == []


def test_no_terminal_and_an_empty_pipe_is_a_usage_error(server: Script, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["chat", "--url", server.url]) == Exit.USAGE


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("http://h:1/v1/", "http://h:1"),
        ("https://h/x", "https://h:443/x"),
        ("[::1]:5", "http://[::1]:5"),
    ],
)
def test_addresses_are_read_kindly(url: str, shown: str):
    assert str(Endpoint.parse(url)) == shown


@pytest.mark.parametrize("url", ["ftp://h:1", "http://", "h:port"])
def test_what_is_no_address_is_a_usage_error(url: str):
    with pytest.raises(ProblemsError) as refused:
        Endpoint.parse(url)
    assert refused.value.exit == Exit.USAGE


def test_the_numbers_of_a_turn():
    turn = Turn(arrivals_s=[0.041, 0.5, 1.041], end_s=1.1, prompt_tokens=224, completion_tokens=97)
    assert turn.itl_s == pytest.approx(1 / 96)
    assert turn.summary() == "TTFT 41 ms · 96 tok/s · 224 prompt tokens · 97 new"
    assert Turn(end_s=2.0).ttft_s == 2.0
