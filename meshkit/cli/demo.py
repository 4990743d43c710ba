"""`v4mesh demo`: starts a mesh, asks it one question over REST, streams the answer here, stops, says how to go on.

What `make demo` runs on a fresh machine. Uses a free port, so that it disturbs nothing. With --kill the question is
asked twice: the second time one service is killed (SIGKILL) in the middle of the answer, which must go on all the same.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, Literal

import click

from meshkit.cli.clients import client_snippets
from meshkit.cli.help_pages import command
from meshkit.cli.http_client import Endpoint
from meshkit.cli.mesh import DEFAULT_PORT, MeshPlan, run_mesh
from meshkit.cli.screen import Screen, shared_options
from meshkit.cli.turn import Turn, stream_turn
from meshkit.cli.up import UpConfig, make_plan
from meshkit.exit_codes import Exit, Problem, ProblemsError

QUESTION = "Tell me a story about a fox."
KILL_AFTER = 20  # pieces of the answer
Pids = Callable[[], dict[str, int]]


@command()
@click.argument("model", required=False)
@click.option("-q", "--question", default=QUESTION, show_default=True, help="What to ask.")
@click.option("--max-tokens", default=160, show_default=True, type=click.IntRange(1), help="Longest answer, in tokens.")
@click.option("--seed", default=7, show_default=True, type=int, help="Same seed, same answer.")
@click.option(
    "--kill", "victim", type=click.Choice(["worker", "scheduler"]), help="Kill it in the middle of an answer."
)
@shared_options
@click.pass_obj
def demo(screen: Screen, *, model: str | None, question: str, max_tokens: int, seed: int, victim: str | None) -> int:
    """Start a mesh, stream one answer, stop, and say how to go on."""
    # Only deterministic arithmetic promises the same tokens from a resumed answer, whose steps are cut differently.
    config = UpConfig(model=model or "", port=0, deterministic=victim is not None, grammar="off")
    plan = make_plan(config, None)

    def ready(running: MeshPlan, seconds: float) -> None:
        screen.note(f"ready in {seconds:.1f} s · {running.url} · model {running.name}")
        screen.note(f"\nPOST {running.url}/v1/chat/completions  {question!r}\n")

    def work(running: MeshPlan, pids: Pids) -> int:
        body = {
            "model": running.name,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": max_tokens,
            "seed": seed,
        }
        endpoint = Endpoint.parse(running.url)
        turn = ask(endpoint, body, _Printer())
        screen.note(f"\n{turn.summary()}\n")
        if victim is None:
            return int(Exit.OK)
        screen.note(f"Once more, with kill -9 of the {victim} in the middle:\n")
        again = ask(endpoint, body, _Printer(lambda: os.kill(pids()[victim], signal.SIGKILL)))
        pause = max((b - a for a, b in zip(again.arrivals_s, again.arrivals_s[1:], strict=False)), default=0.0)
        same = again.content == turn.content
        screen.note(f"\nlongest pause {pause:.1f} s · the answer is {'the same' if same else 'another one'}\n")
        return int(Exit.OK if same else Exit.BUG)

    status = run_mesh(plan, screen, show_log=screen.verbose, on_ready=ready, work=work)
    if status == 0:
        screen.note(how_to_go_on(plan.name))
    return status


def ask(endpoint: Endpoint, body: dict[str, Any], printer: "_Printer") -> Turn:
    """One streamed answer; a refusal or a broken stream ends the demo."""
    turn = asyncio.run(stream_turn(endpoint, body, on_delta=printer))
    print(flush=True)
    if turn.error:
        raise ProblemsError(Problem("DEMO", Exit.PEER, turn.error))
    return turn


class _Printer:
    """Writes an answer as it comes; runs `midway` once, when KILL_AFTER pieces have come."""

    def __init__(self, midway: Callable[[], None] | None = None) -> None:
        self.midway = midway
        self.pieces = 0

    def __call__(self, kind: Literal["reasoning", "content"], text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
        self.pieces += 1
        if self.midway is not None and self.pieces == KILL_AFTER:
            print(flush=True)  # what happens now is reported on lines of its own
            self.midway()


def how_to_go_on(model: str) -> str:
    """What to type next."""
    url = f"http://127.0.0.1:{DEFAULT_PORT}"
    program = ".venv/bin/v4mesh" if ".venv" in sys.prefix else "v4mesh"
    return (
        f"Stopped. To go on:\n  {program} up      start the mesh and keep it\n"
        f"  {program} chat    talk to it from another terminal, or:\n\n{client_snippets(url, model)}"
    )
