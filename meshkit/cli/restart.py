"""`v4mesh restart`: a running `v4mesh up` replaces its processes one after the other, without a request lost.

The gateway's successor serves before its predecessor stops listening, and that one finishes its streams; a service with
a standby is restarted once the standby is warm; for the others, what runs waits for the next process and goes on where
it was. The supervisor is asked over a socket in the run folder; this command changes nothing by itself.
"""

import asyncio
import json
import os
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import click

from meshkit.cli.help_pages import command
from meshkit.cli.screen import Screen, shared_options
from meshkit.config import environment
from meshkit.exit_codes import Exit, Problem, ProblemsError
from meshkit.supervisor import RestartError, Supervisor

SOCKET: Final = "up.sock"
DRAIN_S: Final = 30.0
LONGEST_DRAIN_S: Final = 14_400.0
LONGEST_ASK: Final = 65_536
ASK_S: Final = 10.0


@command()
@click.argument("services", nargs=-1, metavar="[SERVICE]...")
@click.option(
    "--drain-timeout",
    default=DRAIN_S,
    show_default=True,
    metavar="SECONDS",
    help="For each to finish what it does; a gateway's streams are waited for so long, but not cut.",
)
@click.option("--run-dir", metavar="DIR", help="The mesh's folder, as given to up; else the only mesh of this user.")
@shared_options
@click.pass_obj
def restart(screen: Screen, *, services: tuple[str, ...], drain_timeout: float, run_dir: str | None) -> int:
    """Restart a running mesh's services in turn, all of them unless some are named; requests go on meanwhile."""
    if not 0 <= drain_timeout <= LONGEST_DRAIN_S:
        fact = f"--drain-timeout {drain_timeout:g} is not 0 to {LONGEST_DRAIN_S:g} seconds"
        raise ProblemsError(Problem("USAGE", Exit.USAGE, fact, f"leave it out ({DRAIN_S:g}), or --drain-timeout 60"))
    folder = Path(run_dir).absolute() if run_dir else _only_folder()
    return asyncio.run(_follow(screen, folder / SOCKET, {"services": services, "drain_s": drain_timeout}))


def _only_folder() -> Path:
    """The run folder of this user's running mesh; ProblemsError where there is none or more than one."""
    parents = {environment().get("XDG_RUNTIME_DIR") or "/tmp", tempfile.gettempdir(), "/tmp"}
    found = {path.parent for parent in parents for path in Path(parent).glob(f"v4mesh-*/{SOCKET}")}
    mine = sorted(folder for folder in found if folder.stat().st_uid == os.getuid() and _answers(folder / SOCKET))
    if not mine:
        fact = "no mesh of this user runs here"
        raise ProblemsError(Problem("MESH", Exit.PEER, fact, "v4mesh up, or name its folder: --run-dir DIR"))
    if len(mine) > 1:
        fact = f"several meshes run here: {', '.join(map(str, mine))}"
        raise ProblemsError(Problem("USAGE", Exit.USAGE, fact, "choose one with --run-dir"))
    return mine[0]


def _answers(path: Path) -> bool:
    """Whether somebody listens there: a mesh that was killed leaves its folder behind."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


async def _follow(screen: Screen, path: Path, asked: dict[str, Any]) -> int:
    try:
        reader, writer = await asyncio.open_unix_connection(str(path))
    except OSError as e:
        fact = f"no mesh answers at {path}: {e.strerror}"
        fix = f"v4mesh up --run-dir {path.parent}, or name a running mesh's folder"
        raise ProblemsError(Problem("MESH", Exit.PEER, fact, fix)) from e
    began, current = time.monotonic(), ""
    try:
        writer.write(json.dumps(asked).encode() + b"\n")
        async for line in reader:
            told = json.loads(line)
            if fact := told.get("problem", ""):
                raise ProblemsError(Problem("RESTART", Exit(told["exit"]), fact, told["fix"]))
            if told.get("done"):
                screen.note(f"done in {time.monotonic() - began:.1f} s")
                return int(Exit.OK)
            current = told["service"]
            screen.note(f"{current:18} {told['state']}")
    except asyncio.CancelledError:  # Ctrl-C
        screen.note(f"{current or 'the first one'} is replaced all the same, no other; to go on: v4mesh restart")
        raise
    finally:
        writer.close()
    raise ProblemsError(Problem("RESTART", Exit.PEER, "the mesh has ended meanwhile", "v4mesh up"))


class Control:
    """The supervisor's side: answers at the run folder's socket while `up` runs. Use as `async with`."""

    def __init__(self, supervisor: Supervisor, folder: Path) -> None:
        self._supervisor, self._path = supervisor, folder / SOCKET

    async def __aenter__(self) -> "Control":
        if _answers(self._path):
            fact = f"another mesh runs in {self._path.parent}"
            raise ProblemsError(Problem("RUN_DIR", Exit.CONFIG, fact, "stop it, or choose another --run-dir"))
        self._path.unlink(missing_ok=True)  # of a mesh that was killed
        self._server = await asyncio.start_unix_server(self._answer, str(self._path), limit=LONGEST_ASK)
        self._path.chmod(0o600)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self._path.unlink(missing_ok=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ASK_S):
                asked = json.loads(await reader.readline())
            async for told in self._roll(tuple(asked["services"]), float(asked["drain_s"])):
                writer.write(json.dumps(told).encode() + b"\n")
                await writer.drain()
        except (ValueError, KeyError, TypeError, TimeoutError, ConnectionError):
            return  # not from our command, or it does not listen any more
        finally:
            writer.close()

    async def _roll(self, services: tuple[str, ...], drain_s: float) -> AsyncIterator[dict[str, Any]]:
        """One after the other, in the order of `in_turn`; each is told when it begins and when it is over."""
        there = in_turn(list(self._supervisor.children))
        if unknown := [name for name in services if name not in there]:
            fact = f"there is no {', '.join(unknown)} here, but {', '.join(there)}"
            yield {"problem": fact, "exit": int(Exit.USAGE), "fix": "name some of these, or none: all are restarted"}
            return
        for name in (name for name in there if not services or name in services):
            began = time.monotonic()
            yield {"service": name, "state": "restarting"}
            try:
                left = await self._supervisor.restart(name, drain_s)
            except RestartError as e:
                fix = f"the output of `v4mesh up` says why; then: v4mesh restart {name}"
                yield {"problem": str(e), "exit": int(Exit.PEER), "fix": fix}
                return
            behind = "" if left else "; its former process finishes what it does in the background"
            yield {"service": name, "state": f"restarted in {time.monotonic() - began:.1f} s{behind}"}
        yield {"done": True}


def in_turn(names: list[str]) -> list[str]:
    """Gateways last: what they are told by the other services may be new to their former processes.

    A service's standby goes before it, so that one that is up to date takes over.
    """
    return sorted(names, key=lambda name: (name.startswith("gateway"), _rank(name, names)))


def _rank(name: str, names: list[str]) -> tuple[int, bool]:
    service = name.partition("-")[0]
    return [it.partition("-")[0] for it in names].index(service), name == service
