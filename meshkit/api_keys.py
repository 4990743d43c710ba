"""The file of API keys: one parser for the gateway, which checks keys, and for the commands that send one.

One key per line, optionally `tenant key`; `#` starts a comment. A key may be given as its hash, `sha256:` and 64 hex
digits (`v4mesh config hash-key` prints it), so that the file does not hold what opens the door. Who may do what is the
gateway's.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from meshkit.errors import ConfigError

SHORTEST_KEY: Final = 8
HASHED: Final = "sha256:"
_HASH: Final = re.compile(r"sha256:[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A line of the file. `key` is empty where only the hash is known."""

    tenant: str
    key: str
    digest: bytes


def digest_of(key: str) -> bytes:
    """SHA-256 of a key. Keys are long random texts: a slow hash would protect nothing more."""
    return hashlib.sha256(key.encode(errors="replace")).digest()


def read_api_keys(path: Path, flag: str = "--api-key-file") -> tuple[ApiKey, ...]:
    """The keys in the file's order; one without a tenant gets one named after its line.

    ConfigError names the file and the line; a file without any key is refused too.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} {path} is no text: {error}") from None
    keys: list[ApiKey] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        hashed = words[-1].startswith(HASHED)
        sound = _HASH.fullmatch(words[-1]) if hashed else len(words[-1]) >= SHORTEST_KEY and words[-1].isascii()
        if len(words) > 2 or not sound:
            raise ConfigError(
                f"{path}:{number}: a line is `key` or `tenant key`; a key has {SHORTEST_KEY} or more ASCII characters, "
                f"or is {HASHED} and 64 hex digits"
            )
        tenant = words[0] if len(words) == 2 else f"key-{number}"
        if hashed:
            keys.append(ApiKey(tenant, "", bytes.fromhex(words[-1].removeprefix(HASHED))))
        else:
            keys.append(ApiKey(tenant, words[-1], digest_of(words[-1])))
    if not keys:
        raise ConfigError(f"{flag} {path} holds no key; leave it out to run without")
    return tuple(keys)
