"""`v4mesh precache`: compile every GPU kernel of a model ahead of serving, tune what can be chosen, and take the result
elsewhere as one file.

The worker's own start is what compiles, over empty weights, in a process of its own, which also tunes; here are only
the command line and the archive.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from meshkit.cli.flag_table import folders_of_caches
from meshkit.cli.help_pages import command
from meshkit.cli.model_folder import find_model
from meshkit.cli.screen import Screen, shared_options
from meshkit.config import environment
from meshkit.exit_codes import Exit, Problem, ProblemsError
from meshkit.kernel_cache import CacheFileError, pack, unpack


@command()
@click.argument("model", required=False)
@click.option(
    "--cache-dir",
    default="",
    metavar="DIR",
    help="Folder of kernel caches (default: DEEPGEMM_CACHE_DIR, else the user's).",
)
@click.option("--slots", default=64, type=click.IntRange(1, 4096), help="Requests that run at once when served.")
@click.option("--step-tokens", default=8192, type=click.IntRange(16), help="Most tokens in one step when served.")
@click.option("--context", default=0, type=click.IntRange(0), help="Longest context when served; 0 = the model's.")
@click.option(
    "--kernel",
    default="",
    metavar="OP=BACKEND,...",
    help="Backends as the worker will pin them; see doctor --kernels.",
)
@click.option("--deterministic", is_flag=True, help="Compile the kernels of deterministic mode too.")
@click.option("--tune", is_flag=True, help="Then time on this GPU what can be chosen, and keep what wins.")
@click.option("--pack", "packed", metavar="FILE", help="Afterwards write the cache to this .tar.gz.")
@click.option("--unpack", "archive", metavar="FILE", help="Take the cache from such a file; compile nothing.")
@click.option("--check", is_flag=True, help="Only say whether the cache covers this machine and model, and is tuned.")
@shared_options
@click.pass_obj
def precache(
    screen: Screen,
    /,
    *,
    model: str | None,
    cache_dir: str,
    slots: int,
    step_tokens: int,
    context: int,
    kernel: str,
    deterministic: bool,
    tune: bool,
    packed: str | None,
    archive: str | None,
    check: bool,
) -> int:
    """Compile the GPU kernels of MODEL for this machine. Exit 9 if the cache does not cover it afterwards."""
    if archive and (packed or check or tune):
        raise click.UsageError("--unpack stands alone")
    if check and tune:
        raise click.UsageError("--check compiles and tunes nothing")
    folders = folders_of_caches(environment())
    cache_dir = cache_dir or folders.get("kernel_cache", "")
    line = ["--model", str(find_model(model)), "--slots", str(slots), "--step-tokens", str(step_tokens)]
    line += ["--context", str(context), *(["--cache", cache_dir] if cache_dir else [])]
    line += ["--autotune-cache", folders["autotune_cache"]] if "autotune_cache" in folders else []
    line += ["--kernel", kernel] if kernel else []
    line += [*["--deterministic"] * deterministic, *["--tune"] * tune]
    found, status = _worker([*line, "--where"] if archive or check else line)
    root = Path(found["root"])
    try:
        if archive:
            screen.note(f"{unpack(Path(archive), root)} files unpacked to {root}")
            found, status = _worker([*line, "--where"])
        if packed:
            screen.note(f"{pack(root, Path(packed))} files packed to {packed}")
    except (CacheFileError, OSError) as error:
        raise ProblemsError(Problem("CACHE", Exit.CONFIG, str(error))) from error
    if screen.as_json:
        screen.result(json.dumps({"schema_version": 1, "exit": status, **found}))
        return status
    for name in ("seconds", "compiled", "kernels"):
        if name in found:
            screen.result(f"{name:10} {found[name]}")
    for choice in found.get("choices", ()):
        screen.result(choice)
    screen.result(f"{'cache':10} {root}")
    if "tuned" in found:
        screen.result(f"{'tuned':10} {found['tuned']}")
    screen.result(f"{'verdict':10} {found.get('problem') or 'covers this machine and model'}")
    return status


def _worker(line: list[str]) -> tuple[dict[str, Any], int]:
    """The worker's answer and exit status; its log goes to our stderr. Raises what it refused with."""
    done = subprocess.run([sys.executable, "-m", "worker_svc.precache", *line], stdout=subprocess.PIPE, text=True)
    if done.returncode in (0, int(Exit.THRESHOLD)):
        try:
            found = json.loads(done.stdout.splitlines()[-1])
        except (ValueError, IndexError):
            found = None
        if isinstance(found, dict) and "root" in found:
            return found, done.returncode
    status = Exit(done.returncode) if done.returncode in set(Exit) and done.returncode else Exit.BUG
    raise ProblemsError(Problem("PRECACHE", status, "the worker could not compile; its own lines say why"))
