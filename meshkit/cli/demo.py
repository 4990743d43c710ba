"""`v4mesh demo`: starts a mesh, asks it one question over REST, streams the answer here, stops, says how to go on.

What `make demo` runs on a fresh machine. Uses a free port, so that it disturbs nothing.
"""

import asyncio
import sys

import click

from meshkit.cli.clients import client_snippets
from meshkit.cli.http_client import Endpoint
from meshkit.cli.mesh import DEFAULT_PORT, MeshPlan, run_mesh
from meshkit.cli.screen import Screen, shared_options
from meshkit.cli.turn import stream_turn
from meshkit.cli.up import UpConfig, make_plan
from meshkit.exit_codes import Exit, Problem

QUESTION = "Tell me a story about a fox."


@click.command()
@click.argument("model", required=False)
@click.option("-q", "--question", default=QUESTION, show_default=True, help="What to ask.")
@click.option("--max-tokens", default=160, show_default=True, type=click.IntRange(1), help="Longest answer, in tokens.")
@click.option("--seed", default=7, show_default=True, type=int, help="Same seed, same answer.")
@shared_options
@click.pass_obj
def demo(screen: Screen, *, model: str | None, question: str, max_tokens: int, seed: int) -> int:
    """Start a mesh, stream one answer, stop, and say how to go on."""
    plan = make_plan(UpConfig(model=model or "", port=0), None)

    def ready(running: MeshPlan, seconds: float) -> None:
        screen.note(f"ready in {seconds:.1f} s · {running.url} · model {running.name}")
        screen.note(f"\nPOST {running.url}/v1/chat/completions  {question!r}\n")

    def work(running: MeshPlan) -> int:
        body = {
            "model": running.name,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": max_tokens,
            "seed": seed,
        }
        turn = asyncio.run(stream_turn(Endpoint.parse(running.url), body, on_delta=_show))
        print(flush=True)
        if turn.error:
            screen.problem(Problem("DEMO", Exit.PEER, turn.error))
            return int(Exit.PEER)
        screen.note(f"\n{turn.summary()}\n")
        return 0

    status = run_mesh(plan, screen, show_log=screen.verbose, on_ready=ready, work=work)
    if status == 0:
        screen.note(how_to_go_on(plan.name))
    return status


def _show(kind: str, text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def how_to_go_on(model: str) -> str:
    """What to type next."""
    url = f"http://127.0.0.1:{DEFAULT_PORT}"
    program = ".venv/bin/v4mesh" if ".venv" in sys.prefix else "v4mesh"
    return (
        f"Stopped. To go on:\n  {program} up      start the mesh and keep it\n"
        f"  {program} chat    talk to it from another terminal, or:\n\n{client_snippets(url, model)}"
    )
