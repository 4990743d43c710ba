"""Names of KV pages: chained, keyed BLAKE2b-128 over token ids, so that equal names mean equal contents.

A page's key covers every id before it (through its parent's key) and the namespace: tenant, salt, model revision and
KV layout. Gateways compute the keys of prompts, the scheduler those of generated pages; both use this one function.
No storage here: who holds which page is the scheduler's ledger.
"""

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshkit.types import PAGE_TOKENS

KEY_BYTES = 16
NAMESPACE_BYTES = 32
ROOT_KEY = b"\0" * KEY_BYTES
"""Parent of a sequence's first page."""

_PERSON = b"v4mesh page key"
_PAGE = struct.Struct(f"<{PAGE_TOKENS}i")  # a list of ints in a sixth of numpy's time
_COLUMN = (4 * PAGE_TOKENS).to_bytes(8, "little")  # the length of a page's ids, in front of them


def _field(value: bytes) -> bytes:
    """Length-prefixed, so that no two lists of fields share an encoding."""
    return len(value).to_bytes(8, "little") + value


def namespace_key(
    tenant: str, cache_salt: str, model_revision: str, kv_layout_id: str, adapter: str = "", secret: bytes = b""
) -> bytes:
    """32 bytes that separate callers and models: pages of different namespaces never share a key.

    `tenant` is the API key's, never the caller's word; `cache_salt` can only narrow it. With a `secret` (<= 64 bytes)
    of the mesh, nobody outside it can compute keys offline.
    """
    digest = hashlib.blake2b(digest_size=NAMESPACE_BYTES, key=secret, person=b"v4mesh namespace")
    for text in (tenant, cache_salt, model_revision, kv_layout_id, adapter):
        digest.update(_field(text.encode()))
    return digest.digest()


def next_page_key(parent_key: bytes, ids: Sequence[int] | NDArray[np.int32], namespace: bytes) -> bytes:
    """Key of the page that follows `parent_key` (ROOT_KEY for the first) and holds exactly PAGE_TOKENS `ids`."""
    if len(ids) != PAGE_TOKENS:
        raise ValueError(f"ids: a page holds {PAGE_TOKENS} tokens, got {len(ids)}; only full pages have keys")
    column = _PAGE.pack(*ids) if isinstance(ids, list) else np.asarray(ids, "<i4").tobytes()
    return _chain(parent_key, column, namespace)


def page_keys(ids: Sequence[int] | NDArray[np.int32], namespace: bytes) -> list[bytes]:
    """Keys of all full pages of a sequence, in order; a trailing partial page has none."""
    column = np.asarray(ids, "<i4").tobytes()
    stride = 4 * PAGE_TOKENS
    fresh = _keyed(namespace).copy
    keys: list[bytes] = []
    parent = ROOT_KEY
    for start in range(0, len(column) - stride + 1, stride):
        digest = fresh()  # the loop of `_chain` without its calls: prompts have thousands of pages
        digest.update(parent + _COLUMN + column[start : start + stride])
        parent = digest.digest()
        keys.append(parent)
    return keys


def _keyed(namespace: bytes) -> "hashlib.blake2b":
    """The state that all pages of a namespace begin with: key, person, and the length of the parent's key."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES, key=namespace, person=_PERSON)
    digest.update(KEY_BYTES.to_bytes(8, "little"))
    return digest


def _chain(parent_key: bytes, column: bytes, namespace: bytes) -> bytes:
    digest = _keyed(namespace)
    digest.update(parent_key + _COLUMN + column)
    return digest.digest()
