"""`v4mesh bench`: load a running mesh, print TTFT, ITL and throughput, write everything as JSON.

Rejected and broken requests count: in the error row, and against goodput. Prompts are random words; see `load`.
"""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from meshkit.cli.chat import DEFAULT_URL, read_key
from meshkit.cli.help_pages import command
from meshkit.cli.http_client import Endpoint
from meshkit.cli.load import LoadPlan, LoadResult, percentile, run_load
from meshkit.cli.screen import Screen, shared_options
from meshkit.cli.turn import Turn, first_model, refusal
from meshkit.exit_codes import Exit, ProblemsError

UNITS = {"ms": 1e-3, "us": 1e-6, "s": 1.0}  # longest endings first
SHARES = (0.5, 0.9, 0.99)


def parse_limits(ctx: click.Context, param: click.Parameter, value: str | None) -> dict[str, float] | None:
    """`ttft:2s,itl:50ms,e2e:30s` as {"ttft": 2.0, ...} in seconds; a usage error shows the form."""
    if value is None:
        return None
    limits = {}
    for part in value.split(","):
        name, _, amount = part.strip().partition(":")
        unit = next((u for u in UNITS if amount.endswith(u)), "")
        try:
            limits[name] = float(amount.removesuffix(unit)) * UNITS[unit]
        except (ValueError, KeyError):
            raise click.BadParameter(f"{part!r}: write ttft:2s,itl:50ms,e2e:30s", ctx, param) from None
        if name not in ("ttft", "itl", "e2e"):
            raise click.BadParameter(f"{name!r} is no figure: there are ttft, itl, e2e", ctx, param)
    return limits


@command()
@click.option("--url", default=DEFAULT_URL, show_default=True, help="Where the mesh listens.")
@click.option("--model", metavar="NAME", help="Model to ask (default: the one served).")
@click.option("--num-prompts", default=32, show_default=True, type=click.IntRange(1), help="Requests measured.")
@click.option("--concurrency", default=4, show_default=True, type=click.IntRange(1), help="Closed loop: in flight.")
@click.option("--request-rate", default=0.0, type=click.FloatRange(0), help="Open loop: per second, Poisson.")
@click.option("--input-len", default=128, show_default=True, type=click.IntRange(1), help="Prompt tokens, about.")
@click.option("--output-len", default=64, show_default=True, type=click.IntRange(1), help="Output tokens, exactly.")
@click.option("--warmup", default=2, show_default=True, type=click.IntRange(0), help="Requests before, not measured.")
@click.option("--seed", default=0, show_default=True, help="Of prompts and arrivals.")
@click.option(
    "--goodput", callback=parse_limits, metavar="LIMITS", help="ttft:2s,itl:50ms,e2e:30s: what a good request keeps."
)
@click.option("--goodput-share", default=0.99, show_default=True, type=click.FloatRange(0, 1), help="Else exit 9.")
@click.option("--request-timeout", "timeout_s", default=600.0, metavar="SECONDS", help="A request may take this long.")
@click.option("--output", type=click.Path(path_type=Path), metavar="FILE", help="Write the JSON there too.")
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    help="File of API keys; its first one is sent.",
)
@shared_options
@click.pass_obj
def bench(
    screen: Screen,
    /,
    *,
    url: str,
    model: str | None,
    goodput: dict[str, float] | None,
    goodput_share: float,
    output: Path | None,
    api_key_file: Path | None,
    **shape: Any,
) -> int:
    """Load a running mesh and measure it: --concurrency for a closed loop, --request-rate for an open one."""
    endpoint, key = Endpoint.parse(url), read_key(api_key_file)
    plan = LoadPlan(model=model or asyncio.run(first_model(endpoint, key)), **shape)
    result = asyncio.run(run_load(endpoint, plan, api_key=key, on_done=_counter(screen, plan.num_prompts)))
    if all(t.status == 401 for t in result.turns):
        raise ProblemsError(refusal(endpoint, 401, result.turns[0].error, with_key=bool(key)))
    report = measure(plan, result, goodput or {})
    report["config"] = {**asdict(plan), "url": str(endpoint), "goodput": goodput or {}, "version": version()}
    if output:
        output.write_text(json.dumps(report, indent=2) + "\n")
    if screen.as_json:
        screen.result(json.dumps(report))
    else:
        print_report(screen, report)
    if goodput and report["goodput_share"] < goodput_share:
        screen.note(f"goodput {report['goodput_share']:.3f} is below {goodput_share:g}")
        return int(Exit.THRESHOLD)
    return int(Exit.PEER) if report["completed"] == 0 else int(Exit.OK)


def _counter(screen: Screen, total: int) -> Any:
    """Shows how far the run is, on a terminal only."""
    if not sys.stderr.isatty():
        return lambda done: None

    def show(done: int) -> None:
        sys.stderr.write(f"\r{done}/{total}" + ("\n" if done == total else ""))
        sys.stderr.flush()

    return show


def measure(plan: LoadPlan, result: LoadResult, limits: dict[str, float]) -> dict[str, Any]:
    """The figures of a run. Times in ms; `itl_ms` are the gaps between arrivals, `tpot_ms` their mean per request."""
    good = [t for t in result.turns if not t.error]
    gaps = [b - a for t in good for a, b in zip(t.arrivals_s, t.arrivals_s[1:], strict=False)]
    tokens = sum(t.completion_tokens for t in good)
    report: dict[str, Any] = {
        "schema_version": 1,
        "requests": len(result.turns),
        "completed": len(good),
        "errors": dict(Counter(f"{t.status} {t.error}" if t.status else t.error for t in result.turns if t.error)),
        "seconds": round(result.seconds, 3),
        "requests_per_s": round(len(good) / result.seconds, 3) if result.seconds else 0.0,
        "output_tokens_per_s": round(tokens / result.seconds, 2) if result.seconds else 0.0,
        "prompt_tokens_mean": round(sum(t.prompt_tokens for t in good) / len(good), 1) if good else 0.0,
        "ttft_ms": _spread([t.ttft_s for t in good]),
        "itl_ms": _spread(gaps),
        "tpot_ms": _spread([t.itl_s for t in good if t.itl_s > 0]),
        "e2e_ms": _spread([t.end_s for t in good]),
    }
    kept = sum(_keeps(t, limits) for t in result.turns)
    report["goodput_share"] = round(kept / len(result.turns), 4) if result.turns else 0.0
    report["goodput_requests_per_s"] = round(kept / result.seconds, 3) if result.seconds else 0.0
    return report


def _keeps(turn: Turn, limits: dict[str, float]) -> bool:
    figures = {"ttft": turn.ttft_s, "itl": turn.itl_s, "e2e": turn.end_s}
    return not turn.error and all(figures[name] <= limit for name, limit in limits.items())


def _spread(seconds: list[float]) -> dict[str, float]:
    mean = sum(seconds) / len(seconds) if seconds else 0.0
    parts = {f"p{share * 100:.0f}": percentile(seconds, share) for share in SHARES}
    return {name: round(value * 1e3, 2) for name, value in {"mean": mean, **parts}.items()}


def print_report(screen: Screen, report: dict[str, Any]) -> None:
    """A table for people."""
    config = report["config"]
    rate = config["request_rate"]
    shape = f"{rate:g} requests/s" if rate else f"{config['concurrency']} at once"
    screen.result(f"{config['model']} at {config['url']}: {shape}, {config['output_len']} tokens out")
    screen.result(
        f"{report['completed']} of {report['requests']} requests in {report['seconds']:.1f} s · "
        f"{report['requests_per_s']:.2f} requests/s · {report['output_tokens_per_s']:.1f} tokens/s · "
        f"{report['prompt_tokens_mean']:.0f} prompt tokens each"
    )
    screen.result(f"{'ms':6}" + "".join(f"{name:>10}" for name in ("mean", "p50", "p90", "p99")))
    for name in ("ttft", "itl", "tpot", "e2e"):
        row = report[f"{name}_ms"]
        screen.result(f"{name.upper():6}" + "".join(f"{row[key]:10.1f}" for key in ("mean", "p50", "p90", "p99")))
    for error, count in report["errors"].items():
        screen.result(f"{count} x {error}")
    if config["goodput"]:
        screen.result(f"goodput {report['goodput_share']:.1%} ({report['goodput_requests_per_s']:.2f} requests/s)")


def version() -> str:
    """The version, with the commit where this is a checkout."""
    try:
        found = metadata.version("v4mesh")
    except metadata.PackageNotFoundError:
        found = "unknown"
    folder = Path(__file__).parents[2]
    if not (folder / ".git").exists():
        return found
    done = subprocess.run(["git", "-C", str(folder), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return f"{found}+{done.stdout.strip()}" if done.returncode == 0 else found
