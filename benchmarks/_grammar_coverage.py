"""Which JSON Schema keywords are enforced, which refused: our own table, and the official test suite, group by group.

A group counts as wrong if any instance that its schema rejects is accepted: that would be a keyword silently ignored.
It is narrower if an instance that the schema takes is not: text of a closed object, keys in another order, an escape.
"""

import collections
import json
from typing import Any

from benchmarks import _grammar_cases as cases
from benchmarks._grammar_judges import DATA
from grammar_svc import compiler
from grammar_svc.limits import SourceLimits
from grammar_svc.sources import read_source
from grammar_svc.verdict import SourceError
from grammar_svc.vocabulary import Vocabulary
from meshkit.types import GrammarKind


def compiled_or_refused(made: compiler.Compiler, schema: Any) -> tuple[Any, str]:
    """The compiled grammar, or None and the place that is refused."""
    try:
        source = read_source(GrammarKind.JSON_SCHEMA, json.dumps(schema), SourceLimits())
        return compiler.compile_source(made, source), ""
    except SourceError as error:
        return None, error.place or "/"


def accepts(grammar: Any, value: Any) -> bool:
    """Whether the grammar takes this value, written as json.dumps or compactly."""
    for separators in ((", ", ": "), (",", ":")):
        matcher = compiler.new_matcher(grammar, [1])
        text = json.dumps(value, separators=separators, ensure_ascii=False)
        if matcher.accept_string(text) and matcher.is_completed():
            return True
    return False


def coverage(vocabulary: Vocabulary) -> dict[str, float | int | str]:
    """Both tables, printed, and their sums."""
    made = compiler.compiler(compiler.tokenizer_info(vocabulary), vocabulary)
    return own_table(made) | official_suite(made)


def own_table(made: compiler.Compiler) -> dict[str, float | int | str]:
    """Every case: enforced (accepts what is valid, rejects what is not), refused, or wrong."""
    counts = {"enforced": 0, "refused": 0, "wrong": 0}
    print(f"{'keyword':24}{'verdict':10} place or detail")
    for name, schema, good, bad in cases.KEYWORDS:
        grammar, place = compiled_or_refused(made, schema)
        verdict, detail = "refused", place
        if grammar is not None:
            wrong = [value for value in good if not accepts(grammar, value)]
            wrong += [value for value in bad if accepts(grammar, value)]
            verdict, detail = ("wrong", json.dumps(wrong)) if wrong else ("enforced", "")
        counts[verdict] += 1
        print(f"{name:24}{verdict:10} {detail}")
    return {f"keyword_cases_{verdict}": count for verdict, count in counts.items()}


def official_suite(made: compiler.Compiler) -> dict[str, float | int | str]:
    """JSON-Schema-Test-Suite, draft 2020-12: groups per keyword by verdict."""
    total: collections.Counter[str] = collections.Counter()
    suite = json.loads((DATA / "json_schema_test_suite.json").read_text())["keywords"]
    verdicts = ("enforced", "narrower", "refused", "wrong")
    print(f"\n{'keyword (test suite)':24}" + "".join(f"{verdict:>10}" for verdict in verdicts))
    for keyword, groups in suite.items():
        counts = collections.Counter(group_verdict(made, keyword, group) for group in groups)
        print(f"{keyword:24}" + "".join(f"{counts[verdict] or '':>10}" for verdict in verdicts))
        total += counts
    return {f"suite_groups_{verdict}": total[verdict] for verdict in verdicts}


def group_verdict(made: compiler.Compiler, keyword: str, group: dict[str, Any]) -> str:
    """Of one schema and its instances; `format` is an annotation in the suite, here it is enforced."""
    grammar, _ = compiled_or_refused(made, group["schema"])
    if grammar is None:
        return "refused"
    taken = [(value, valid, accepts(grammar, value)) for value, valid in group["tests"]]
    wrong = [value for value, valid, got in taken if got and not valid]
    for value in wrong:
        print(f"wrong: {keyword}, {group['description']}: takes {json.dumps(value)}")
    if wrong:
        return "wrong"
    return "narrower" if any(valid and not got for _, valid, got in taken) else "enforced"
