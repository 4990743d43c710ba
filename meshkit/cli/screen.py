"""Where the command line writes: results on stdout, progress and errors on stderr, colours only where they belong.

Colour goes to a terminal only, and not when NO_COLOR is set or TERM is "dumb"; CLICOLOR_FORCE forces it. Holds what
the options shared by all commands said. Knows no command.
"""

import sys
from collections.abc import Callable
from typing import Any, TextIO, TypeVar

import click

from meshkit.exit_codes import Problem

STYLES = {"red": "31", "green": "32", "yellow": "33", "cyan": "36", "bold": "1", "dim": "2"}

_F = TypeVar("_F", bound=Callable[..., Any])


class Screen:
    """One per process; the click context carries it as `obj`."""

    def __init__(self) -> None:
        self.verbose = False
        self.as_json = False
        self.config_file: str | None = None
        self.no_color = False

    def configure(
        self, *, verbose: bool = False, as_json: bool = False, no_color: bool = False, config_file: str | None = None
    ) -> None:
        """Take over what options said; what was said earlier on the line stays."""
        self.verbose |= verbose
        self.as_json |= as_json
        self.no_color |= no_color
        self.config_file = config_file or self.config_file

    def colors(self, stream: TextIO) -> bool:
        """True if escape codes may go to this stream."""
        from meshkit.config import environment  # not for --help

        env = environment()
        if self.no_color or env.get("NO_COLOR"):
            return False
        if env.get("CLICOLOR_FORCE", "0") not in ("", "0"):
            return True
        return stream.isatty() and env.get("TERM") != "dumb"

    def paint(self, text: str, style: str, stream: TextIO | None = None) -> str:
        """`text` in a style of STYLES, or plain where colours do not belong."""
        if not text or not self.colors(stream or sys.stderr):
            return text
        return f"\x1b[{STYLES[style]}m{text}\x1b[0m"

    def note(self, text: str) -> None:
        """Progress or a remark: stderr."""
        print(text, file=sys.stderr, flush=True)

    def result(self, text: str) -> None:
        """What the command was asked for: stdout."""
        print(text, flush=True)

    def problem(self, problem: Problem) -> None:
        """A code, a fact and a fix."""
        head, *rest = problem.lines()
        self.note(self.paint(head, "red"))
        for line in rest:
            self.note(line)


def shared_options(command: _F) -> _F:
    """Let -v, --json and --no-color stand after the command's name as well as before it."""

    def keep(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        screen = ctx.ensure_object(Screen)
        setattr(screen, str(param.name), value or getattr(screen, str(param.name)))

    options = (
        (("-v", "--verbose"), "verbose", "Tracebacks, more progress."),
        (("--json",), "as_json", "Results and errors as JSON."),
        (("--no-color",), "no_color", "No colours."),
    )
    for flags, name, text in options:
        command = click.option(
            *flags, name, is_flag=True, expose_value=False, callback=keep, help=text, hidden=name != "as_json"
        )(command)
    return command
