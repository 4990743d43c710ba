"""The file of API keys: one parser for the gateway, which checks keys, and for the commands that send one.

One key per line, optionally `tenant key`; `#` starts a comment. Knows nothing of who may do what.
"""

from pathlib import Path

from meshkit.errors import ConfigError

SHORTEST_KEY = 8


def read_api_keys(path: Path) -> tuple[tuple[str, str], ...]:
    """(tenant, key) pairs in the file's order; a key without a tenant gets one named after its line.

    ConfigError names the file and the line; a file without any key is refused too.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--api-key-file {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--api-key-file {path} is no text: {error}") from None
    keys: list[tuple[str, str]] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) > 2 or len(words[-1]) < SHORTEST_KEY or not words[-1].isascii():
            raise ConfigError(
                f"{path}:{number}: a line is `key` or `tenant key`; a key has {SHORTEST_KEY} or more ASCII characters"
            )
        keys.append((words[0] if len(words) == 2 else f"key-{number}", words[-1]))
    if not keys:
        raise ConfigError(f"--api-key-file {path} holds no key; leave it out to run without")
    return tuple(keys)
