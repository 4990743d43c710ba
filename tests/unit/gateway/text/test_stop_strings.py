"""Stop strings are found where the text says, whatever pieces it came in."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.text.stop_strings import StopScanner, StopStrings


def definition(text, stops):
    """Character by character: the first end of any stop string, the longest of those ending there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def scan(pieces, stops):
    scanner = StopScanner(StopStrings(stops))
    out = ""
    for piece in pieces:
        safe, match = scanner.feed(piece)
        out += safe
        if match is not None:
            return out, match
    return out + scanner.finish(), None


@given(st.lists(st.text("ab", max_size=4), max_size=12), st.lists(st.text("ab", min_size=1, max_size=5), max_size=4))
def test_any_cut_of_the_text_gives_the_definition(pieces, stops):
    assert scan(pieces, stops) == definition("".join(pieces), stops)


@given(st.lists(st.text("ab", max_size=4), max_size=12), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1))
def test_nothing_is_held_that_cannot_become_a_stop_string(pieces, stops):
    scanner = StopScanner(StopStrings(stops))
    seen = released = ""
    for piece in pieces:
        safe, match = scanner.feed(piece)
        seen, released = seen + piece, released + safe
        if match is not None:
            return
        held = seen[len(released) :]
        assert seen == released + held
        longest = max((n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])), default=0)
        assert len(held) == longest


def test_unarmed_scanner_passes_stop_strings_over():
    scanner = StopScanner(StopStrings(["ab"]))
    assert scanner.feed("xab", armed=False) == ("x", None)
    assert scanner.feed("cab") == ("abc", "ab")


def test_thousands_of_held_characters_stay_cheap():
    scanner = StopScanner(StopStrings(["a" * 5000 + "b"]))
    out = "".join(scanner.feed("a")[0] for _ in range(20_000))
    assert len(out) == 15_000 and len(scanner.finish()) == 5000
