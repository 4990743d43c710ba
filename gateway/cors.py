"""Cross-origin requests: which web pages may read our answers.

Off unless the operator names origins; `*` is any. Cookies and other credentials of the browser are never asked for:
keys travel in headers that a page sets itself.
"""

from collections.abc import Mapping, Sequence

_EXPOSED = "x-request-id, request-id, retry-after, x-v4mesh-clamped, x-ratelimit-limit-requests"
PREFLIGHT_SECONDS = 600


class Cors:
    """The configured origins."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origin.rstrip("/") for origin in origins)
        self._any = "*" in self._origins

    def headers(self, request: Mapping[str, str]) -> dict[str, str]:
        """What an answer says to the browser; empty for pages that may not read it, and for what is no browser."""
        origin = request.get("Origin", "")
        if not origin or not (self._any or origin in self._origins):
            return {}
        shown = {"Access-Control-Allow-Origin": "*"} if self._any else {"Access-Control-Allow-Origin": origin}
        return {**shown, "Access-Control-Expose-Headers": _EXPOSED, "Vary": "Origin"}

    def preflight(self, request: Mapping[str, str], methods: Sequence[str]) -> dict[str, str]:
        """Headers of the answer to a browser's question whether it may ask; empty if it may not, or asks nothing."""
        allowed = self.headers(request)
        if not allowed or "Access-Control-Request-Method" not in request:
            return {}
        wanted = request.get("Access-Control-Request-Headers", "")
        return {
            **allowed,
            "Access-Control-Allow-Methods": ", ".join(methods),
            "Access-Control-Allow-Headers": wanted if wanted.isascii() and wanted.isprintable() else "",
            "Access-Control-Max-Age": str(PREFLIGHT_SECONDS),
        }
