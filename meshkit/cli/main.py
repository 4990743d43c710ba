"""The root of `v4mesh`: the list of commands, the options all of them share, and how errors end a process.

Command modules load when their command runs, so `--help` imports click and nothing heavier: no torch, grpc or rich.
Errors become a code, a fact and a fix on stderr, or one JSON object with `--json`; a traceback comes only with `-v`.
"""

import importlib
import json
import os
import sys
import traceback
from collections.abc import Sequence

import click
from click.shell_completion import CompletionItem

from meshkit import __doc__ as _about
from meshkit.cli.help_pages import PagedGroup, search
from meshkit.cli.screen import Screen
from meshkit.exit_codes import Exit, Problem, ProblemsError

assert _about

# name -> (module:attribute, the line `--help` shows). The text stands here so that help loads no command.
COMMANDS = {
    "up": ("meshkit.cli.up:up", "Start all services here, supervised; no model named: the shipped demo model."),
    "serve": ("meshkit.cli.serve:serve", "Start with the flags of the operators' guide (SGLang and vLLM names)."),
    "restart": ("meshkit.cli.restart:restart", "Restart a running mesh's services in turn; requests go on."),
    "chat": ("meshkit.cli.chat:chat", "Talk to a running mesh."),
    "top": ("meshkit.cli.top:top", "Watch a running mesh: load, speed, memory, latencies, errors."),
    "explain": ("meshkit.cli.explain:explain", "Say why a prompt is served from the prefix cache as far as it is."),
    "bench": ("meshkit.cli.bench:bench", "Load a running mesh and measure it."),
    "doctor": ("meshkit.cli.doctor:doctor", "Check this machine: what works, what does not, what to do."),
    "plan": ("meshkit.cli.plan:plan_command", "GPU memory of a model, line by line, before anything is loaded."),
    "precache": (
        "meshkit.cli.precache:precache",
        "Compile a model's GPU kernels ahead; pack, unpack them.",
    ),
    "config": ("meshkit.cli.config_cmd:config", "Show, check and describe the configuration."),
    "health": ("meshkit.cli.health:health", "Ask one service if it is ready (exit 0 or 1), for health checks."),
    "demo": ("meshkit.cli.demo:demo", "Start a mesh, stream one answer, stop, say how to go on."),
    "completion": ("meshkit.cli.completion:completion", "Print the completion script of bash, zsh or fish."),
    "gateway": ("meshkit.cli.services:gateway", "Run the HTTP gateway alone."),
    "scheduler": ("meshkit.cli.services:scheduler", "Run the scheduler alone."),
    "worker": ("meshkit.cli.services:worker", "Run a worker alone."),
    "cache": ("meshkit.cli.services:cache", "Run the cache service alone."),
    "grammar": ("meshkit.cli.services:grammar", "Run the grammar service alone."),
}


class LazyGroup(PagedGroup):
    """A group that knows its commands by name and imports one when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of COMMANDS: what people need first stands first."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command; unknown names give None."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Name and line of each command, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line_of(name)) for name in COMMANDS])

    def page(self, ctx: click.Context, topic: str) -> str:
        """`--help COMMAND` is that command's help; other words are searched for in all commands."""
        if not topic:
            return ctx.get_help()
        if topic in COMMANDS:
            found = self.get_command(ctx, topic)
            assert found is not None, topic
            return found.get_help(click.Context(found, info_name=topic, parent=ctx))
        return search([(name, line_of(name), self.get_command(ctx, name)) for name in COMMANDS], ctx, topic)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Commands by name, imported by nobody, then the root's own options."""
        names = [CompletionItem(name, help=line_of(name)) for name in COMMANDS if name.startswith(incomplete)]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with the nearest command named when there is none."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else " `v4mesh --help` lists them."
            raise click.UsageError(f"no command named {args[0]!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)


def line_of(name: str) -> str:
    """A command's line of help; a service that this version does not hold is marked."""
    from meshkit.cli.services import PACKAGES, is_there

    built = name not in PACKAGES or is_there(name)
    return COMMANDS[name][1] if built else f"(not built yet) {COMMANDS[name][1]}"


def normalize(token: str) -> str:
    """Kebab-case flags, with underscores accepted (click passes a flag without its dashes)."""
    return token.replace("_", "-")


@click.command(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": normalize},
    help="Serve a DeepSeek-V4 model: gateway, scheduler and worker as small services.\n\n"
    "New here? `v4mesh up`, then `v4mesh chat` in another terminal.",
)
@click.option("--config", "config_file", metavar="FILE", help="TOML file, a section per service (default v4mesh.toml).")
@click.option("-v", "--verbose", is_flag=True, help="Tracebacks, more progress.")
@click.option("--json", "as_json", is_flag=True, help="Results and errors as JSON.")
@click.option("--no-color", is_flag=True, help="No colours (NO_COLOR and TERM=dumb do the same).")
@click.version_option(package_name="v4mesh", prog_name="v4mesh")
@click.pass_context
def root(ctx: click.Context, config_file: str | None, verbose: bool, as_json: bool, no_color: bool) -> None:
    screen = ctx.ensure_object(Screen)
    screen.configure(verbose=verbose, as_json=as_json, no_color=no_color, config_file=config_file)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns its exit status and never raises."""
    args = list(sys.argv[1:] if argv is None else argv)
    screen = Screen()
    try:
        result = root.main(args=args, prog_name="v4mesh", standalone_mode=False, obj=screen)
        return int(result) if isinstance(result, int) else int(Exit.OK)
    except click.UsageError as e:
        return _report_usage(screen, e)
    except click.ClickException as e:
        return _report(screen, [Problem("USAGE", Exit.USAGE, e.format_message())])
    except (click.Abort, KeyboardInterrupt):
        return int(Exit.INTERRUPTED)
    except ProblemsError as e:
        return _report(screen, e.problems)
    except BrokenPipeError:
        # The reader of our output went away (`| head`); Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(Exit.OK)
    except Exception as e:  # noqa: BLE001 - the last line of defence of a process: say it, end with 1
        return _report_exception(screen, e)


def _report_usage(screen: Screen, error: click.UsageError) -> int:
    command = error.ctx.command_path if error.ctx else "v4mesh"
    return _report(screen, [Problem("USAGE", Exit.USAGE, error.format_message(), f"see: {command} --help")])


def _report_exception(screen: Screen, error: Exception) -> int:
    from meshkit.errors import MeshError

    if screen.verbose:
        traceback.print_exc()
    if isinstance(error, MeshError) and error.exit_code != Exit.BUG:
        return _report(screen, [Problem(error.code, Exit(error.exit_code), error.message)])
    fix = "" if screen.verbose else "this is a bug; run again with -v before the command for the traceback"
    return _report(screen, [Problem("BUG", Exit.BUG, f"{type(error).__name__}: {error}", fix)])


def _report(screen: Screen, problems: Sequence[Problem]) -> int:
    if screen.as_json:
        print(json.dumps({"schema_version": 1, "errors": [p.as_json() for p in problems]}))
    else:
        for problem in problems:
            screen.problem(problem)
    return int(problems[0].exit)


if __name__ == "__main__":
    sys.exit(main())
