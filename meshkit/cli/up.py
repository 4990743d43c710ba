"""`v4mesh up`: all services of a mesh on this machine, supervised, until Ctrl-C.

Settings come from the [up] section of the config file, V4MESH_UP_..., and flags; the services read their own sections.
"""

import ipaddress
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click

from meshkit.cli.clients import client_snippets
from meshkit.cli.config_file import check_config, config_path
from meshkit.cli.help_pages import command
from meshkit.cli.mesh import DEFAULT_PORT, MeshPlan, run_mesh
from meshkit.cli.model_folder import find_model
from meshkit.cli.preflight import check_api_keys, check_port, check_scheme, has_compiler
from meshkit.cli.screen import Screen, shared_options
from meshkit.config import FieldError, load
from meshkit.exit_codes import Exit, Problem, ProblemsError
from meshkit.models import served_name
from meshkit.numerics_names import KV_DTYPES, SCHEMES


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig:
    """Section [up]."""

    model: str = ""  # folder or hub id; empty: the shipped demo model
    served_model_name: str = ""
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT  # 0: a free one
    grpc_port: int = 0  # of the public gRPC service; 0: none
    gateway_processes: int = 1  # that share the port
    backend: str = "model"  # sim: no model is run, answers come from a hash in the time a GPU would take
    device: str = "cpu"
    kernel: str = ""  # pinned GPU backends, op=backend with commas between
    quantization: str = ""
    kv_cache_dtype: str = ""
    deterministic: bool = False
    standby: bool = False  # a second scheduler stands by: a crash of the first one costs less
    grammar: str = "auto"  # constrained output: on, off, or auto: on where the compiler is installed
    api_key_file: str = ""  # empty: everybody may call
    run_dir: str = ""  # folder for sockets; empty: a private one, removed at the end

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise FieldError("port", "must be 0 (a free one) to 65535")
        if not 0 <= self.grpc_port <= 65535 or self.grpc_port == self.port != 0:
            raise FieldError("grpc_port", "must be 0 (no gRPC) to 65535, and not the HTTP port")
        if not 1 <= self.gateway_processes <= 64:
            raise FieldError("gateway_processes", "must be 1 to 64")
        if self.backend not in ("model", "sim"):
            raise FieldError("backend", "must be model or sim")
        if self.grammar not in ("auto", "on", "off"):
            raise FieldError("grammar", "must be auto, on or off")
        if self.device not in ("cpu", "cuda", "auto"):
            raise FieldError("device", "must be cpu, cuda or auto (the GPU if there is one)")
        for name, there in (("kv_cache_dtype", KV_DTYPES), ("quantization", SCHEMES)):
            if (given := getattr(self, name)) and given.lower() not in there:
                raise FieldError(name, f"must be one of {', '.join(there)}")


@command()
@click.argument("model", required=False)
@click.option("--model-path", "--model", "model_path", metavar="DIR", help="Same as MODEL.")
@click.option("--served-model-name", metavar="NAME", help="The name clients use.")
@click.option("--host", help="Address to listen on (default 127.0.0.1); 0.0.0.0 for all.")
@click.option("--port", type=int, help=f"Default {DEFAULT_PORT}; 0: a free one.")
@click.option("--grpc-port", type=int, help="Port of the public gRPC service (default none).")
@click.option("--gateway-processes", type=int, metavar="N", help="Gateways that share the port (default 1).")
@click.option("--backend", type=click.Choice(["model", "sim"]), help="sim: no model, the time a GPU would take.")
@click.option("--device", help="Where the worker computes: cpu (default), cuda, or auto.")
@click.option("--kernel", metavar="OP=BACKEND,...", hidden=True, help="Pinned GPU backends; see doctor --kernels.")
@click.option("--quantization", metavar="SCHEME", help="Weight scheme; native formats are found without it.")
@click.option("--kv-cache-dtype", metavar="FORMAT", help="Format of the KV cache.")
@click.option("--deterministic/--no-deterministic", default=None, help="Bit-equal results in any batch; slower.")
@click.option("--standby/--no-standby", default=None, help="Keep a second scheduler warm, for when the first one dies.")
@click.option("--grammar", type=click.Choice(["auto", "on", "off"]), help="Constrained output (auto: if installed).")
@click.option("--api-key-file", metavar="FILE", help="Lines `key` or `tenant key`; without it everybody may call.")
@click.option("--run-dir", metavar="DIR", help="Folder for sockets (default: a private one, removed at the end).")
@click.option("--launcher", type=click.Choice(["local", "print"]), default="local", help="print: only the commands.")
@click.option("--print-clients", is_flag=True, help="Print curl and Python lines for this address, start nothing.")
@click.option("--quiet", is_flag=True, help="Only changes of state, not the services' logs.")
@shared_options
@click.pass_obj
def up(
    screen: Screen,
    /,
    *,
    model: str | None,
    model_path: str | None,
    launcher: str,
    print_clients: bool,
    quiet: bool,
    **flags: str | int | bool | None,
) -> int:
    """Start gateway, scheduler, worker and grammar service here. MODEL is a folder or a hub id found in local caches;
    without it, the shipped demo model runs on the CPU."""
    file = config_path(screen)
    config = load(UpConfig, "up", file=file, flags={"model": model or model_path, **flags}).value
    problems = check_config(file)
    plan = plan_or_refuse(config, file, problems)
    if print_clients:
        screen.result(client_snippets(plan.url, plan.name))
        return int(Exit.OK)
    problems += check_scheme(plan.model, config.quantization)
    if launcher == "print":
        if problems:
            raise ProblemsError(problems)
        print_commands(screen, plan)
        return int(Exit.OK)
    problems += check_api_keys(config.api_key_file)
    warn_if_open(screen, config)
    return run_mesh(plan, screen, problems=tuple(problems), show_log=not quiet, on_ready=banner(screen))


def plan_or_refuse(config: UpConfig, file: Path | None, problems: list[Problem]) -> MeshPlan:
    """The plan; where there can be none, everything else that is wrong is reported with it."""
    try:
        return make_plan(config, file)
    except ProblemsError as e:
        taken = [it for port in (config.port, config.grpc_port) if port for it in check_port(config.host, port)]
        raise ProblemsError([*problems, *e.problems, *taken]) from e


def make_plan(config: UpConfig, file: Path | None) -> MeshPlan:
    """The mesh that a configuration means; raises ProblemsError where the model is not on this machine."""
    folder = find_model(config.model)
    shared = ("--config", str(file)) if file else ()
    hub_id = config.model if folder.parent.name == "snapshots" else ""  # there the folder's name is a revision
    name = config.served_model_name or hub_id or served_name(folder)
    gateway = ["--served-model-name", name]
    gateway += ["--drain-seconds", "1.5"]  # Ctrl-C at a terminal: running answers get a moment, not half a minute
    if config.grpc_port:
        host = f"[{config.host}]" if ":" in config.host else config.host
        gateway += ["--listen-grpc", f"{host}:{config.grpc_port}"]
    if config.api_key_file:
        gateway += ["--api-key-file", config.api_key_file]
    elif not is_loopback(config.host):
        gateway += ["--insecure"]  # asked for by naming an address beyond loopback; `warn_if_open` says what it means
    worker = ["--served-model-name", name, "--device", config.device]
    if config.backend == "sim":
        worker += ["--backend", "sim"]
    if config.kernel:
        worker += ["--kernel", config.kernel]
    if config.quantization:
        worker += ["--quantization", config.quantization]
    if config.kv_cache_dtype:
        worker += ["--kv-cache-dtype", config.kv_cache_dtype]
    if config.deterministic:
        worker += ["--deterministic"]
    return MeshPlan(
        model=folder,
        name=name,
        host=config.host,
        port=config.port,
        run_dir=config.run_dir or None,
        gateway_flags=(*shared, *gateway),
        gateways=config.gateway_processes,
        scheduler_flags=shared,
        standby=config.standby,
        worker_flags=(*shared, *worker),
        grammar=config.grammar == "on" or (config.grammar == "auto" and has_compiler()),
        grammar_flags=(*shared, "--drain-s", "0.5"),
    )


def is_loopback(host: str) -> bool:
    """True for addresses that only this machine reaches."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def warn_if_open(screen: Screen, config: UpConfig) -> None:
    """One line where everybody who reaches the port may use the model."""
    if not config.api_key_file and not is_loopback(config.host):
        text = (
            f"--host {config.host} without --api-key-file: everybody who reaches port {config.port} can use the model"
        )
        screen.note(screen.paint(text, "yellow"))


def print_commands(screen: Screen, plan: MeshPlan) -> None:
    """The lines `up` would run, for a person to run."""
    for line in plan.command_lines(Path(plan.run_dir or "/run/v4mesh")).values():
        screen.result(shlex.join(("v4mesh", *line)))


def banner(screen: Screen) -> Callable[[MeshPlan, float], None]:
    """Says that it runs, where, and what to type next."""

    def say(plan: MeshPlan, seconds: float) -> None:
        chat = "v4mesh chat" + ("" if plan.url == f"http://127.0.0.1:{DEFAULT_PORT}" else f" --url {plan.url}")
        line = f"ready in {seconds:.1f} s · {plan.url} · model {plan.name} · next: {chat}"
        screen.note(screen.paint(line, "bold"))

    return say
