"""`v4mesh top`: a running mesh in a terminal, refreshed until Ctrl-C: load, speed, memory, errors.

Asks a gateway for /server_info and /metrics, nothing else. `--once` (or a pipe) prints one picture, `--json` an object.
"""

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import click

from meshkit.cli.chat import read_key
from meshkit.cli.help_pages import command
from meshkit.cli.http_client import Endpoint, StatusError, error_text, get_json, request
from meshkit.cli.screen import Screen, shared_options
from meshkit.cli.snapshot import Instance, Look, Quantiles, Snapshot, compare, read_look
from meshkit.exit_codes import Exit, Problem, ProblemsError

BAR = 24


@command()
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="A gateway.")
@click.option("--api-key-file", type=click.Path(path_type=Path), help="File of API keys; its first one is sent.")
@click.option("--interval", "interval_s", default=1.0, show_default=True, metavar="SECONDS", help="Between two looks.")
@click.option("--once", is_flag=True, help="Two looks, one picture, then end.")
@shared_options
@click.pass_obj
def top(screen: Screen, *, url: str, api_key_file: Path | None, interval_s: float, once: bool) -> int:
    """Watch a mesh: requests, slots, KV pages, tokens per second, latencies, errors."""
    if interval_s < 0.1:
        raise click.UsageError(f"--interval {interval_s:g} is too short; 0.1 or more")
    endpoint, api_key = Endpoint.parse(url), read_key(api_key_file)
    if screen.as_json or once or not sys.stdout.isatty():
        snapshot = _twice(endpoint, api_key, interval_s)
        screen.result(json.dumps(asdict(snapshot)) if screen.as_json else picture(snapshot, str(endpoint)))
        return int(Exit.OK)
    return _live(endpoint, api_key, interval_s)


def _twice(endpoint: Endpoint, api_key: str, interval_s: float) -> Snapshot:
    first = asyncio.run(look(endpoint, api_key))
    time.sleep(interval_s)
    return compare(asyncio.run(look(endpoint, api_key)), first)


def _live(endpoint: Endpoint, api_key: str, interval_s: float) -> int:
    from rich.live import Live
    from rich.text import Text

    before = asyncio.run(look(endpoint, api_key))  # nobody there: an error at once, no empty screen
    with Live(Text(picture(compare(before, None), str(endpoint))), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            try:
                now = asyncio.run(look(endpoint, api_key))
            except ProblemsError as error:  # it may come back: keep looking
                live.update(Text(f"{error.problems[0].fact}; still looking"), refresh=True)
                continue
            live.update(Text(picture(compare(now, before), str(endpoint))), refresh=True)
            before = now


async def look(endpoint: Endpoint, api_key: str) -> Look:
    """Ask once. Raises ProblemsError saying what to do."""
    try:
        info = await get_json(endpoint, "/server_info", api_key=api_key)
        async with request(endpoint, "GET", "/metrics", api_key=api_key) as response:
            text = await response.text()
            if response.status != 200:
                raise StatusError("/metrics", response.status, error_text(text))
        return read_look(text, info, time.monotonic())
    except StatusError as error:
        away = "start the gateway with --public-metrics, or look from there"  # the answer says which of the two it is
        known = {401: "give --api-key-file", 403: f"give an operator's key in --api-key-file, or {away}"}
        fix = known.get(error.status, away)
        raise ProblemsError(Problem("PEER", Exit.PEER, str(error), fix)) from error
    except (OSError, TimeoutError, EOFError, ValueError, IndexError) as error:
        text = f"no mesh answers at {endpoint}: {str(error) or type(error).__name__}"
        raise ProblemsError(Problem("PEER", Exit.PEER, text, "start one with `v4mesh up`, or give --url")) from error


def picture(shot: Snapshot, url: str) -> str:
    """Plain text, at most 78 columns."""
    state = "ready" if shot.ready else "NOT READY"
    cache = "-" if shot.cache_hit_share is None else f"{shot.cache_hit_share:.0%}"
    lines = [
        f"{shot.model}  {state}  {shot.workers} worker{'s' if shot.workers != 1 else ''}  {url}  v{shot.version}",
        "",
        f"requests   running {shot.running:<6} waiting {shot.waiting:<6} open here {shot.streams:<6}"
        f" {shot.requests_per_s:.1f}/s",
        f"tokens/s   in {shot.prompt_tokens_per_s:<10.0f} out {shot.output_tokens_per_s:<10.0f}"
        f" prompt from cache {cache}",
        f"slots      {_bar(shot.slots_used, shot.slots_total)}",
        f"KV pages   {_bar(shot.pages_used, shot.pages_total)}  preemptions {shot.preemptions}",
        *_instances(shot.instances),
        "",
        f"{'':24}{'p50':>10}{'p99':>10}",
        f"{'time to first token':24}{_pair(shot.first_token)}",
        f"{'between tokens':24}{_pair(shot.inter_token)}",
        f"{'whole request':24}{_pair(shot.end_to_end)}",
        "",
        f"finished   {_counts(shot.finished)}",
        f"HTTP       {_counts(shot.statuses)}",
    ]
    if shot.faults:
        lines.append(f"FAULTS     {_counts(shot.faults)}  (must be zero: please report)")
    return "\n".join(line[:78].rstrip() for line in lines)


def _instances(shown: Sequence[Instance]) -> list[str]:
    """A row for each, where there are several. Of a long address the end tells them apart."""
    if len(shown) < 2:
        return []
    lines = ["", f"{'instance':28}{'state':11}{'running':>8}{'waiting':>8}{'slots':>10}{'KV pages':>12}"]
    for it in shown:
        state = "ready" if it.attached and it.ready else "not ready" if it.attached else "away"
        name = it.address if len(it.address) < 28 else f"..{it.address[-25:]}"
        slots, pages = f"{it.slots_used}/{it.slots_total}", f"{it.pages_used}/{it.pages_total}"
        lines.append(f"{name:28}{state:11}{it.running:>8}{it.waiting:>8}{slots:>10}{pages:>12}")
    return lines


def _bar(used: int, total: int) -> str:
    full = round(BAR * used / total) if total else 0
    return f"[{'#' * full}{'.' * (BAR - full)}] {used} of {total}"


def _pair(quantiles: Quantiles) -> str:
    return f"{_seconds(quantiles.p50):>10}{_seconds(quantiles.p99):>10}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def _counts(counts: Mapping[str, int]) -> str:
    return "  ".join(f"{name} {number}" for name, number in counts.items()) or "none yet"
