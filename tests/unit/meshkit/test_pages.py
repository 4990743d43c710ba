"""Page keys: chained, separated by namespace, the same whoever computes them."""

import numpy as np
import pytest

from meshkit.pages import KEY_BYTES, ROOT_KEY, namespace_key, next_page_key, page_keys
from meshkit.types import PAGE_TOKENS

NS = namespace_key("tenant", "", "rev", "layout")


def _ids(n, seed=0):
    return np.random.default_rng(seed).integers(0, 129_280, n).astype(np.int32)


def test_only_full_pages_have_keys():
    assert page_keys(_ids(PAGE_TOKENS - 1), NS) == []
    assert len(page_keys(_ids(PAGE_TOKENS), NS)) == 1
    assert len(page_keys(_ids(3 * PAGE_TOKENS + 200), NS)) == 3
    assert {len(k) for k in page_keys(_ids(600), NS)} == {KEY_BYTES}


def test_step_by_step_equals_whole_and_lists_equal_arrays():
    ids = _ids(4 * PAGE_TOKENS)
    parent, keys = ROOT_KEY, []
    for p in range(4):
        parent = next_page_key(parent, ids[p * PAGE_TOKENS : (p + 1) * PAGE_TOKENS].tolist(), NS)
        keys.append(parent)
    assert keys == page_keys(ids, NS) == page_keys(ids.tolist(), NS) == page_keys(ids.astype(np.int64), NS)


def test_a_key_covers_everything_before_it():
    ids = _ids(3 * PAGE_TOKENS)
    other = ids.copy()
    other[0] ^= 1
    assert not set(page_keys(ids, NS)) & set(page_keys(other, NS))
    other = ids.copy()
    other[-1] ^= 1
    assert page_keys(ids, NS)[:2] == page_keys(other, NS)[:2]
    assert page_keys(ids, NS)[2] != page_keys(other, NS)[2]


def test_namespaces_are_separate_and_fields_do_not_run_together():
    ids = _ids(PAGE_TOKENS)
    spaces = [
        NS,
        namespace_key("tenan", "t", "rev", "layout"),
        namespace_key("tenant", "salt", "rev", "layout"),
        namespace_key("tenant", "", "re", "vlayout"),
        namespace_key("tenant", "", "rev", "layout", adapter="a"),
        namespace_key("tenant", "", "rev", "layout", secret=b"s"),
    ]
    assert len({page_keys(ids, ns)[0] for ns in spaces}) == len(spaces)


def test_known_value():
    """Frozen: keys outlive a process (dumps, stores), so they must not change unnoticed."""
    ns = namespace_key("t", "s", "r", "l")
    assert next_page_key(ROOT_KEY, list(range(PAGE_TOKENS)), ns).hex() == "62d02becfda6007e7401ef31d3e89c56"


def test_partial_page_is_refused():
    with pytest.raises(ValueError, match="256 tokens, got 3"):
        next_page_key(ROOT_KEY, [1, 2, 3], NS)
