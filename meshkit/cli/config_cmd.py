"""`v4mesh config show|check|schema`: the effective values with their source, whether they are valid, what there is."""

import json
from typing import Any

import click

from meshkit.cli.config_file import SECTION_CLASSES, check_config, config_path, load_section, section_class
from meshkit.cli.help_pages import PagedGroup
from meshkit.cli.screen import Screen, shared_options
from meshkit.exit_codes import Exit, ProblemsError


@click.group(cls=PagedGroup)
def config() -> None:
    """Show, check and describe the configuration."""


@config.command()
@click.option("--section", type=click.Choice(list(SECTION_CLASSES)), help="Only this section.")
@click.option("--diff-default", is_flag=True, help="Only values that are not the default.")
@shared_options
@click.pass_obj
def show(screen: Screen, *, section: str | None, diff_default: bool) -> int:
    """Every value that is in force, and where it comes from: default, file:line or environment."""
    file = config_path(screen)
    found: dict[str, list[tuple[str, Any, str]]] = {}
    for name in [section] if section else SECTION_CLASSES:
        loaded = load_section(name, file)
        if loaded is not None:
            found[name] = [row for row in loaded if not diff_default or row[2] != "default"]
    if screen.as_json:
        sections = {
            name: {key: {"value": plain(value), "source": source} for key, value, source in rows}
            for name, rows in found.items()
        }
        screen.result(json.dumps({"schema_version": 1, "file": str(file or ""), "sections": sections}))
        return int(Exit.OK)
    for name, rows in found.items():
        if not rows:
            continue
        screen.result(f"[{name}]")
        width = max(len(key) for key, _, _ in rows)
        for key, value, source in rows:
            screen.result(f"{key:{width}} = {json.dumps(plain(value), ensure_ascii=False):24}  # {source}")
    return int(Exit.OK)


@config.command()
@shared_options
@click.pass_obj
def check(screen: Screen) -> int:
    """Exit 0 if file and environment can be read, 3 with the wrong key or value, its place and the nearest name."""
    file = config_path(screen)
    if problems := check_config(file):
        raise ProblemsError(problems)
    screen.note(f"ok: {file or 'no file'}, environment")
    return int(Exit.OK)


@config.command()
@click.option("--section", type=click.Choice(list(SECTION_CLASSES)), help="Only this section.")
@click.pass_obj
def schema(screen: Screen, *, section: str | None) -> int:
    """JSON Schema of the config file, for editors."""
    from pathlib import Path

    import msgspec

    def hook(kind: type) -> dict[str, Any]:
        if issubclass(kind, Path):
            return {"type": "string"}
        raise NotImplementedError(kind)  # msgspec's own protocol for "not mine"

    classes = {n: c for n in SECTION_CLASSES if (c := section_class(n)) and section in (None, n)}
    refs, parts = msgspec.json.schema_components(classes.values(), schema_hook=hook, ref_template="#/$defs/{name}")
    for part in parts.values():
        part.pop("required", None)  # `up` gives what a section must have
        part["additionalProperties"] = False
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "additionalProperties": False,
        "properties": dict(zip(classes, refs, strict=True)),
        "$defs": parts,
    }
    screen.result(json.dumps(document, indent=2))
    return int(Exit.OK)


@config.command("hash-key")
@shared_options
@click.pass_obj
def hash_key(screen: Screen) -> int:
    """Read an API key from standard input and print what may stand for it in a key file; without one, make a key."""
    import secrets
    import sys

    from meshkit.api_keys import HASHED, SHORTEST_KEY, digest_of

    made = sys.stdin.isatty()
    key = f"sk-{secrets.token_urlsafe(32)}" if made else sys.stdin.read(4096).strip()
    if len(key) < SHORTEST_KEY or not key.isascii():
        raise click.UsageError(f"a key has {SHORTEST_KEY} or more ASCII characters")
    if made:
        screen.note(f"the key, shown once: {key}")
    screen.result(f"{HASHED}{digest_of(key).hex()}")
    return int(Exit.OK)


def plain(value: Any) -> Any:
    """A value as JSON can say it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [plain(v) for v in value]
    return str(value)
