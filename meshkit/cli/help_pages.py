"""`--help` in three sizes: the common options, `--help all`, and `--help WORD`, which searches.

An option that click hides is one of the rarer ones here: out of the first page, found by the other two. The root
searches all commands; only then are they imported.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click

MOST_OPTIONS = 20  # what the first page shows at most
ALL = "all"
Record = tuple[str, str]  # an option as a help page shows it: its names, its text


class HelpPages(click.Command):
    """A command whose `--help` takes an optional topic."""

    _help_topic: click.Option | None = None  # made once: click tells parameters apart by identity

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """The `--help [all|WORD]` option; None where the names are taken or there is to be none."""
        names = self.get_help_option_names(ctx)
        if not names or not self.add_help_option:
            return None
        if self._help_topic is None:
            self._help_topic = click.Option(
                [*names, "_help_topic"],
                is_flag=False,
                flag_value="",
                is_eager=True,
                expose_value=False,
                metavar="[all|WORD]",
                callback=self._show,
                help="This page; all options; those about WORD.",
            )
        return self._help_topic

    def _show(self, ctx: click.Context, param: click.Parameter, topic: str | None) -> None:
        if topic is None or ctx.resilient_parsing:
            return
        click.echo(self.page(ctx, topic))
        ctx.exit()

    def page(self, ctx: click.Context, topic: str) -> str:
        """The text for a topic; "" is the first page."""
        if not topic:
            return ctx.get_help()
        found = [record for record in option_records(self, ctx) if topic == ALL or about(record, topic)]
        if not found:
            raise click.UsageError(f"{ctx.command_path} has no option about {topic!r}; --help all shows every one", ctx)
        formatter = ctx.make_formatter()
        if topic == ALL:
            self.format_usage(ctx, formatter)
            self.format_help_text(ctx, formatter)
        with formatter.section("Options"):
            formatter.write_dl(found)
        return formatter.getvalue().rstrip()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As click does, and how many more there are."""
        super().format_options(ctx, formatter)
        rare = sum(isinstance(p, click.Option) and p.hidden for p in self.get_params(ctx))
        if rare:
            formatter.write_paragraph()
            formatter.write_text(f"{rare} more: --help all; --help WORD searches.")


class PagedGroup(HelpPages, click.Group):
    """A group of such commands."""

    command_class = HelpPages


def command(name: str | None = None, **settings: Any) -> Callable[[Callable[..., Any]], HelpPages]:
    """`click.command` with these help pages."""
    return click.command(name, cls=HelpPages, **settings)


def option_records(of: click.Command, ctx: click.Context) -> Iterator[Record]:
    """Every option, also the hidden ones, in the order of the command."""
    for param in of.get_params(ctx):
        if not isinstance(param, click.Option):
            continue
        hidden, param.hidden = param.hidden, False
        try:
            record = param.get_help_record(ctx)
        finally:
            param.hidden = hidden
        if record is not None:
            yield record


def about(record: Record, word: str) -> bool:
    """Does an option's name or text hold the word?"""
    wanted = word.lower().replace("_", "-")
    return any(wanted in text.lower() for text in record)


def search(commands: Sequence[tuple[str, str, click.Command | None]], ctx: click.Context, topic: str) -> str:
    """All commands' options about a topic (`all`: every one), under the command's name; (name, line, command) each."""
    formatter = ctx.make_formatter()
    for name, line, found in commands:
        records: list[Record] = []
        if found is not None and found.add_help_option:
            inner = click.Context(found, info_name=name, parent=ctx)
            records = [r for r in option_records(found, inner) if topic == ALL or about(r, topic)]
        if records or topic == ALL or about((name, line), topic):
            with formatter.section(f"v4mesh {name}"):
                formatter.write_text(line)
                if records:
                    formatter.write_dl(records)
    text = formatter.getvalue().strip()
    if not text:
        raise click.UsageError(f"no command and no option is about {topic!r}; --help lists the commands", ctx)
    return text
