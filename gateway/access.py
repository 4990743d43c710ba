"""Who may call: bearer keys, compared in constant time.

A key stands for a tenant, which separates prefix caches and counts open generations. Reading the key file is
`gateway.config`'s; rates are not limited here.
"""

import hashlib
import hmac
from collections.abc import Mapping, Sequence

from gateway.errors import ApiError

ANYBODY = "public"
"""The tenant of everyone while no keys are configured."""


class KeyRing:
    """The configured keys. Without keys every caller is the same tenant."""

    def __init__(self, keys: Sequence[tuple[str, str]]) -> None:
        self._keys = [(tenant, hashlib.sha256(key.encode()).digest()) for tenant, key in keys]

    def tenant_of(self, headers: Mapping[str, str]) -> str:
        """The caller's tenant. Raises 401, with the same words for a missing and a wrong key."""
        if not self._keys:
            return ANYBODY
        scheme, _, key = headers.get("Authorization", "").partition(" ")
        given = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = hashlib.sha256(given.encode(errors="replace")).digest()
        found = None
        for tenant, known in self._keys:  # all of them: the time must not tell which one matched
            if hmac.compare_digest(digest, known):
                found = tenant
        if found is None:
            raise ApiError(401, "a valid API key is required: Authorization: Bearer <key>", code="invalid_api_key")
        return found
