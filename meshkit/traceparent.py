"""W3C trace contexts as texts: `00-<32 hex: trace>-<16 hex: span>-<2 hex: flags>`, and after a blank the tracestate.

Pure text, for cores and shells alike. The state is the caller's: kept as it came, carried along with every span.
"""

import re
import secrets

MAX_STATE = 512
"""Characters; what is longer is left out, as W3C allows."""
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_KEY = r"(?:[a-z0-9][a-z0-9_\-*/]{0,240}@)?[a-z][a-z0-9_\-*/]{0,255}"
_STATE = re.compile(rf"{_KEY}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{{1,256}}")


def context_of(traceparent: str, tracestate: str = "") -> str:
    """One text of the two headers; empty if the first is none. A broken or too long state is left out."""
    if not _TRACEPARENT.fullmatch(traceparent):
        return ""
    members = [member.strip() for member in tracestate[: MAX_STATE + 1].split(",") if member.strip()]
    state = ",".join(members)
    sound = len(tracestate) <= MAX_STATE and len(members) <= 32 and all(map(_STATE.fullmatch, members))
    return f"{traceparent} {state}" if state and sound else traceparent


def state_of(context: str) -> str:
    """The tracestate, empty if there is none."""
    return context.partition(" ")[2]


def is_sampled(context: str) -> bool:
    """True for a well-formed traceparent whose sampled flag is set."""
    parts = context.partition(" ")[0].split("-")
    if len(parts) != 4 or [len(part) for part in parts] != [2, 32, 16, 2]:
        return False
    try:
        return bool(int(parts[3], 16) & 1) and int(parts[1], 16) > 0 and int(parts[2], 16) > 0
    except ValueError:
        return False


def new_traceparent(parent: str = "", *, sampled: bool = True) -> str:
    """A child of `parent` (same trace, flag and state), or a new trace."""
    head, blank, state = parent.partition(" ")
    parts = head.split("-")
    if len(parts) == 4 and len(parts[1]) == 32:
        return f"00-{parts[1]}-{secrets.token_hex(8)}-{parts[3]}{blank}{state}"
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{'01' if sampled else '00'}"
