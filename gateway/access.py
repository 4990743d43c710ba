"""Who may call: bearer keys, compared in constant time, and keys of operators for what concerns the whole mesh.

A key stands for a tenant, which separates prefix caches and counts open generations. Reading the key files is
`meshkit.api_keys`'; rates are not limited here.
"""

import hmac
from collections.abc import Mapping, Sequence
from pathlib import Path

from gateway.errors import ApiError
from meshkit.api_keys import ApiKey, digest_of, read_api_keys

ANYBODY = "public"
"""The tenant of everyone while no keys are configured."""


class KeyRing:
    """The configured keys. Without keys every caller is the same tenant; without operators' keys any caller is one."""

    def __init__(self, keys: Sequence[ApiKey] = (), operators: Sequence[ApiKey] = ()) -> None:
        self._keys = [(key.tenant, key.digest) for key in keys]
        self._operators = [(key.tenant, key.digest) for key in operators]

    @classmethod
    def read(cls, keys: Path | None, operators: Path | None) -> "KeyRing":
        """From the files that the configuration names. Raises ConfigError."""
        return cls(
            read_api_keys(keys) if keys else (),
            read_api_keys(operators, "--admin-api-key-file") if operators else (),
        )

    def tenant_of(self, headers: Mapping[str, str]) -> str:
        """The caller's tenant. Raises 401, with the same words for a missing and a wrong key."""
        if not self._keys:
            return ANYBODY
        given = _given(headers)
        found = _match(self._keys, given) or _match(self._operators, given)
        if found is None:
            raise ApiError(401, "a valid API key is required: Authorization: Bearer <key>", code="invalid_api_key")
        return found

    def check_operator(self, headers: Mapping[str, str]) -> None:
        """Raises 401 without a key and 403 with another one, where operators have keys of their own."""
        if not self._operators:
            return
        given = _given(headers)
        if _match(self._operators, given) is None:
            if not given:
                raise ApiError(
                    401, "an operator's key is required: Authorization: Bearer <key>", code="invalid_api_key"
                )
            raise ApiError(403, "this route needs an operator's key (the gateway's --admin-api-key-file)")


def _given(headers: Mapping[str, str]) -> str:
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _match(keys: Sequence[tuple[str, bytes]], given: str) -> str | None:
    digest, found = digest_of(given), None
    for tenant, known in keys:  # all of them: the time must not tell which one matched
        if hmac.compare_digest(digest, known):
            found = tenant
    return found
