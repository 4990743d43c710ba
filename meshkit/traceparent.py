"""W3C traceparent texts: `00-<32 hex: trace>-<16 hex: span>-<2 hex: flags>`. Pure text, for cores and shells alike."""

import secrets


def is_sampled(traceparent: str) -> bool:
    """True for a well-formed W3C traceparent whose sampled flag is set."""
    parts = traceparent.split("-")
    if len(parts) != 4 or [len(part) for part in parts] != [2, 32, 16, 2]:
        return False
    try:
        return bool(int(parts[3], 16) & 1) and int(parts[1], 16) > 0 and int(parts[2], 16) > 0
    except ValueError:
        return False


def new_traceparent(parent: str = "", *, sampled: bool = True) -> str:
    """A child of `parent` (same trace, same flag), or a new trace."""
    parts = parent.split("-")
    if len(parts) == 4 and len(parts[1]) == 32:
        return f"00-{parts[1]}-{secrets.token_hex(8)}-{parts[3]}"
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{'01' if sampled else '00'}"
