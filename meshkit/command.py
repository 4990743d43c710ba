"""The command line of a service: one flag per field of its config section, and one way to end.

`main(argv)` of every service returns an exit status and never raises: usage mistakes are 2, refusals have the code of
their error and its status, Ctrl-C is 130, anything else is a bug (1, with its traceback). Imports click, not grpc.
"""

import dataclasses
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from meshkit.config import Loaded, env, load
from meshkit.errors import StartError
from meshkit.exit_codes import Exit

C = TypeVar("C")


def option(default: Any, text: str) -> Any:
    """A config field with its default and the help text of its flag. Any: dataclasses type `field` so as well."""
    return dataclasses.field(default=default, metadata={"help": text})


def service_main(
    section_cls: type[C], section: str, run: Callable[[Loaded[C]], int], argv: Sequence[str] | None = None
) -> int:
    """Parse flags, load the section, run the service; returns its exit status."""
    command = _command(section_cls, section, run)
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        return int(command.main(args=args, prog_name=f"v4mesh {section}", standalone_mode=False) or 0)
    except click.UsageError as error:
        error.show(sys.stderr)
        return int(Exit.USAGE)
    except (KeyboardInterrupt, click.Abort):
        return int(Exit.INTERRUPTED)
    except Exception as error:  # noqa: BLE001 - the outermost frame of a process
        return _report(error)


def _command(section_cls: type[C], section: str, run: Callable[[Loaded[C]], int]) -> click.Command:
    names = [field.name for field in dataclasses.fields(section_cls)]  # type: ignore[arg-type]  # C is a dataclass

    def body(config: str | None, **given: Any) -> int:
        return run(load(section_cls, section, file=config or env("V4MESH_CONFIG") or None, flags=given))

    params: list[click.Parameter] = [click.Option(["--config"], metavar="FILE", help="TOML file, section per service.")]
    params += [_flag(field) for field in dataclasses.fields(section_cls)]  # type: ignore[arg-type]
    assert "config" not in names
    text = (section_cls.__doc__ or "").strip()
    return click.Command(section, callback=body, params=params, help=text)


def _flag(field: "dataclasses.Field[Any]") -> click.Option:
    name = field.name.replace("_", "-")
    shown = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
    default = "" if shown in (dataclasses.MISSING, None, "") else f" (default {shown})"
    text = f"{field.metadata.get('help', '')}{default}"
    if field.type is bool or isinstance(field.default, bool):
        return click.Option([f"--{name}/--no-{name}", field.name], default=None, help=text)
    return click.Option([f"--{name}", field.name], default=None, metavar="VALUE", help=text)


def _report(error: Exception) -> int:
    """Say on stderr what ended the process; the status that belongs to it."""
    code, status = getattr(error, "code", None), getattr(error, "exit_code", None)
    if isinstance(code, str) and isinstance(status, int) and (isinstance(error, StartError) or status > 1):
        sys.stderr.write(f"{code}  {error}\n")
        return status
    traceback.print_exception(error)
    sys.stderr.write("this is a bug; please report the lines above\n")
    return int(Exit.BUG)
