"""Grammars as the compiler prints them: rules by name, and equal ones merged.

The compiler writes the rules of JSON values and of tool values anew for every tool, 55 of them; what it does with a
grammar grows faster than its rules. Here rules that mean the same become one, also those that refer to each other.
"""

import re
from collections.abc import Hashable, Mapping
from typing import Final

_HEAD: Final = re.compile(r"^(\w+) ::= ", re.MULTILINE)
# What may look like a name but is none: literals, character classes; then names.
_TOKEN: Final = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|[A-Za-z_]\w*')
_ROOT: Final = "root"


def split(text: str) -> dict[str, str]:
    """Bodies by name, in their order."""
    heads = list(_HEAD.finditer(text))
    ends = [*(head.start() for head in heads[1:]), len(text)]
    return {head[1]: text[head.end() : end].rstrip("\n") for head, end in zip(heads, ends, strict=True)}


def merged(text: str) -> str:
    """The same language with one rule of each meaning; rules that nothing leads to are left out.

    As automata are made minimal: rules of equal form are taken as equal until what they refer to tells them apart.
    """
    bodies = split(text)
    forms, references = dict[str, str](), dict[str, list[str]]()
    for name, body in bodies.items():
        found = list[str]()

        def blank(token: re.Match[str], found: list[str] = found) -> str:
            if token[0] not in bodies:
                return token[0]
            found.append(token[0])
            return "\0"

        forms[name], references[name] = _TOKEN.sub(blank, body), found
    kinds = _numbered(forms)
    while True:
        finer = _numbered({name: (kinds[name], *(kinds[it] for it in references[name])) for name in bodies})
        if len(set(finer.values())) == len(set(kinds.values())):
            break
        kinds = finer
    chosen = dict[int, str]()
    for name in (_ROOT, *bodies):
        chosen.setdefault(kinds[name], name)
    reached, left = {_ROOT}, [_ROOT]
    while left:
        for it in references[left.pop()]:
            if (name := chosen[kinds[it]]) not in reached:
                reached.add(name)
                left.append(name)

    def renamed(token: re.Match[str]) -> str:
        return chosen[kinds[token[0]]] if token[0] in bodies else token[0]

    return "".join(f"{name} ::= {_TOKEN.sub(renamed, bodies[name])}\n" for name in bodies if name in reached)


def _numbered(keys: Mapping[str, Hashable]) -> dict[str, int]:
    numbers = dict[Hashable, int]()
    return {name: numbers.setdefault(key, len(numbers)) for name, key in keys.items()}
