"""Tool calls out of generated ids: markup never in text, arguments always JSON, broken markup, any cut into pushes."""

import json
import re
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.chat_messages import ToolCall, ToolSpec
from gateway.text.output_parser import OutputParser
from gateway.text.prompt import Prompt
from gateway.text.tool_calls import ToolCallParser
from gateway.text.tool_encoding import add_calls
from gateway.text.tool_tags import MARK, MAX_TAG

EOS, END_THINK, DSML = 1, 128822, 128825
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "zip": {"type": "integer"}, "days": {"type": "integer"}},
}
TOOLS = (ToolSpec("get_weather", parameters=SCHEMA), ToolSpec("noop"))
BLOCK, END_BLOCK = "<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>"
CALL, END_CALL = '<｜DSML｜invoke name="get_weather">\n', "</｜DSML｜invoke>\n"


def param(key, value, string="true"):
    return f'<｜DSML｜parameter name="{key}" string="{string}">{value}</｜DSML｜parameter>\n'


class Answer:
    """What a client would gather from deltas."""

    def __init__(self, parser, pushes):
        self.parser = parser
        self.deltas = [delta for ids in pushes for delta in parser.push(ids)] + parser.finish()
        self.reasoning = "".join(d.text for d in self.deltas if d.kind == "reasoning")
        self.content = "".join(d.text for d in self.deltas if d.kind == "content")
        self.names, self.arguments, self.ids = [], [], []
        for delta in self.deltas:
            call = delta.call
            if call is None:
                continue
            if call.opens:
                assert call.index == len(self.names)
                self.names.append(call.name)
                self.arguments.append("")
                self.ids.append(call.id)
            assert (call.name, call.id) == (self.names[call.index], self.ids[call.index])
            self.arguments[call.index] += delta.text
        self.closed = [d.call.index for d in self.deltas if d.call and d.call.closes]
        assert parser.complete_calls == len(self.closed)

    @property
    def calls(self):
        return list(zip(self.names, self.arguments))


def read(v4, text, step=1, tools=TOOLS, **options):
    """Parse a text as the model would write it, its markers as their tokens, ended by EOS."""
    ids = [*v4.encode(text), EOS]
    return Answer(OutputParser(v4, tools=tools, **options), [ids[at : at + step] for at in range(0, len(ids), step)])


def weather(*pairs):
    return "get_weather", "{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in pairs) + "}"


PARIS = weather(("city", '"Paris"'))


def test_the_opening_of_a_block_token_by_token_is_never_text(v4):
    tail = CALL + param("city", "Paris") + END_CALL + END_BLOCK
    pieces = ["Let me check.", "\n\n", "<", DSML, "tool", "_c", "alls", ">\n"]
    ids = [i for piece in pieces for i in ([piece] if isinstance(piece, int) else v4.encode(piece))]
    answer = Answer(OutputParser(v4, tools=TOOLS), [[i] for i in [*ids, *v4.encode(tail), EOS]])
    assert answer.content == "Let me check."
    assert not any("<" in d.text or "DSML" in d.text or "tool_calls" in d.text for d in answer.deltas)
    assert answer.calls == [PARIS] and answer.closed == [0]


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_a_call_without_its_block(v4, step):
    answer = read(v4, CALL + param("city", "Paris") + END_CALL + END_BLOCK, step)
    assert (answer.content, answer.calls) == ("", [PARIS])
    answer = read(v4, "ok\n\n" + CALL + param("city", "Paris") + END_CALL + "and so on", step)
    assert (answer.content, answer.calls) == ("ok", [PARIS])


def test_the_written_kind_of_a_value_wins_over_the_schema(v4):
    text = BLOCK + CALL + param("zip", "007") + param("n", "7", "false") + END_CALL + END_BLOCK
    assert json.loads(read(v4, text).arguments[0]) == {"zip": "007", "n": 7}


def test_calls_have_their_own_ids_and_order(v4):
    text = BLOCK + CALL + param("city", "Paris") + END_CALL + '<｜DSML｜invoke name="noop">\n' + END_CALL + END_BLOCK
    answers = [read(v4, "ok\n\n" + text), read(v4, text)]
    assert answers[0].calls == [PARIS, ("noop", "{}")] and answers[0].closed == [0, 1]
    ids = [i for answer in answers for i in answer.ids]
    assert len(set(ids)) == 4
    assert [i[:8] for i in ids] == ["call_00_", "call_01_"] * 2
    assert all(re.fullmatch(r"call_\d\d_[a-z0-9]{20,}", i) for i in ids)


@pytest.mark.parametrize(
    ("before", "content"),
    [
        ("ok\n\n", "ok"),
        ("ok\n", "ok"),
        ("ok\n\n\n", "ok"),
        ("ok", "ok"),
        ("ok \n \n", "ok \n "),
        ("\n\n", ""),
        ("", ""),
    ],
)
def test_newlines_before_a_block_are_markup(v4, before, content):
    text = before + BLOCK + CALL + param("city", "Paris") + END_CALL + END_BLOCK
    for step in (1, 1000):
        answer = read(v4, text, step)
        assert (answer.content, answer.calls) == (content, [PARIS])
        answer = read(v4, "hm\n</think>" + text, step, starts_in="reasoning")
        assert (answer.reasoning, answer.content, answer.calls) == ("hm", content, [PARIS])


def test_a_block_ends_reasoning(v4):
    text = "I call it" + "\n\n" + BLOCK + CALL + param("city", "Paris") + END_CALL + END_BLOCK
    for step in (1, 5, 1000):
        answer = read(v4, text, step, starts_in="reasoning")
        assert (answer.reasoning, answer.content, answer.calls) == ("I call it", "", [PARIS])
        assert answer.parser.reasoning_tokens == len(v4.encode("I call it\n\n"))
        assert answer.parser.kind == "tool_call"


def test_what_follows_the_block_is_dropped(v4):
    block = BLOCK + CALL + param("city", "Paris") + END_CALL + END_BLOCK
    for tail in ("trailing", "\n\n" + block, "</think>x", "<｜DSML｜"):
        answer = read(v4, "ok\n\n" + block + tail)
        assert (answer.content, answer.calls) == ("ok", [PARIS])
    assert (read(v4, "ok\n\n" + BLOCK + END_BLOCK).content, read(v4, BLOCK + END_BLOCK).calls) == ("ok", [])


@pytest.mark.parametrize("step", [1, 1000])
def test_without_parallel_calls_the_first_ends_the_block(v4, step):
    first = CALL + param("city", "Paris")
    for rest in (END_CALL + CALL + END_CALL + END_BLOCK, CALL + END_CALL + END_BLOCK, END_CALL + "text", END_BLOCK):
        answer = read(v4, "ok\n\n" + BLOCK + first + rest, step, parallel_calls=False)
        assert (answer.content, answer.calls, answer.closed) == ("ok", [PARIS], [0])


def test_text_between_tags_is_dropped(v4):
    text = BLOCK + "x" + CALL + "y" + param("city", "Paris") + "z" + END_CALL + "junk" + CALL + END_CALL + END_BLOCK
    assert read(v4, text).calls == [PARIS, ("get_weather", "{}")]


def test_string_values_arrive_as_they_are_written(v4):
    value = ' é"\\\n\t\x01/ </think> <think> <b> </ <｜x <｜DSML｜ ｜DSML｜ '
    ids = v4.encode(BLOCK + CALL + f'<｜DSML｜parameter name="city" string="true">{value}')
    parser = OutputParser(v4, tools=TOOLS)
    pieces = [d.text for i in ids for d in parser.push([i])]
    assert len(pieces) > 10 and "".join(pieces).startswith('{"city": " é\\"\\\\\\n\\t\\u0001/')
    text = BLOCK + CALL + param("city", value) + END_CALL + END_BLOCK
    for step in (1, 1000):
        assert json.loads(read(v4, text, step).arguments[0]) == {"city": value}


def test_other_values_wait_for_their_end(v4):
    parser = OutputParser(v4, tools=TOOLS)
    ids = v4.encode(BLOCK + CALL + '<｜DSML｜parameter name="days" string="false">[1, 2')
    assert "".join(d.text for i in ids for d in parser.push([i])) == '{"days": '
    rest = parser.push(v4.encode(", 3]</｜DSML｜parameter>"))
    assert [d.text for d in rest] == ["[1, 2, 3]"]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("7", 7),
        (" 7 \n", 7),
        ("7x", "7x"),
        ("", ""),
        ("NaN", "NaN"),
        ("-Infinity", "-Infinity"),
        ('{"a": [1.50, null]}', {"a": [1.5, None]}),
        ("{'a': 1}", "{'a': 1}"),
        ("[" * 100_000, "[" * 100_000),
        ('"q"', "q"),
    ],
)
def test_a_value_that_is_no_json_becomes_a_string(v4, written, meant):
    text = BLOCK + CALL + param("days", written, "false") + END_CALL + END_BLOCK
    assert json.loads(read(v4, text, 100).arguments[0]) == {"days": meant}


def test_a_number_of_any_length_is_json(v4):
    text = BLOCK + CALL + param("days", "9" * 10_000, "false") + END_CALL + END_BLOCK
    assert read(v4, text, 100).arguments[0] == '{"days": ' + "9" * 10_000 + "}"


def test_a_key_twice_appears_twice_and_the_last_counts(v4):
    arguments = read(v4, BLOCK + CALL + param("city", "a") + param("city", "b") + END_CALL + END_BLOCK).arguments[0]
    assert arguments == '{"city": "a", "city": "b"}' and json.loads(arguments) == {"city": "b"}


def test_keys_with_odd_characters(v4):
    for key in ('a"b', "a>b", "a<b", "ü ｜", "a\nb"):
        assert json.loads(read(v4, BLOCK + CALL + param(key, "v") + END_CALL + END_BLOCK).arguments[0]) == {key: "v"}


@pytest.mark.parametrize("size", [2, 3, 1000])
def test_pieces_join_into_fewer_that_say_the_same(v4, size):
    text = "ok" + BLOCK + CALL + param("city", "Paris") + END_CALL + '<｜DSML｜invoke name="noop"/>' + END_BLOCK
    pieces = read(v4, "hm</think>" + text, starts_in="reasoning").deltas
    joined = []
    for at in range(0, len(pieces), size):
        joined.append(pieces[at])
        for piece in pieces[at + 1 : at + size]:
            if (both := joined[-1].joined(piece)) is None:
                joined.append(piece)
            else:
                joined[-1] = both
    assert len(joined) < len(pieces)
    for delta in joined:
        assert delta.call is None or delta.call.name in ("get_weather", "noop")
    if size == 1000:
        assert [(d.kind, d.text) for d in joined[:2]] == [("reasoning", "hm"), ("content", "ok")]
        assert [(d.text, d.call.index, d.call.opens, d.call.closes) for d in joined[2:]] == [
            ('{"city": "Paris"}', 0, True, True),
            ("{}", 1, True, True),
        ]
    assert "".join(d.text for d in joined) == "".join(d.text for d in pieces)
    assert [t for d in joined for t in d.tokens] == [t for d in pieces for t in d.tokens]


BROKEN = {
    "self-closed": (BLOCK + '<｜DSML｜invoke name="noop"/>\n' + END_BLOCK, "", [("noop", "{}")]),
    "self-closed, bare": ('ok\n<｜DSML｜invoke name="noop" />', "ok", [("noop", "{}")]),
    "object as body": (BLOCK + CALL + ' {"city": "Paris"} \n' + END_CALL + END_BLOCK, "", [PARIS]),
    "list as body": (BLOCK + CALL + "[1]\n" + END_CALL + END_BLOCK, "", [("get_weather", "{}")]),
    "broken object as body": (BLOCK + CALL + '{"city": Paris}' + END_CALL + END_BLOCK, "", [("get_weather", "{}")]),
    "body and parameter": (BLOCK + CALL + '{"a": 1}' + param("city", "Paris") + END_CALL + END_BLOCK, "", [PARIS]),
    "unknown function": (
        BLOCK + '<｜DSML｜invoke name="nope">' + param("x", "1") + END_CALL + END_BLOCK,
        "",
        [("nope", '{"x": "1"}')],
    ),
    "stray closer": ("a</｜DSML｜invoke>b", "ab", []),
    "stray closers": ("a\n\n</｜DSML｜parameter>\n</｜DSML｜tool_calls>\nb", "a\n\n\n\nb", []),
    "stray parameter": ("a " + param("k", "v").strip() + " b", "a v b", []),
    "stray fragment": ("a <｜DSML｜ b ｜DSML｜ c<｜DSML｜tool_box>", "a  b  cool_box>".replace("ool", "tool"), []),
    "tag without its bracket": ("a ｜DSML｜tool_calls> b", "a  b", []),
    "call without a name": ("a<｜DSML｜invoke>b", "ab", []),
    "fragment at the end": ("a\n\n<｜DSML｜tool_ca", "a", []),
    "bracket at the end": ("a\n\n<", "a\n\n<", []),
    "newlines at the end": ("a\n\n", "a\n\n", []),
    "value ended by the call": (
        BLOCK + CALL + '<｜DSML｜parameter name="city" string="true">Paris' + END_CALL + END_BLOCK,
        "",
        [PARIS],
    ),
    "value ended by the block": (
        BLOCK + CALL + '<｜DSML｜parameter name="city" string="true">Paris' + END_BLOCK + "x",
        "",
        [PARIS],
    ),
    "value ended by the next": (
        BLOCK + CALL + '<｜DSML｜parameter name="city" string="true">Paris' + param("days", 2, "false") + END_CALL,
        "",
        [weather(("city", '"Paris"'), ("days", 2))],
    ),
    "call ended by the next": (
        BLOCK + CALL + param("city", "Paris") + CALL + param("city", "Paris") + END_CALL + END_BLOCK,
        "",
        [PARIS, PARIS],
    ),
    "call ended by the block": (BLOCK + CALL + param("city", "Paris") + END_BLOCK, "", [PARIS]),
    "block twice": (BLOCK + BLOCK + CALL + param("city", "Paris") + END_CALL + END_BLOCK, "", [PARIS]),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("step", [1, 2, 1000])
def test_broken_markup(v4, name, step):
    text, content, calls = BROKEN[name]
    answer = read(v4, text, step)
    assert (answer.content, answer.calls) == (content, calls)
    assert answer.closed == list(range(len(calls)))


@pytest.mark.parametrize(
    ("key", "written", "meant"),
    [("city", "12", "12"), ("days", "12", 12), ("days", "x", "x"), ("other", "12", 12), ("other", "{a", "{a")],
)
def test_a_parameter_that_does_not_say_its_kind(v4, key, written, meant):
    for kind in ("", ' string="maybe"'):
        tag = f'<｜DSML｜parameter name="{key}"{kind}>{written}</｜DSML｜parameter>\n'
        assert json.loads(read(v4, BLOCK + CALL + tag + END_CALL + END_BLOCK).arguments[0]) == {key: meant}


@pytest.mark.parametrize(
    ("tail", "arguments"),
    [
        ("", ""),
        (param("city", "Paris"), '{"city": "Paris"'),
        ('<｜DSML｜parameter name="city" string="true">Par', '{"city": "Par'),
        ('<｜DSML｜parameter name="city" string="true">Par<', '{"city": "Par<'),
        ('<｜DSML｜parameter name="city" string="true">Par</｜DSML｜para', '{"city": "Par'),
        ('<｜DSML｜parameter name="days" string="false">1', '{"days": '),
        ('<｜DSML｜parameter name="da', ""),
        ('{"city": "Paris"}', ""),
    ],
)
def test_a_call_that_is_left_open_stays_open(v4, tail, arguments):
    for step in (1, 1000):
        answer = read(v4, "ok\n\n" + BLOCK + CALL + tail, step)
        assert (answer.content, answer.calls) == ("ok", [("get_weather", arguments)])
        assert answer.parser.complete_calls == 0 and answer.closed == []


def test_a_tag_too_long_is_given_up(v4):
    text = "a <｜DSML｜invoke name=" + "x" * (MAX_TAG + 10) + "> b"
    for step in (1, 7, 10_000):
        answer = read(v4, text, step)
        assert (answer.content, answer.calls) == ("a  name=" + "x" * (MAX_TAG + 10) + "> b", [])


def test_without_tools_markup_is_content(v4):
    text = "ok\n\n" + BLOCK + CALL + param("city", "Paris") + END_CALL + END_BLOCK
    assert read(v4, text, tools=()).content == text
    assert read(v4, text, raw=True).content == text


def test_markup_spelled_with_ordinary_tokens_is_text(v4):
    ids = [*v4.encode("ok\n\n" + BLOCK, added_tokens=False), EOS]
    assert DSML not in ids
    assert Answer(OutputParser(v4, tools=TOOLS), [[i] for i in ids]).content == "ok\n\n" + BLOCK


def test_brackets_that_no_marker_follows_are_text(v4):
    text = "a < b, </ c <<d\n<\n</\n\nif x<y: <tool_calls> </b>"
    for step in (1, 2, 1000):
        assert read(v4, text, step).content == text
        assert read(v4, text, step, starts_in="reasoning").reasoning == text


def test_stop_strings_count_in_prose_alone(v4):
    block = BLOCK + CALL + param("city", "Paris") + END_CALL + END_BLOCK
    answer = read(v4, "ok\n\n" + block, stop=["Paris", "tool", "\n\n", "<"])
    assert (answer.content, answer.calls, answer.parser.matched_stop) == ("ok", [PARIS], None)
    answer = read(v4, "so Pa" + block, stop=["Paris"])
    assert (answer.content, answer.calls, answer.parser.matched_stop) == ("so Pa", [PARIS], None)
    for step in (1, 1000):
        answer = read(v4, "ok\n\nthen " + block, step, stop=["\n\n"])
        assert (answer.content, answer.calls, answer.parser.matched_stop) == ("ok", [], "\n\n")
    parser = OutputParser(v4, tools=TOOLS, stop=["\n\n"])
    parser.push([*v4.encode("ok\n\n"), EOS])
    assert parser.matched_stop == "\n\n"


def test_broken_characters_around_markup(v4):
    half = 28927  # the first bytes of an emoji
    ids = [half, *v4.encode("\n" + BLOCK + CALL + '<｜DSML｜parameter name="city" string="true">'), half]
    ids += [*v4.encode("</｜DSML｜parameter>" + END_CALL), EOS]
    for step in (1, 1000):
        pushes = [ids[at : at + step] for at in range(0, len(ids), step)]
        answer = Answer(OutputParser(v4, tools=TOOLS), pushes)
        assert (answer.content, answer.calls) == ("\ufffd", [weather(("city", '"\ufffd"'))])


def test_tokens_ride_on_their_prose_and_none_on_markup(v4):
    pieces = ["Hi", " you", ".\n\n", "<", DSML, "tool", "_c", "alls", ">"]
    ids = [i for piece in pieces for i in ([piece] if isinstance(piece, int) else v4.encode(piece))]
    assert len(ids) == len(pieces)
    parser = OutputParser(v4, tools=TOOLS)
    deltas = parser.push(ids, ids) + parser.finish()
    assert [(d.text, d.tokens, d.logprobs) for d in deltas] == [("Hi you.", (0, 1, 2), tuple(ids[:3]))]
    ids = v4.encode("a</｜DSML｜invoke> b")
    parser = OutputParser(v4, tools=TOOLS)
    deltas = [d for i in ids for d in parser.push([i])] + parser.finish()
    assert [(d.text, d.tokens) for d in deltas] == [("a", (0,)), (" b", (len(ids) - 1,))]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.text(st.characters(exclude_characters='">', exclude_categories=["Cs"]), max_size=8)
CALLS = st.lists(st.tuples(st.sampled_from(["get_weather", "noop", "x-Y_9"]), st.dictionaries(KEYS, JSON)), max_size=3)


@settings(max_examples=80, deadline=None)
@given(CALLS.filter(bool), st.integers(1, 9))
def test_what_the_encoder_writes_is_read_back(v4, calls, step):
    prompt = Prompt()
    prompt.text("ok")
    add_calls(prompt, [ToolCall(str(at), name, json.dumps(arguments)) for at, (name, arguments) in enumerate(calls)])
    ids = [*prompt.encode(v4), EOS]
    answer = Answer(OutputParser(v4, tools=TOOLS), [ids[at : at + step] for at in range(0, len(ids), step)])
    assert answer.content == "ok" and answer.names == [name for name, _ in calls]
    assert [json.loads(text) for text in answer.arguments] == [arguments for _, arguments in calls]
    assert answer.arguments == [json.dumps(arguments, ensure_ascii=False) for _, arguments in calls]


FRAGMENTS = st.lists(
    st.sampled_from(
        [BLOCK, END_BLOCK, CALL, END_CALL, "<｜DSML｜parameter ", 'name="city"', ' string="true"', ">", "/>", "<", "</"]
        + [
            "｜DSML｜",
            "invoke",
            "tool_calls>",
            "</｜DSML｜parameter>",
            "\n",
            "\n\n",
            "text",
            '{"a": 1}',
            '"',
            "</think>",
        ]
        + [
            param("city", "Paris"),
            param("days", 2, "false"),
            '<｜DSML｜parameter name="days" string="false">',
            "<think>",
        ]
    )
    | st.text(max_size=3),
    max_size=14,
).map("".join)


@settings(max_examples=400, deadline=None)
@given(FRAGMENTS, st.lists(st.integers(1, 9)), st.data())
def test_any_cut_into_pushes_gives_the_same(v4, text, steps, data):
    ids = data.draw(st.lists(st.sampled_from([28927, 225, 0, EOS]), max_size=1)) + v4.encode(text)
    options = {
        "starts_in": data.draw(st.sampled_from(["reasoning", "content"])),
        "stop": data.draw(st.sampled_from([[], ["ext"], ["\n"], ["<", "te"]])),
    }
    parsers = [OutputParser(v4, tools=TOOLS, **options) for _ in range(2)]
    cuts = [0]
    for step in steps:
        cuts.append(min(len(ids), cuts[-1] + step))
    whole = Answer(parsers[0], [ids])
    pieces = Answer(parsers[1], [*(ids[a:b] for a, b in pairwise(cuts)), ids[cuts[-1] :]])
    assert (whole.reasoning, whole.content, whole.calls) == (pieces.reasoning, pieces.content, pieces.calls)
    assert MARK not in whole.content + whole.reasoning + "".join(whole.arguments)
    assert "｜DSML｜" not in whole.content + whole.reasoning
    for index in whole.closed:
        assert isinstance(json.loads(whole.arguments[index]), dict)
    for kind in ("reasoning", "content"):
        tokens = [[t for d in answer.deltas if d.kind == kind for t in d.tokens] for answer in (whole, pieces)]
        assert tokens[0] == tokens[1] == sorted(set(tokens[0]))
    for name in ("matched_stop", "kept_ids", "reasoning_tokens", "kind", "complete_calls"):
        assert getattr(parsers[0], name) == getattr(parsers[1], name)


@pytest.mark.parametrize(
    "unit",
    [
        "\n",
        "<",
        MARK,
        f"<{MARK}",
        f"</{MARK}invoke>",
        f'<{MARK}invoke name="noop"/>',
        f'<{MARK}invoke name="noop"><{MARK}parameter name="x" string="true">a b',
        f"<{MARK}invoke name=>>>>>>>>>",
    ],
)
def test_time_grows_with_the_length(unit):
    def seconds(count, step):
        text = unit * count
        parser = ToolCallParser(TOOLS)
        start = time.process_time()
        for at in range(0, len(text), step):
            parser.feed(text[at : at + step])
        parser.flush()
        return time.process_time() - start

    for step in (1, 1 << 30):
        short, long = (min(seconds(size // len(unit), step) for _ in range(3)) for size in (4000, 40_000))
        assert long < 10 * 4 * short + 0.05


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
@pytest.mark.parametrize("before", ["", "ok <|DSML a ｜DS\n\n"])
def test_where_a_grammar_shapes_calls_spelled_markup_is_markup(v4, step, before):
    value = "a ｜D </｜DSML <｜DSML｜x｜ 日本"
    text = before + BLOCK + CALL + param("city", value) + param("days", "3", "false") + END_CALL + END_BLOCK
    ids = [*v4.encode(text, added_tokens=False), EOS]
    assert DSML not in ids
    pushes = [ids[at : at + step] for at in range(0, len(ids), step)]
    answer = Answer(OutputParser(v4, tools=TOOLS, spelled_calls=True), pushes)
    assert answer.content == before.removesuffix("\n\n")
    assert json.loads(answer.arguments[0]) == {"city": value, "days": 3} and answer.closed == [0]
    plain = Answer(OutputParser(v4, tools=TOOLS), pushes)
    assert plain.content == text and not plain.calls


def test_spelled_markup_that_comes_to_nothing_is_prose(v4):
    for text in ("a ｜DSM", "a </", "a <｜", "｜"):
        ids = [*v4.encode(text, added_tokens=False), EOS]
        answer = Answer(OutputParser(v4, tools=TOOLS, spelled_calls=True), [[i] for i in ids])
        assert (answer.content, answer.calls) == (text, [])
