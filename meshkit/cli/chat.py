"""`v4mesh chat`: a conversation with a running mesh in the terminal. Starts nothing.

Tokens appear as they come, reasoning dimmed; after each turn one line of numbers. Text from a pipe or -q is one turn.
Ctrl-C ends the running answer and keeps the conversation; Ctrl-D leaves.
"""

import asyncio
import contextlib
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import click

from meshkit.api_keys import read_api_keys
from meshkit.cli.help_pages import command
from meshkit.cli.http_client import Endpoint
from meshkit.cli.screen import Screen, shared_options
from meshkit.cli.turn import Turn, first_model, no_mesh, refusal, stream_turn
from meshkit.config import env
from meshkit.exit_codes import Exit, Problem, ProblemsError

DEFAULT_URL = "http://127.0.0.1:8000"
HELP = "/new forgets the conversation · /stats switches the numbers · /exit leaves (or Ctrl-D)"


@command()
@click.option("--url", default=DEFAULT_URL, show_default=True, help="Where the mesh listens.")
@click.option("-q", "--question", metavar="TEXT", help="Ask this, print the answer, leave.")
@click.option("--system", metavar="TEXT", help="System message.")
@click.option("--model", metavar="NAME", help="Model to ask (default: the one served).")
@click.option("--effort", type=click.Choice(["none", "low", "medium", "high", "max"]), help="Reasoning effort.")
@click.option("--temperature", type=click.FloatRange(0, 2), help="0 always takes the likeliest token.")
@click.option("--max-tokens", type=click.IntRange(1), help="Longest answer, in tokens.")
@click.option("--seed", type=int, help="Same seed, same answer.")
@click.option("--stats/--no-stats", default=None, help="Numbers after each turn (default: in a conversation).")
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    help="File of API keys; its first one is sent.",
)
@shared_options
@click.pass_obj
def chat(
    screen: Screen,
    *,
    url: str,
    question: str | None,
    system: str | None,
    model: str | None,
    effort: str | None,
    temperature: float | None,
    max_tokens: int | None,
    seed: int | None,
    stats: bool | None,
    api_key_file: Path | None,
) -> int:
    """Talk to a running mesh: a conversation, or one answer with -q or with text from a pipe."""
    body: dict[str, Any] = {
        "reasoning_effort": effort,
        "temperature": temperature,
        "max_tokens": max_tokens,
        "seed": seed,
    }
    if question is not None and not question.strip():
        raise click.UsageError("-q is empty: say what to ask, or leave it out for a conversation")
    talk = Conversation(screen, Endpoint.parse(url), read_key(api_key_file), system)
    talk.body = {k: v for k, v in body.items() if v is not None}
    talk.body["model"] = model or asyncio.run(first_model(talk.endpoint, talk.api_key))
    talk.stats = bool(stats)
    if not sys.stdin.isatty() and (question is None or _stdin_is_piped()):
        question = "\n\n".join(part for part in (question, sys.stdin.read().strip()) if part)
    if question is not None:
        if not question:
            raise click.UsageError("there is no terminal and nothing came through the pipe: give -q TEXT")
        return talk.ask(question)
    talk.stats = stats is not False
    return talk.loop()


def _stdin_is_piped() -> bool:
    """True for a pipe or a file, whose text belongs to the question; not for /dev/null or a closed descriptor."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def read_key(path: Path | None) -> str:
    """The first key in a file like the gateway's; never on a command line, where `ps` shows it."""
    if path is None:
        return env("V4MESH_API_KEY")
    key = next((it.key for it in read_api_keys(path) if it.key), "")
    if not key:
        text = f"--api-key-file {path} holds hashes only, and what is sent is a key"
        raise ProblemsError(Problem("KEY", Exit.CONFIG, text, "put the key itself into a file that only you can read"))
    return key


class Conversation:
    """The messages so far and how to ask."""

    def __init__(self, screen: Screen, endpoint: Endpoint, api_key: str, system: str | None) -> None:
        self.screen = screen
        self.endpoint = endpoint
        self.api_key = api_key
        self.first = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = list(self.first)
        self.body: dict[str, Any] = {}
        self.stats = False
        self._dimmed = False

    def loop(self) -> int:
        """Read, ask, print, until the end of input."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() its editing and history
        self.screen.note(self.screen.paint(f"{self.body['model']} at {self.endpoint} · /help", "dim"))
        while True:
            try:
                text = input("> ").strip()
            except EOFError:
                self.screen.note("")
                return 0
            except KeyboardInterrupt:
                self.screen.note("")
                continue
            if text in ("/exit", "/quit", "/bye"):
                return 0
            if text.startswith("/"):
                self._command(text)
            elif text:
                self.ask(text)

    def _command(self, text: str) -> None:
        if text == "/new":
            self.messages = list(self.first)
            self.screen.note("forgotten")
        elif text == "/stats":
            self.stats = not self.stats
        else:
            self.screen.note(HELP if text == "/help" else f"no command {text}. {HELP}")

    def ask(self, text: str) -> int:
        """One turn; returns an exit status."""
        messages = [*self.messages, {"role": "user", "content": text}]
        try:
            turn = asyncio.run(
                stream_turn(
                    self.endpoint, {**self.body, "messages": messages}, api_key=self.api_key, on_delta=self._show
                )
            )
        except KeyboardInterrupt:
            self._write("", dim=False)
            self.screen.note(self.screen.paint("(stopped)", "dim"))
            return int(Exit.INTERRUPTED)
        except (OSError, TimeoutError) as e:
            self._write("", dim=False)
            raise ProblemsError(no_mesh(self.endpoint, e)) from e
        self._write("\n" if turn.content or turn.reasoning else "", dim=False)
        if turn.error:
            problem = Problem("BROKEN", Exit.PEER, turn.error)
            if turn.status != 200:
                problem = refusal(self.endpoint, turn.status, turn.error, with_key=bool(self.api_key))
            self.screen.problem(problem)
            return int(problem.exit)
        self.messages = [*messages, {"role": "assistant", "content": turn.content}]
        self._report(turn)
        return 0

    def _report(self, turn: Turn) -> None:
        if self.screen.as_json:
            fields = {
                "schema_version": 1,
                "content": turn.content,
                "reasoning_content": turn.reasoning,
                "finish_reason": turn.finish_reason,
                "ttft_ms": round(turn.ttft_s * 1e3, 1),
                "prompt_tokens": turn.prompt_tokens,
                "completion_tokens": turn.completion_tokens,
            }
            self.screen.result(json.dumps(fields, ensure_ascii=False))
        if self.stats:
            self.screen.note(self.screen.paint(turn.summary(), "dim"))

    def _show(self, kind: str, text: str) -> None:
        if not self.screen.as_json:
            self._write(text, dim=kind == "reasoning")

    def _write(self, text: str, *, dim: bool) -> None:
        """Answer text to stdout; reasoning is dimmed, or set apart by a blank line where there are no colours."""
        if self.screen.as_json:
            return
        if dim != self._dimmed:
            colors = self.screen.colors(sys.stdout)
            sys.stdout.write(("\x1b[2m" if dim else "\x1b[0m\n") if colors else ("" if dim else "\n\n"))
            self._dimmed = dim
        sys.stdout.write(text)
        sys.stdout.flush()
