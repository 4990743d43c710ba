"""Why a prompt was served from the cache as far as it was, and no further: for operators and for tests.

Looks at the same arrays as a match does and changes nothing; what was evicted lately is remembered by the trie.
"""

from dataclasses import dataclass

from scheduler_svc.core.keymap import I64, key_bytes
from scheduler_svc.core.prefix import Counters, Match, PoolId, PrefixIndex
from scheduler_svc.core.trie import BASE, Bits, PageTrie


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a prompt was served as far as it was, in one pool. Indices and counts in pages."""

    pool: PoolId
    asked: int
    present: int  # leading pages with all base classes in L1
    servable: int
    why: str  # hit, unknown, page_missing, page_evicted, class_missing, lower_tier, no_tail, tail_evicted
    first_missing: int = -1  # index of the first page that is not in L1
    missing_key: bytes = b""
    missing_classes: tuple[str, ...] = ()
    tier: str = ""  # where what is missing could be loaded from
    idle: int = 0  # pages there that nobody refers to


def explain(index: PrefixIndex, pool: PoolId, columns: I64, limit: int) -> Explanation:
    """Where and why a prompt stops being served from this pool. Counts nothing."""
    saved = Counters(**{name: getattr(index.counters, name) for name in Counters.__slots__})
    match = index.match(pool, columns, limit)
    index.counters = saved
    trie = index.pools[pool].trie
    asked = min(limit, len(columns))
    why, tier = "hit", ""
    classes: tuple[str, ...] = ()
    missing = match.base if match.base < asked else -1
    if match.tail_pages < match.base:
        row = int(match.rows[match.base - 1])
        why = "tail_evicted" if trie.bits[row] & int(Bits.HAD_TAIL) else "no_tail"
        tier = _tier(int(trie.bits[row]), int(Bits.TAIL))
    elif missing >= 0:
        why, classes, tier = _why_missing(trie, match, columns)
    return Explanation(
        pool=pool,
        asked=asked,
        present=match.base,
        servable=match.tail_pages,
        why=why,
        first_missing=missing,
        missing_key=key_bytes(columns[missing : missing + 1])[0] if missing >= 0 else b"",
        missing_classes=classes,
        tier=tier,
        idle=trie.idle,
    )


def _tier(bits: int, wanted: int) -> str:
    if bits >> 4 & wanted == wanted:
        return "L2"
    return "L3" if bits >> 8 & wanted == wanted else ""


def _why_missing(trie: PageTrie, match: Match, columns: I64) -> tuple[str, tuple[str, ...], str]:
    at = match.base
    if at < len(match.rows):
        bits = int(trie.bits[match.rows[at]])
        tier = _tier(bits, BASE)
        names = tuple(str(c.name) for c in (Bits.C4, Bits.C4_INDEX, Bits.C128) if not bits & c)
        return ("lower_tier" if tier else "class_missing"), names, tier
    if trie.was_evicted(int(columns[at, 0])):
        return "page_evicted", (), ""
    return ("page_missing" if at else "unknown"), (), ""
