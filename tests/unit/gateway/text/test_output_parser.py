"""Output ids become reasoning and content: markers by id, newlines, stop strings, and tokens on their deltas."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.output_parser import OutputParser
from gateway.text.tokenizer import Tokenizer

END_THINK, THINK, USER, ASSISTANT, DSML = 128822, 128821, 128803, 128804, 128825


def run(parser: OutputParser, ids, step=1, entries=None):
    """All deltas of pushes of `step` ids, and the end."""
    deltas = []
    for at in range(0, len(ids), step):
        deltas += parser.push(ids[at : at + step], None if entries is None else entries[at : at + step])
    return deltas + parser.finish()


def joined(deltas):
    return tuple("".join(d.text for d in deltas if d.kind == kind) for kind in ("reasoning", "content"))


def thinking(tokenizer, **options):
    return OutputParser(tokenizer, starts_in="reasoning", **options)


def ids_of(v4: Tokenizer, *pieces) -> list[int]:
    out: list[int] = []
    for piece in pieces:
        out += [piece] if isinstance(piece, int) else v4.encode(piece, added_tokens=False)
    return out


def test_stop_string_in_reasoning_does_not_count(v4):
    ids = ids_of(v4, "The user asks Question: 2+2", END_THINK, "Answer: 4 Question: next")
    for step in (1, 3, 100):
        parser = thinking(v4, stop=["Question:"])
        assert joined(run(parser, ids, step)) == ("The user asks Question: 2+2", "Answer: 4 ")
        assert parser.matched_stop == "Question:"
        assert parser.kept_ids == len(ids_of(v4, "The user asks Question: 2+2", END_THINK, "Answer: 4 Question:"))


def test_emoji_of_two_tokens_with_logprobs(v4):
    ids = [28927, 225, 619]
    deltas = run(OutputParser(v4), ids, entries=["a", "b", "c"])
    assert [d.text for d in deltas] == ["😀", "é"]
    assert [d.tokens for d in deltas] == [(0, 1), (2,)] and [d.logprobs for d in deltas] == [("a", "b"), ("c",)]
    assert b"".join(v4.token_bytes(i) for i in ids) == "😀é".encode()


@pytest.mark.parametrize("raw", [True, False])
def test_stop_string_is_cut_and_a_part_of_one_is_flushed(v4, raw):
    for step in (1, 2, 100):
        parser = OutputParser(v4, stop=["Observation:"], raw=raw)
        deltas = run(parser, ids_of(v4, "x Observation: y"), step)
        assert joined(deltas) == ("", "x ") and parser.matched_stop == "Observation:"
        parser = OutputParser(v4, stop=["Observation:"], raw=raw)
        assert joined(run(parser, [*ids_of(v4, "x Obs"), 1], step)) == ("", "x Obs")
        assert parser.matched_stop is None


def test_held_text_never_leaves_early(v4):
    parser = OutputParser(v4, stop=["Observation:"])
    out = [d.text for i in ids_of(v4, "x Observation") for d in parser.push([i])]
    assert "".join(out) == "x "


@pytest.mark.parametrize("raw", [True, False])
def test_special_tokens_in_content_are_no_text(v4, raw):
    ids = ids_of(v4, "ok", 0, "!", 1)
    for step in (1, 100):
        assert joined(run(OutputParser(v4, raw=raw), ids, step)) == ("", "ok!")
        shown = joined(run(OutputParser(v4, raw=raw, skip_special_tokens=False), ids, step))
        assert shown == ("", "ok<｜begin▁of▁sentence｜>!")


def test_newlines_around_the_end_of_thinking_belong_to_the_markup(v4):
    ids = ids_of(v4, "\n\n\n", "hi\n\nyou", "\n\n", END_THINK, "\n\n\n", "ok\n", "\n")
    for step in (1, 2, 100):
        assert joined(run(thinking(v4), ids, step)) == ("hi\n\nyou", "ok\n\n")
    assert joined(run(thinking(v4), ids_of(v4, "hi\n\n"))) == ("hi\n\n", "")
    assert joined(run(OutputParser(v4), ids_of(v4, "\n\n", "hi\n"))) == ("", "hi\n")


def test_a_continued_turn_keeps_its_leading_newlines(v4):
    ids = ids_of(v4, "\n\n", "hi")
    assert joined(run(OutputParser(v4, fresh_turn=False), ids)) == ("", "\n\nhi")
    assert joined(run(thinking(v4, fresh_turn=False), [*ids, END_THINK, *ids])) == ("\n\nhi", "hi")


def test_markers_count_by_id_alone(v4):
    spelled = ids_of(v4, "a</think>b<think>c")
    assert joined(run(thinking(v4), [*spelled, END_THINK, *spelled])) == ("a</think>b<think>c",) * 2
    ids = ids_of(v4, THINK, "a", THINK, "b", END_THINK, "c", END_THINK, THINK, "d")
    assert joined(run(thinking(v4), ids)) == ("ab", "cd")
    assert joined(run(OutputParser(v4), ids_of(v4, "x", USER, "y", ASSISTANT, "z"))) == ("", "xyz")


def test_raw_output_has_no_states(v4):
    ids = ids_of(v4, "\n\n", "a", END_THINK, "\n", "b", USER)
    assert joined(run(OutputParser(v4, raw=True, starts_in="reasoning"), ids)) == (
        "",
        "\n\na</think>\nb<｜User｜>",
    )


def test_tool_markup_without_tools_is_text(v4, nano):
    assert joined(run(OutputParser(v4), v4.encode("ok\n\n<｜DSML｜tool_calls>"))) == ("", "ok\n\n<｜DSML｜tool_calls>")
    assert joined(run(OutputParser(nano), nano.encode("ok <｜DSML｜x>"))) == ("", "ok <｜DSML｜x>")


def test_an_end_before_the_marker_leaves_all_in_reasoning(v4):
    parser = thinking(v4)
    assert joined(run(parser, ids_of(v4, "so it is", 1))) == ("so it is", "")
    assert parser.kind == "reasoning" and parser.reasoning_tokens == len(ids_of(v4, "so it is"))


def test_reasoning_tokens_are_the_ids_before_the_marker(v4):
    parser = thinking(v4)
    ids = ids_of(v4, "\n", "one two", "\n\n", END_THINK, "three", 1)
    run(parser, ids)
    assert parser.reasoning_tokens == len(ids_of(v4, "\n", "one two", "\n\n"))
    assert parser.kept_ids == len(ids)


def test_include_stop_string(v4):
    ids = ids_of(v4, "a stop here")
    assert joined(run(OutputParser(v4, stop=["stop"], include_stop=True), ids)) == ("", "a stop")
    assert joined(run(OutputParser(v4, stop=["stop"]), ids)) == ("", "a ")


def test_stop_tokens_are_removed_or_kept(v4):
    ids = ids_of(v4, "a b")
    assert joined(run(OutputParser(v4, stop_ids={ids[-1], 1}), ids)) == ("", "a")
    assert joined(run(OutputParser(v4, stop_ids={ids[-1], 1}, include_stop=True), ids)) == ("", "a b")
    kept = OutputParser(v4, stop_ids={1}, include_stop=True, skip_special_tokens=False)
    assert joined(run(kept, [*ids, 1])) == ("", "a b")


def test_no_stop_string_before_min_tokens(v4):
    ids = ids_of(v4, " one", " two", " one", " three")
    parser = OutputParser(v4, stop=["one"], min_tokens=3)
    assert joined(run(parser, ids)) == ("", " one two ")
    assert parser.kept_ids == 3


def test_ids_after_a_stop_string_are_ignored(v4):
    parser = OutputParser(v4, stop=["b"])
    deltas = parser.push(ids_of(v4, "a", "b", "c", "d"))
    assert joined(deltas + parser.push(ids_of(v4, "e")) + parser.finish()) == ("", "a")
    assert parser.kept_ids == 2


def test_tokens_ride_on_the_delta_with_their_text(v4):
    ids = ids_of(v4, "\n\n", "hi", "\n\n", END_THINK, "\n\n", "abc", " Observation", ":", " y")
    parser = thinking(v4, stop=["Observation:"])
    deltas = parser.push(ids, list("0123456789"[: len(ids)])) + parser.finish()
    assert [(d.kind, d.text, d.tokens) for d in deltas] == [
        ("reasoning", "hi", (1,)),
        ("content", "abc ", (5, 6)),
    ]
    assert deltas[1].logprobs == ("5", "6")


def test_broken_characters(v4):
    assert joined(run(OutputParser(v4), [225, 28927, 28927, 225, 28927])) == ("", "\ufffd\ufffd😀")
    assert joined(run(thinking(v4), [28927, END_THINK, 225, 619])) == ("\ufffd", "\ufffdé")


def test_unknown_ids_are_no_text(small):
    assert joined(run(OutputParser(small), [*small.encode("a"), 4000, *small.encode("b")])) == ("", "ab")


PIECES = st.lists(
    st.sampled_from([28927, 225, 244, 619, 0, 1, END_THINK, THINK, USER, DSML, 271, 201, 30, 32])
    | st.integers(3, 2000),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(PIECES, st.lists(st.integers(1, 5)), st.lists(st.text("ab\n e", min_size=1, max_size=4), max_size=3), st.data())
def test_any_cut_into_pushes_gives_the_same(v4, ids, steps, stops, data):
    options = {
        "starts_in": data.draw(st.sampled_from(["reasoning", "content"])),
        "fresh_turn": data.draw(st.booleans()),
        "raw": data.draw(st.booleans()),
        "include_stop": data.draw(st.booleans()),
        "min_tokens": data.draw(st.integers(0, 5)),
    }
    parsers = [OutputParser(v4, stop=stops, **options) for _ in range(2)]
    whole = parsers[0].push(ids, ids) + parsers[0].finish()
    pieces, at = [], 0
    for step in [*steps, len(ids)] if data.draw(st.booleans()) else [1] * len(ids):
        pieces += parsers[1].push(ids[at : at + step], ids[at : at + step])
        at += step
    pieces += parsers[1].finish()
    assert joined(whole) == joined(pieces)
    for kind in ("reasoning", "content"):
        tokens = [[t for d in deltas if d.kind == kind for t in d.tokens] for deltas in (whole, pieces)]
        assert tokens[0] == tokens[1] == sorted(set(tokens[0]))
    for name in ("matched_stop", "kept_ids", "reasoning_tokens", "kind"):
        assert getattr(parsers[0], name) == getattr(parsers[1], name)
    for delta in pieces:
        assert delta.text and delta.logprobs == tuple(ids[t] for t in delta.tokens)
