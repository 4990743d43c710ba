"""Constrained output at the gateway: what reaches the mesh, what is refused before it, and how verdicts are told."""

import asyncio
import json

import pytest

from gateway import generation
from meshkit.frames import Verdict
from meshkit.types import FinishReason, GrammarKind

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
USER = [{"role": "user", "content": "Tell me, please."}]
SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}, "required": ["b"]}
SCHEMA_TEXT = json.dumps(SCHEMA)
TAG = {"format": {"type": "regex", "pattern": "a+"}}
OFF = {"thinking": {"type": "disabled"}}


def base(path):
    return {CHAT: {"messages": USER}, COMPLETIONS: {"prompt": "Hi"}, GENERATE: {"text": "Hi"}}[path]


def tool(name, strict=None, **properties):
    parameters = {"type": "object", "properties": properties}
    function = {"name": name, "parameters": parameters} | ({} if strict is None else {"strict": strict})
    return {"type": "function", "function": function}


def named(name):
    return {"type": "function", "function": {"name": name}}


def some(mode, *names):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


async def grammar(served, path, extra):
    status, answer, _ = await served.post(path, {**base(path), **extra})
    assert status == 200, answer
    return served.mesh.starts[-1].grammar


@pytest.mark.parametrize(
    ("path", "extra", "kind", "text"),
    [
        (CHAT, {"response_format": {"type": "json_object"}}, "JSON_OBJECT", ""),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            "JSON_SCHEMA",
            SCHEMA_TEXT,
        ),
        (CHAT, {"response_format": {"type": "regex", "regex": "a|é"}}, "REGEX", "a|é"),
        (CHAT, {"response_format": {"type": "structural_tag", **TAG}}, "STRUCTURAL_TAG", json.dumps(TAG)),
        (CHAT, {"structured_outputs": {"json": SCHEMA}}, "JSON_SCHEMA", SCHEMA_TEXT),
        (CHAT, {"structured_outputs": {"json": SCHEMA_TEXT}}, "JSON_SCHEMA", SCHEMA_TEXT),
        (CHAT, {"structured_outputs": {"choice": ["a", "b"]}}, "CHOICE", '["a", "b"]'),
        (CHAT, {"structured_outputs": {"grammar": 'root ::= "a"', "json": None}}, "EBNF", 'root ::= "a"'),
        (CHAT, {"structured_outputs": {"json_object": True, "disable_fallback": True}}, "JSON_OBJECT", ""),
        (CHAT, {"structured_outputs": {"structural_tag": json.dumps(TAG)}}, "STRUCTURAL_TAG", json.dumps(TAG)),
        (COMPLETIONS, {"guided_json": SCHEMA}, "JSON_SCHEMA", SCHEMA_TEXT),
        (COMPLETIONS, {"guided_regex": "a+"}, "REGEX", "a+"),
        (COMPLETIONS, {"guided_choice": ["yes"]}, "CHOICE", '["yes"]'),
        (COMPLETIONS, {"guided_grammar": 'root ::= "a"'}, "EBNF", 'root ::= "a"'),
        (CHAT, {"regex": "a+"}, "REGEX", "a+"),
        (CHAT, {"ebnf": 'root ::= "a"'}, "EBNF", 'root ::= "a"'),
        (CHAT, {"json_schema": SCHEMA_TEXT}, "JSON_SCHEMA", SCHEMA_TEXT),
        (GENERATE, {"json_schema": SCHEMA}, "JSON_SCHEMA", SCHEMA_TEXT),
        (GENERATE, {"json_schema": SCHEMA_TEXT}, "JSON_SCHEMA", SCHEMA_TEXT),
        (GENERATE, {"regex": "a+"}, "REGEX", "a+"),
        (GENERATE, {"sampling_params": {"json_schema": SCHEMA_TEXT}}, "JSON_SCHEMA", SCHEMA_TEXT),
        (GENERATE, {"sampling_params": {"regex": "a+"}}, "REGEX", "a+"),
        (GENERATE, {"sampling_params": {"ebnf": 'root ::= "a"'}}, "EBNF", 'root ::= "a"'),
        (GENERATE, {"sampling_params": {"structural_tag": json.dumps(TAG)}}, "STRUCTURAL_TAG", json.dumps(TAG)),
        (GENERATE, {"sampling_params": {"choice": ["a"]}}, "CHOICE", '["a"]'),
    ],
)
async def test_each_field_becomes_one_source_in_its_own_key_order(served, path, extra, kind, text):
    source = await grammar(served, path, {**extra, **(OFF if path == CHAT else {})})
    assert (source.kind, source.text) == (GrammarKind[kind], text)
    assert source.grammar_rev == "" and source.thinking is False


async def test_nothing_asked_for_is_no_constraint(served):
    for extra in ({}, {"response_format": {"type": "text"}}, {"response_format": None}, {"regex": None}):
        assert await grammar(served, CHAT, extra) is None
    assert await grammar(served, CHAT, {"tools": [tool("f")], "parallel_tool_calls": False}) is None
    assert await grammar(served, CHAT, {"tools": [tool("f", True)], "tool_choice": "none"}) is None


async def test_the_constraint_waits_for_the_end_of_the_thought(served):
    on = {"thinking": {"type": "enabled"}, "regex": "a+"}
    assert (await grammar(served, CHAT, on)).thinking
    assert not (await grammar(served, CHAT, {**on, **OFF})).thinking
    begun = [*USER, {"role": "assistant", "reasoning_content": "So", "content": "It", "prefix": True}]
    assert not (await grammar(served, CHAT, {**on, "messages": begun})).thinking
    assert (await grammar(served, GENERATE, {"regex": "a", "require_reasoning": True})).thinking
    assert not (await grammar(served, GENERATE, {"regex": "a"})).thinking


async def test_formats_are_rendered_into_the_system_part(served):
    async def prompt(extra):
        await grammar(served, CHAT, {**OFF, **extra})
        return served.mesh.tokenizer.decode(served.mesh.starts[-1].prompt.tolist(), skip_special_tokens=False)

    plain = await prompt({})
    shaped = await prompt({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "name": "n"}}})
    assert shaped.endswith(plain.removeprefix("<｜begin▁of▁sentence｜>"))
    assert f"following schema to reply:\n{SCHEMA_TEXT}<｜User｜>" in shaped and "## Response Format" in shaped
    assert "JSON object ONLY" in await prompt({"response_format": {"type": "json_object"}})
    assert await prompt({"response_format": {"type": "regex", "regex": "a"}}) == plain
    assert await prompt({"structured_outputs": {"json": SCHEMA}}) == plain
    auto = await prompt({"tools": [tool("f")]})
    assert await prompt({"tools": [tool("f")], "tool_choice": "required"}) == auto
    assert await prompt({"tools": [tool("f")], "tool_choice": named("f")}) == auto


FORCED = {"tools": [tool("f", None, x={"type": "integer"}), tool("g", True, y={"type": "string"})]}


@pytest.mark.parametrize(
    ("extra", "names", "choice", "parallel"),
    [
        ({"tool_choice": "required"}, ["f", "g"], "required", True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ["f", "g"], "required", False),
        ({"tool_choice": named("g")}, ["g"], {"name": "g"}, True),
        ({}, ["f", "g"], "auto", True),
        ({"tool_choice": some("auto", "f")}, ["f"], "auto", True),
        ({"tool_choice": some("required", "g", "f")}, ["f", "g"], "required", True),
    ],
)
async def test_calls_that_need_a_grammar_get_one(served, extra, names, choice, parallel):
    source = await grammar(served, CHAT, {**FORCED, **extra})
    payload = json.loads(source.text)
    assert source.kind == GrammarKind.DSML_TOOLS
    assert [item["name"] for item in payload["tools"]] == names
    assert (payload["tool_choice"], payload["parallel"]) == (choice, parallel)
    for item in payload["tools"]:  # a strict one is closed as its prompt shows it
        assert item["strict"] is (item["name"] == "g")
        assert (item["parameters"].get("additionalProperties") is False) is item["strict"]


async def test_a_format_beside_tools_allows_either(served):
    source = await grammar(served, CHAT, {**FORCED, "response_format": {"type": "json_object"}, **OFF})
    answer, block = json.loads(source.text)["format"]["elements"]
    assert source.kind == GrammarKind.STRUCTURAL_TAG and answer["type"] == "json_schema"
    begin, calls, end = block["elements"]
    assert begin["value"] == "\n\n<｜DSML｜tool_calls>\n" and end["value"] == "</｜DSML｜tool_calls>"
    loose, strict = (invoke["content"]["json_schema"] for invoke in calls["tags"])
    assert loose == {"type": "object", "additionalProperties": True} and strict["required"] == ["y"]
    source = await grammar(served, CHAT, {**FORCED, "regex": "a+", "tool_choice": "none"})
    assert source.kind == GrammarKind.REGEX


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"regex": ""}, "regex"),
        ({"regex": 7}, "regex"),
        ({"ebnf": []}, "ebnf"),
        ({"json_schema": 5}, "json_schema"),
        ({"choice": []}, "choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"structural_tag": {}}, "structural_tag"),
        ({"regex": "a" * (600 << 10)}, "regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": "x"}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": "{}"}}}, "response_format"),
        ({"response_format": {"type": "regex", "pattern": "a"}}, "response_format.regex"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "guided_json": {}}, "response_format"),
        ({**FORCED, "tool_choice": "required", "regex": "a"}, "regex"),
        ({**FORCED, "tool_choice": "sometimes"}, "tool_choice"),
        ({**FORCED, "tool_choice": some("none", "f")}, "tool_choice"),
        ({**FORCED, "tool_choice": some("auto", "h")}, "tool_choice"),
        ({**FORCED, "tool_choice": some("auto")}, "tool_choice"),
        ({**FORCED, "tool_choice": "required", "task": "query"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({**FORCED, "structural_tag": {"structures": []}}, "structural_tag"),
        ({"tools": [{"type": "function", "function": {
            "name": "f", "strict": True, "parameters": {
                "type": "object", "properties": {}, "additionalProperties": True}}}]}, "tools[0].function.parameters"),
    ],
)  # fmt: skip
async def test_what_no_grammar_could_be_is_refused_here(served, extra, param):
    status, answer, _ = await served.post(CHAT, {**base(CHAT), **extra})
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert not served.mesh.starts


async def test_native_constraints_are_named_where_they_stand(served):
    served.mesh.refusal = (Verdict.BAD_GRAMMAR, "no", 0, "character 3")
    for extra, param in (({"regex": "a"}, "regex"), ({"sampling_params": {"regex": "a"}}, "sampling_params.regex")):
        status, answer, _ = await served.post(GENERATE, {"text": "Hi", **extra})
        assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("extra", "place", "param"),
    [
        ({"regex": "[.*"}, "character 0", "regex"),
        ({"response_format": {"type": "json_object"}}, "", "response_format"),
        ({**FORCED, "tool_choice": named("g")}, "/tools/0/parameters/properties/y", "tools[1].function"),
        ({**FORCED, "tool_choice": "required"}, "/tools", "tool_choice"),
    ],
)
async def test_a_bad_grammar_is_a_400_with_field_and_place(served, stream, extra, place, param):
    served.mesh.refusal = (Verdict.BAD_GRAMMAR, "is wrong", 0, place)
    status, answer, _ = await served.post(CHAT, {**base(CHAT), "stream": stream, **extra})
    error = answer["error"]
    assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")
    shown = place.removeprefix("/tools/0")
    assert error.get("place", "") == shown and "is wrong" in error["message"] and shown in error["message"]
    served.mesh.refusal = None
    assert (await served.post(CHAT, base(CHAT)))[0] == 200


async def test_no_grammar_service_is_501_and_a_busy_one_503(served):
    body = {**base(CHAT), "regex": "a", "stream": True}
    served.mesh.refusal = (Verdict.BAD_GRAMMAR, "no grammar service is configured", 0, "scheduler.grammar")
    status, answer, _ = await served.post(CHAT, body)
    assert status == 501 and answer["error"]["param"] == "regex" and "no grammar service" in answer["error"]["message"]
    served.mesh.refusal = (Verdict.GRAMMAR_LATER, "the compile took too long", 2500)
    status, answer, headers = await served.post(CHAT, body)
    assert status == 503 and headers["Retry-After"] == "3" and answer["error"]["code"] == "grammar_later"


async def test_a_stream_does_not_begin_before_the_verdict(served, monkeypatch):
    monkeypatch.setattr(generation, "KEEP_ALIVE_SECONDS", 0.05)
    served.mesh.undecided = True
    served.mesh.say = lambda start, choice: served.mesh.text("aaa", hold=True)
    body = {**base(CHAT), "regex": "a+", "stream": True}
    asking = asyncio.create_task(served.session.post(served.url + CHAT, json=body))
    await asyncio.sleep(0.3)
    assert not asking.done(), "a keep-alive was sent while the grammar could still be refused"
    served.mesh.undecided = False
    answer = await asyncio.wait_for(asking, 2)
    assert answer.status == 200
    served.mesh.released.set()
    assert b"[DONE]" in await answer.read()


@pytest.mark.parametrize("code", ["sampling_fault", "grammar_failed"])
async def test_a_fault_of_one_row_is_a_typed_error(served, code):
    served.mesh.say = lambda start, choice: served.mesh.text("a", finish=FinishReason.ERROR, error=(code, "it broke"))
    status, answer, _ = await served.post(CHAT, {**base(CHAT), "regex": "a"})
    assert (status, answer["error"]["code"], answer["error"]["message"]) == (500, code, "it broke")


async def test_constrained_content_keeps_its_newlines(served):
    served.mesh.say = lambda start, choice: served.mesh.text("\n\nab", think="hm\n")
    body = {**base(CHAT), "thinking": {"type": "enabled"}}
    free = (await served.post(CHAT, body))[1]["choices"][0]["message"]
    exact = (await served.post(CHAT, {**body, "regex": "\n\nab"}))[1]["choices"][0]["message"]
    assert (free["content"], exact["content"]) == ("ab", "\n\nab")
    assert exact["reasoning_content"] == "hm"
    served.mesh.say = lambda start, choice: served.mesh.text("\nab")
    assert (await served.post(CHAT, {**base(CHAT), **OFF, "regex": "\nab"}))[1]["choices"][0]["message"]["content"] == (
        "\nab"
    )
