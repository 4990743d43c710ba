"""`v4mesh gateway|scheduler|worker|cache|grammar`: one service in this process, with the service's own flags.

The service is found by name when its command runs, so this package imports none; a service whose extra is not
installed, or that does not exist yet, is said so.
"""

import importlib
import importlib.util
import sys

import click

from meshkit.exit_codes import Exit, Problem, ProblemsError

PACKAGES = {
    "gateway": "gateway",
    "scheduler": "scheduler_svc",
    "worker": "worker_svc",
    "cache": "cache_svc",
    "grammar": "grammar_svc",
}


def is_there(name: str) -> bool:
    """Does this installation hold the service?"""
    package = PACKAGES[name]
    return importlib.util.find_spec(package) is not None and importlib.util.find_spec(f"{package}.__main__") is not None


def run_service(name: str, args: tuple[str, ...]) -> int:
    """Hand over to the service's own main; returns its exit status."""
    module = f"{PACKAGES[name]}.__main__"
    if not is_there(name):
        raise ProblemsError(Problem("SERVICE", Exit.USAGE, f"the {name} service is not part of this version yet"))
    try:
        main = importlib.import_module(module).main
    except ModuleNotFoundError as e:
        fact = f"the {name} service needs the package {e.name!r}, which is not installed"
        raise ProblemsError(Problem("EXTRA", Exit.USAGE, fact, f'pip install "v4mesh[{name}]"')) from e
    sys.argv = [f"v4mesh {name}", *args]
    return int(main(list(args)) or 0)


def _command(name: str) -> click.Command:
    @click.command(
        name,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "token_normalize_func": None},
        add_help_option=False,
    )
    @click.argument("args", nargs=-1, type=click.UNPROCESSED)
    def command(args: tuple[str, ...]) -> int:
        return run_service(name, args)

    return command


gateway = _command("gateway")
scheduler = _command("scheduler")
worker = _command("worker")
cache = _command("cache")
grammar = _command("grammar")
