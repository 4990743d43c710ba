"""`v4mesh serve`: the operators' guide's launch command as written, after replacing the program's name.

Every flag and variable of `flag_table` is parsed; each has its effect or is answered with one line that names the part
it needs. Impossible values and layouts are refused together, before anything starts. The rest is `up`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import click

from meshkit.cli.config_file import check_config, config_path
from meshkit.cli.flag_table import FLAGS, Answer, check_layout, read_flags, read_variables
from meshkit.cli.help_pages import command
from meshkit.cli.mesh import MeshPlan, run_mesh
from meshkit.cli.preflight import check_api_keys, check_scheme, read_model_config
from meshkit.cli.screen import Screen, shared_options
from meshkit.cli.up import UpConfig, banner, plan_or_refuse, print_commands, warn_if_open
from meshkit.config import environment, load
from meshkit.exit_codes import Exit, Problem, ProblemsError

GRAMMAR = {"xgrammar": "on", "none": "off"}
UP_FIELDS = ("host", "port", "kv_cache_dtype", "quantization")  # flags of the guide that `up` has too


def guide_options(wanted: Callable[..., Any]) -> Callable[..., Any]:
    """One click option per flag of the table; values stay text, so that one place judges them."""
    for entry in reversed(FLAGS):
        names = (entry.name, *entry.aliases, entry.field)
        waits = bool(entry.needs)  # help shows first what has its effect
        text = f"{entry.promise} (waits for {entry.needs})" if waits else entry.promise
        wanted = click.option(*names, is_flag=entry.switch, default=None, help=text, hidden=waits)(wanted)
    return wanted


@command()
@click.argument("model", required=False)
@guide_options
@click.option("--served-model-name", metavar="NAME", help="The name clients use.")
@click.option("--device", help="Where the worker computes: cpu (default), cuda, or auto.")
@click.option("--kernel", metavar="OP=BACKEND,...", hidden=True, help="Pinned GPU backends; see doctor --kernels.")
@click.option("--deterministic/--no-deterministic", default=None, help="Bit-equal results in any batch; slower.")
@click.option("--api-key-file", metavar="FILE", help="Lines `key` or `tenant key`; without it everybody may call.")
@click.option("--run-dir", metavar="DIR", help="Folder for sockets (default: a private one, removed at the end).")
@click.option("--launcher", type=click.Choice(["local", "print"]), default="local", help="print: only the commands.")
@click.option("--quiet", is_flag=True, help="Only changes of state, not the services' logs.")
@shared_options
@click.pass_obj
def serve(screen: Screen, /, *, model: str | None, launcher: str, quiet: bool, **given: str | bool | None) -> int:
    """Start a mesh with the flags and environment variables of the operators' guide."""
    answers, problems = understand(given, environment())
    file = config_path(screen)
    values = {a.entry.field: a.value for a in answers if a.entry in FLAGS}
    flags = {k: given[k] for k in ("served_model_name", "device", "kernel", "deterministic", "api_key_file", "run_dir")}
    flags |= {k: values.get(k) for k in UP_FIELDS}
    flags["grammar"] = GRAMMAR.get(values.get("grammar_backend", ""))
    config = load(UpConfig, "up", file=file, flags={"model": model or values.get("model_path"), **flags}).value
    problems += check_config(file)
    plan = plan_or_refuse(config, file, problems)
    plan = replace(
        plan,
        scheduler_flags=(*plan.scheduler_flags, *scheduler_flags(answers)),
        grammar_flags=(*plan.grammar_flags, *grammar_flags(values)),
        worker_flags=(*plan.worker_flags, *worker_flags(answers)),
    )
    problems += check_scheme(plan.model, config.quantization)
    problems += check_compiled(compiled=bool(values.get("enable_torch_compile")), config=config)
    if problems and launcher == "print":
        raise ProblemsError(problems)
    for line in remarks(answers, plan):
        screen.note(line)
    if launcher == "print":
        print_commands(screen, plan)
        return int(Exit.OK)
    problems += check_api_keys(config.api_key_file)
    warn_if_open(screen, config)
    return run_mesh(plan, screen, problems=tuple(problems), show_log=not quiet, on_ready=banner(screen))


def check_compiled(*, compiled: bool, config: UpConfig) -> list[Problem]:
    """What a CPU worker would refuse as well, before anything starts."""
    if not compiled or not config.deterministic or config.device != "cpu" or config.backend == "sim":
        return []
    fact = "--enable-torch-compile with --deterministic: compiled code rounds by the size of the batch"
    return [Problem("FLAG", Exit.CONFIG, fact, "leave one of the two out")]


def scheduler_flags(answers: list[Answer]) -> tuple[str, ...]:
    """The scheduler's options that were asked for under the guide's names and have their effect."""
    flags: list[str] = []
    for found in answers:
        section, _, key = found.entry.ours.partition(".")
        if section == "scheduler" and found.status == "applied":
            flags += [f"--{key.replace('_', '-')}", str(found.value)]
    return tuple(flags)


def worker_flags(answers: list[Answer]) -> tuple[str, ...]:
    """The worker's options that were asked for under the guide's names and change something; `up` has some itself."""
    flags: list[str] = []
    for found in answers:
        section, _, key = found.entry.ours.partition(".")
        if section != "worker" or found.entry.field in UP_FIELDS or found.status != "applied":
            continue
        if found.value in found.entry.quiet:
            continue
        name = key.replace("_", "-")
        if isinstance(found.value, bool):
            flags.append(f"--{name}" if found.value else f"--no-{name}")
        else:
            flags += [f"--{name}", str(found.value)]
    return tuple(flags)


def grammar_flags(values: Mapping[str, Any]) -> tuple[str, ...]:
    """The grammar service's options that were asked for under the guide's names."""
    return ("--json-whitespace", "0") if values.get("constrained_json_disable_any_whitespace") else ()


def understand(
    flags: Mapping[str, str | bool | None], environ: Mapping[str, str]
) -> tuple[list[Answer], list[Problem]]:
    """What was asked for by flags and variables, and everything that is refused."""
    answers, problems = read_flags(flags)
    more, bad = read_variables(environ)
    values = {a.entry.field: a.value for a in answers}
    return answers + more, problems + bad + check_layout(values)


def remarks(answers: list[Answer], plan: MeshPlan) -> list[str]:
    """One line per flag or variable that was given: what it did, or what it waits for."""
    lines = []
    groups = read_model_config(plan.model).get("o_groups")
    for found in answers:
        line = found.line
        if found.entry.name == "--tp" and isinstance(groups, int) and found.value > groups:
            line += f" (and {plan.name} allows at most {groups}: its o_groups)"
        lines.append(line)
    return lines
