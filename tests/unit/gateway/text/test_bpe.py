"""Both merge paths against the plain definition: always the lowest rank, then the leftmost place."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.bpe import BytePairMerger

ALPHABET = b"abc"


def definition(symbols, merges):
    """Merge one pair at a time, straight from the definition."""
    while True:
        ranked = [(merges[pair][0], at) for at, pair in enumerate(pairwise(symbols)) if pair in merges]
        if not ranked:
            return symbols
        _, at = min(ranked)
        symbols = [*symbols[:at], merges[symbols[at], symbols[at + 1]][1], *symbols[at + 2 :]]


@st.composite
def merge_tables(draw):
    """Tables whose ranks are in any order: a pair of new tokens may come before the pairs that make them."""
    strings = {bytes([byte]): byte for byte in ALPHABET}
    pairs = []
    for _ in range(draw(st.integers(1, 12))):
        left, right = draw(st.sampled_from(sorted(strings))), draw(st.sampled_from(sorted(strings)))
        if len(left + right) <= 8:
            strings.setdefault(left + right, 256 + len(strings))
            pairs.append((strings[left], strings[right], strings[left + right]))
    ranks = draw(st.permutations(range(len(pairs))))
    return {(left, right): (rank, merged) for rank, (left, right, merged) in zip(ranks, pairs)}


@settings(max_examples=300, deadline=None)
@given(merge_tables(), st.text(ALPHABET.decode(), max_size=60))
def test_short_and_long_paths_follow_the_definition(merges, text):
    merger = BytePairMerger(list(range(256)), merges)
    symbols = list(text.encode())
    expected = definition(symbols, merges)
    assert merger._merge_short(list(symbols)) == expected
    assert merger._merge_long(list(symbols)) == expected
    assert merger.encode(text.encode()) == expected
