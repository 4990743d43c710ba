"""Cases from other servers' trackers, beside the report they come from: those that hang on ids of the real vocabulary.

`tests/unit/gateway/test_tracker_cases.py` says where the others are.
"""

import json

from gateway.text.chat_encoding import ChatOptions, encode_chat, parse_messages, parse_tools
from gateway.text.chat_messages import ToolSpec
from gateway.text.output_parser import OutputParser
from meshkit.types import TokenLogprobs

BOS, EOS, DSML = 0, 1, 128825
INTEGERS = {"type": "object", "properties": {"zip": {"type": "integer"}, "n": {"type": "integer"}}}
TOOL = ToolSpec("f", parameters=INTEGERS)
INVOKE = '<｜DSML｜invoke name="f">\n'


def parameter(name, value, string):
    return f'<｜DSML｜parameter name="{name}" string="{string}">{value}</｜DSML｜parameter>\n'


def deltas_of(parser, ids):
    """One push per id, as of an engine that steps token by token."""
    return [delta for i in ids for delta in parser.push([i])] + parser.finish()


def test_e1_the_start_of_a_block_in_the_models_own_ids(v4):
    """https://github.com/vllm-project/vllm/issues/40801"""
    pieces = ["Let me check.", "\n\n", "<", DSML, "tool", "_c", "alls", ">\n", INVOKE + "</｜DSML｜invoke>\n"]
    ids = [i for piece in pieces for i in ([piece] if isinstance(piece, int) else v4.encode(piece))]
    ids += [*v4.encode("</｜DSML｜tool_calls>"), EOS]
    parser = OutputParser(v4, tools=(TOOL,))
    deltas = deltas_of(parser, ids)
    texts = [delta.text for delta in deltas if delta.kind == "content"]
    assert "".join(texts) == "Let me check."
    assert not any(mark in text for text in texts for mark in ("<", "DSML", "tool_calls>"))
    assert parser.complete_calls == 1


def test_e5_characters_of_several_tokens_come_whole(v4):
    """https://github.com/antonellof/ferrox/issues/124"""
    ids, entries = [28927, 225, 619], [TokenLogprobs((i,), (-0.5,)) for i in (28927, 225, 619)]
    parser = OutputParser(v4)
    deltas = [delta for i, entry in zip(ids, entries) for delta in parser.push([i], [entry])] + parser.finish()
    assert [delta.text for delta in deltas if delta.text] == ["😀", "é"]
    tokens = [entry.ids[0] for delta in deltas for entry in delta.logprobs]
    assert tokens == ids
    assert b"".join(v4.token_bytes(i) for i in tokens).decode() == "😀é"


def test_e14_the_default_effort_is_in_the_prompt(v4):
    """https://github.com/sgl-project/sglang/issues/33185"""
    options = ChatOptions(effort="high", effort_revision="ga")
    encoded = encode_chat(v4, parse_messages([{"role": "user", "content": "Hi"}]), options)
    assert len(encoded.ids) == 84 and encoded.ids[0] == BOS
    assert encoded.text.startswith("<｜begin▁of▁sentence｜>Reasoning Effort: Absolute maximum")


def test_e20_a_late_system_message_joins_the_system_part(v4):
    """https://github.com/sgl-project/sglang/issues/35433"""
    calling = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "You help."},
        {"role": "user", "content": "Call it."},
        {"role": "assistant", "content": "", "tool_calls": [calling]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
        {"role": "system", "content": "be brief"},
    ]
    tools = parse_tools([{"type": "function", "function": {"name": "f"}}])
    text = encode_chat(v4, parse_messages(messages), ChatOptions(tools=tools, effort="low")).text
    assert text.startswith("<｜begin▁of▁sentence｜>You help.\n\nbe brief")
    assert text.count("be brief") == 1 and text.endswith("<｜Assistant｜><think>")


def test_e21_special_ids_are_skipped_where_they_stand(v4):
    """https://github.com/vllm-project/vllm-ascend/issues/9767"""
    ids = [*v4.encode("ok"), BOS, *v4.encode("!"), EOS]
    deltas = deltas_of(OutputParser(v4, skip_special_tokens=True), ids)
    assert "".join(delta.text for delta in deltas) == "ok!"


def test_e22_the_written_kind_of_a_value_counts(v4):
    """https://github.com/vllm-project/vllm/pull/41241"""
    text = "<｜DSML｜tool_calls>\n" + INVOKE + parameter("zip", "007", "true") + parameter("n", "7", "false")
    ids = [*v4.encode(text + "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"), EOS]
    deltas = deltas_of(OutputParser(v4, tools=(TOOL,)), ids)
    assert json.loads("".join(delta.text for delta in deltas if delta.call)) == {"zip": "007", "n": 7}
