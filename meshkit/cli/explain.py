"""`v4mesh explain`: why a prompt is (not) served from the prefix cache, per rank. Asks a running mesh, changes nothing.

The question is put to the gateway, which encodes the prompt as the request would be and asks the scheduler within the
caller's own namespace. Sentences for the scheduler's words stand here.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import click

from meshkit.cli.chat import DEFAULT_URL, read_key
from meshkit.cli.help_pages import command
from meshkit.cli.http_client import Endpoint, error_text, request
from meshkit.cli.screen import Screen, shared_options
from meshkit.cli.turn import no_mesh, refusal
from meshkit.exit_codes import Exit, Problem, ProblemsError

PAGE_TOKENS = 256  # as meshkit.types has it; that module is not needed to ask

WHY = {
    "hit": "all full pages are there",
    "unknown": "nothing of this prompt has been seen with this key and salt",
    "page_missing": "what follows has not been seen after these pages",
    "page_evicted": "the next page was evicted: the pool is too small for what is in use",
    "class_missing": "part of the next page is gone",
    "lower_tier": "the next page lies in a lower tier",
    "no_tail": "the pages are there, but no resume point at their end was ever kept",
    "tail_evicted": "the pages are there, their resume point was evicted: more --tails would keep it",
}
ACTION = {
    "nothing": "computes the prompt from its beginning",
    "tail": "resumes at a kept tail",
    "load": "loads a tail from a lower tier",
    "replay": "replays the last windows exactly, then goes on",
}


@command()
@click.argument("text", required=False)
@click.option("--request", "request_file", type=click.Path(path_type=Path), metavar="FILE", help="A request as JSON.")
@click.option("--raw", is_flag=True, help="TEXT is the whole prompt, not a user's message.")
@click.option("--salt", default="", metavar="TEXT", help="cache_salt of the requests in question.")
@click.option("--url", default=DEFAULT_URL, show_default=True, help="Where the mesh listens.")
@click.option("--api-key-file", type=click.Path(path_type=Path), help="File of API keys; its first one is sent.")
@shared_options
@click.pass_obj
def explain(
    screen: Screen,
    *,
    text: str | None,
    request_file: Path | None,
    raw: bool,
    salt: str,
    url: str,
    api_key_file: Path | None,
) -> int:
    """Why would TEXT be served from the prefix cache as far as it would? A request of your own: --request FILE or -."""
    body = make_body(text, request_file, raw=raw)
    if salt:
        body["cache_salt"] = salt
    answer = asyncio.run(ask(Endpoint.parse(url), body, read_key(api_key_file)))
    screen.result(json.dumps({"schema_version": 1, **answer}) if screen.as_json else picture(answer))
    return 0


def make_body(text: str | None, request_file: Path | None, *, raw: bool) -> dict[str, Any]:
    """What to ask about: a message, a prompt, or what a request's body holds of either."""
    if (text is None) == (request_file is None):
        raise click.UsageError("give TEXT, or --request FILE with the body of a request")
    if text is not None:
        return {"prompt": text} if raw else {"messages": [{"role": "user", "content": text}]}
    try:
        body = json.loads(sys.stdin.read() if str(request_file) == "-" else Path(str(request_file)).read_text("utf-8"))
    except (OSError, ValueError) as error:
        fact = f"--request {request_file}: {error}"
        raise ProblemsError(Problem("USAGE", Exit.USAGE, fact, "give a file with one JSON object")) from error
    if not isinstance(body, dict) or not ("messages" in body or "prompt" in body):
        fact = f"--request {request_file}: no object with messages or prompt"
        raise ProblemsError(Problem("USAGE", Exit.USAGE, fact, "give the body of a chat or text completion"))
    return body


async def ask(endpoint: Endpoint, body: dict[str, Any], api_key: str) -> dict[str, Any]:
    """The gateway's answer; problems that say what to do if there is none."""
    try:
        async with request(endpoint, "POST", "/explain", body=body, api_key=api_key, timeout_s=30.0) as response:
            said = await response.text()
            if response.status != 200:
                problem = refusal(endpoint, response.status, error_text(said), with_key=bool(api_key))
                raise ProblemsError(problem)
            answer: dict[str, Any] = json.loads(said)
            return answer
    except (OSError, TimeoutError, EOFError) as error:
        raise ProblemsError(no_mesh(endpoint, error)) from error


def picture(answer: dict[str, Any]) -> str:
    """A paragraph per rank."""
    tokens, ranks = int(answer["tokens"]), answer["ranks"]
    full = max(0, (tokens - 1) // PAGE_TOKENS)
    lines = [f"{tokens} tokens: {full} pages of {PAGE_TOKENS} could be shared, the rest is always computed"]
    if not ranks:
        lines.append("no worker serves")
    for rank in ranks:
        pages, start, why = rank["pages"], rank["start"], rank["why"]
        reason = WHY.get(why, "this version does not know that reason")
        place = f"instance {rank['instance']}, " if "instance" in rank else ""
        if not pages["asked"]:
            reason = "the prompt has no full page to share"
        lines += [
            "",
            f"{place}{rank['group']} rank {rank['rank']}: {pages['present']} of {pages['asked']} pages present, "
            f"{pages['servable']} servable, {pages['idle']} pages idle in its cache",
            f"  why:   {why} - {reason}",
            f"  start: {ACTION.get(start['action'], start['action'])}; "
            f"computes {tokens - int(start['token'])} of {tokens} tokens",
        ]
        if rank["first_missing"] is not None:
            parts = f", without {', '.join(rank['missing_classes'])}" if rank["missing_classes"] else ""
            tier = f", to be loaded from {rank['tier']}" if rank["tier"] else ""
            lines.append(f"  first missing: page {rank['first_missing']}{parts}{tier}")
    return "\n".join(lines)
