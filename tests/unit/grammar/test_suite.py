"""The official JSON Schema test suite, draft 2020-12: what is compiled accepts nothing that its schema rejects."""

import json
from pathlib import Path

from grammar_svc import compiler
from grammar_svc.verdict import SourceError
from meshkit.types import GrammarKind

SUITE = json.loads((Path(__file__).parents[2] / "data" / "json_schema_test_suite.json").read_text())["keywords"]


def test_no_keyword_is_silently_ignored(small):
    wrong, enforced = [], set()
    for keyword, groups in SUITE.items():
        for group in groups:
            try:
                grammar = small.compile(GrammarKind.JSON_SCHEMA, json.dumps(group["schema"]))
            except SourceError:
                continue  # refused, which is allowed; the coverage benchmark counts
            enforced.add(keyword)
            for value, valid in group["tests"]:
                text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
                matcher = compiler.new_matcher(grammar, [small.vocabulary.eos_ids[0]])
                if not valid and matcher.accept_string(text) and matcher.is_completed():
                    wrong.append((keyword, group["description"], value))
    assert not wrong
    assert {"type", "properties", "items", "enum", "anyOf", "ref", "required", "pattern"} <= enforced
