"""JSON Schema for the compiler: what it enforces passes, what it would ignore is refused by place and name.

`normalise` returns a schema of the same or a narrower meaning that XGrammar enforces whole: `type` is written out where
keywords imply it, `enum` keeps the values of its `type`, `oneOf` of disjoint branches becomes `anyOf`. Objects with
`properties` are closed unless `additionalProperties` opens them, and keys come in the order of the schema. A string of
bounded length holds no escapes, so no quotes or line breaks.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from grammar_svc.limits import SourceLimits, is_number
from grammar_svc.regexes import check_pattern
from grammar_svc.verdict import SourceError


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ANNOTATIONS: Final = _names(
    "title description default examples example $comment deprecated readOnly writeOnly $schema $id"
)
DEFINITIONS: Final = ("$defs", "definitions")
FORMATS: Final = _names(
    "email date time date-time duration ipv4 ipv6 hostname uuid uri uri-reference uri-template json-pointer "
    "relative-json-pointer"
)
_FAMILY: Final[Mapping[str, frozenset[str]]] = {
    "string": _names("minLength maxLength pattern format"),
    "number": _names("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf"),
    "object": _names(
        "properties required additionalProperties patternProperties propertyNames minProperties maxProperties "
        "unevaluatedProperties"
    ),
    "array": _names("items prefixItems minItems maxItems uniqueItems"),
}
_COMBINATORS: Final = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
ENFORCED: Final = frozenset({"type", *_COMBINATORS, *DEFINITIONS}.union(*_FAMILY.values()))
REFUSED: Final = _names(
    "not if then else contains minContains maxContains dependentRequired dependentSchemas dependencies "
    "unevaluatedItems additionalItems contentEncoding contentMediaType contentSchema $anchor $dynamicAnchor "
    "$dynamicRef $recursiveRef $recursiveAnchor $vocabulary nullable discriminator"
)
_LENGTHS: Final = re.compile(r"\^\.\{(\d{1,9}),(\d{0,9})\}\$")  # lengths in other words, and dearer ones
# The compiler's own rules take leading zeros, the 31st of any month, and labels of any length.
_OCTET: Final = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_DATE: Final = (
    "[1-9][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_TIME: Final = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL: Final = "[A-Za-z0-9]([A-Za-z0-9\\-]{0,30}[A-Za-z0-9])?"  # short ones: each character costs 5 ms to compile
_FORMAT_PATTERNS: Final[Mapping[str, str]] = {
    "ipv4": rf"^{_OCTET}\.{_OCTET}\.{_OCTET}\.{_OCTET}$",
    "hostname": rf"^{_LABEL}(\.{_LABEL}){{0,3}}$",
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
}
_TYPES: Final = _names("string number integer object array boolean null")
MAX_EXACT: Final = 2**53


def normalise(schema: Any, limits: SourceLimits, place: str = "") -> Any:
    """Raises SourceError with the JSON pointer (behind `place`) of what cannot be enforced."""
    walk = _Walk(schema, limits, place)
    result = walk.node(schema, place)
    for target, where in walk.refs:
        if target not in walk.seen:
            raise SourceError(f"$ref {target!r} names no schema of this document; use #/$defs/NAME", where)
    return result


class _Walk:
    """One document: which places hold schemas, and which are referred to."""

    def __init__(self, root: Any, limits: SourceLimits, place: str) -> None:
        self.root, self.limits, self.base = root, limits, place
        self.seen: set[str] = set()
        self.refs: list[tuple[str, str]] = []

    def node(self, schema: Any, place: str) -> Any:
        self.seen.add("#" + place.removeprefix(self.base))
        if schema is True:
            return True
        if not isinstance(schema, dict):
            raise SourceError("false matches nothing" if schema is False else "a schema is an object or true", place)
        for key in schema:
            if key in REFUSED:
                raise SourceError(f"the keyword {key!r} cannot be enforced; remove it", f"{place}/{key}")
            if key not in ENFORCED and key not in ANNOTATIONS and not key.startswith("x-"):
                raise SourceError(f"unknown keyword {key!r}; remove it or call it x-{key}", f"{place}/{key}")
        kept = {key: value for key, value in schema.items() if key in ENFORCED and key not in DEFINITIONS}
        heads = [key for key in _COMBINATORS if key in kept]
        result = self._combined(heads, kept, place) if heads else self._typed(kept, place)
        for key in DEFINITIONS:
            if key in schema:
                result = result if isinstance(result, dict) else {}
                result[key] = self._named(schema[key], f"{place}/{key}")
        return result

    def _named(self, named: Any, place: str) -> dict[str, Any]:
        if not isinstance(named, dict):
            raise SourceError("must be an object of schemas", place)
        return {name: self.node(sub, f"{place}/{name}") for name, sub in named.items()}

    # ---- combinators ------------------------------------------------------------------------------------------------

    def _combined(self, heads: list[str], kept: dict[str, Any], place: str) -> dict[str, Any]:
        head = heads[0]
        allowed = {head, "type"} if head in ("const", "enum") else {head}
        for key in kept:
            if key not in allowed:
                raise SourceError(f"{key!r} beside {head!r} is not enforced; move it into the branch", f"{place}/{key}")
        value, here = kept[head], f"{place}/{head}"
        if head == "$ref":
            return self._ref(value, here)
        if head in ("const", "enum"):
            return self._values(head, value, kept.get("type"), here)
        if not isinstance(value, list) or not value:
            raise SourceError("must be a list of at least one schema", here)
        branches = [self.node(branch, f"{here}/{index}") for index, branch in enumerate(value)]
        if head == "allOf":
            if len(branches) > 1:
                raise SourceError("allOf of several schemas cannot be enforced; merge them", here)
            return {"allOf": branches}
        if head == "oneOf" and not _disjoint(branches):
            raise SourceError("oneOf of schemas that may overlap cannot be enforced; use anyOf", here)
        return {head: branches}

    def _ref(self, target: Any, here: str) -> dict[str, Any]:
        if not isinstance(target, str) or not re.fullmatch(r"#(/[^~%]*)?", target):
            raise SourceError("$ref must be local: # or #/$defs/NAME, without escapes", here)
        self.refs.append((target, here))
        return {"$ref": target}

    def _values(self, head: str, value: Any, types: Any, here: str) -> dict[str, Any]:
        values = [value] if head == "const" else value
        if not isinstance(values, list) or not values:
            raise SourceError("must be a list of at least one value", here)
        if types is not None:
            names = self._type_names(types, here.rsplit("/", 1)[0])
            values = [item for item in values if any(_is_a(item, name) for name in names)]
            if not values:
                raise SourceError(f"no value has the type {types!r}", here)
        return {"const": values[0]} if head == "const" else {"enum": values}

    # ---- types ------------------------------------------------------------------------------------------------------

    def _type_names(self, types: Any, place: str) -> list[str]:
        names = types if isinstance(types, list) else [types]
        for name in names:
            if not isinstance(name, str) or name not in _TYPES:
                raise SourceError(f"type {name!r} is none of {', '.join(sorted(_TYPES))}", f"{place}/type")
        if not names or len(set(names)) != len(names):
            raise SourceError("type must be a name, or a list of different names", f"{place}/type")
        return list(names)

    def _typed(self, kept: dict[str, Any], place: str) -> dict[str, Any]:
        families = [family for family, keys in _FAMILY.items() if kept.keys() & keys]
        if "type" not in kept:
            if len(families) > 1:
                raise SourceError("keywords of several types need a type", place)
            if not families:
                return {}
            kept = {"type": families[0], **kept}
        names = self._type_names(kept["type"], place)
        result: dict[str, Any] = {"type": kept["type"]}
        for family in families:
            if family not in names and not (family == "number" and "integer" in names):
                key = next(key for key in kept if key in _FAMILY[family])
                raise SourceError(f"{key!r} does nothing for type {kept['type']!r}; remove it", f"{place}/{key}")
            part = {key: value for key, value in kept.items() if key in _FAMILY[family]}
            result |= getattr(self, f"_{family}")(part, names, place)
        if "object" in names and "object" not in families:
            result["additionalProperties"] = True
        if "array" in names and "array" not in families:
            result["items"] = True
        return result

    def _string(self, part: dict[str, Any], names: list[str], place: str) -> dict[str, Any]:
        self._counts(part, "minLength", "maxLength", place)
        kinds = [key for key in ("pattern", "format") if key in part]
        if kinds and len(part) > 1:
            raise SourceError(f"{kinds[0]!r} with {next(k for k in part if k != kinds[0])!r} cannot be enforced", place)
        if "format" in part and part["format"] not in FORMATS:
            raise SourceError(f"format {part['format']!r} is none of {', '.join(sorted(FORMATS))}", f"{place}/format")
        if "pattern" in part:
            if not isinstance(part["pattern"], str):
                raise SourceError("must be text", f"{place}/pattern")
            if lengths := _LENGTHS.fullmatch(part["pattern"]):
                part = {"minLength": int(lengths[1])} | ({"maxLength": int(lengths[2])} if lengths[2] else {})
                self._counts(part, "minLength", "maxLength", place)
            else:
                check_pattern(part["pattern"], self.limits, f"{place}/pattern")
        if (name := str(part.get("format"))) in _FORMAT_PATTERNS:
            return {"pattern": _FORMAT_PATTERNS[name]}
        return {key: value for key, value in part.items() if (key, value) != ("minLength", 0)}

    def _number(self, part: dict[str, Any], names: list[str], place: str) -> dict[str, Any]:
        whole = "number" not in names
        for key, value in part.items():
            if not is_number(value) or abs(value) > MAX_EXACT or (whole and value != int(value)):
                raise SourceError(f"must be {'a whole' if whole else 'a'} number within +-2**53", f"{place}/{key}")
        if "multipleOf" in part and (not whole or part["multipleOf"] < 1 or len(part) > 1):
            raise SourceError("multipleOf is enforced for integers without a range only", f"{place}/multipleOf")
        return {key: int(value) if whole else value for key, value in part.items()}

    def _object(self, part: dict[str, Any], names: list[str], place: str) -> dict[str, Any]:
        self._counts(part, "minProperties", "maxProperties", place)
        result = dict(part)
        properties = result.get("properties", {})
        if "properties" in part:
            properties = result["properties"] = self._named(properties, f"{place}/properties")
        required = part.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise SourceError("must be a list of names", f"{place}/required")
        for name in required:
            if name not in properties:
                raise SourceError(f"{name!r} is required but not in properties", f"{place}/required")
        more = part.get("unevaluatedProperties", part.get("additionalProperties", not properties))
        if "unevaluatedProperties" in part and "additionalProperties" in part:
            raise SourceError("give additionalProperties or this, not both", f"{place}/unevaluatedProperties")
        result.pop("unevaluatedProperties", None)
        return result | self._more_properties(part, more, bool(properties), place)

    def _more_properties(self, part: dict[str, Any], more: Any, named: bool, place: str) -> dict[str, Any]:
        changed: dict[str, Any] = {}
        special = [key for key in ("patternProperties", "propertyNames") if key in part]
        if special and (named or len(special) > 1):
            raise SourceError(f"{special[0]} beside properties cannot be enforced", f"{place}/{special[0]}")
        if "patternProperties" in part:
            patterns, here = part["patternProperties"], f"{place}/patternProperties"
            if part.get("additionalProperties", part.get("unevaluatedProperties", False)) is not False:
                raise SourceError("patternProperties beside open additionalProperties cannot be enforced", here)
            if not isinstance(patterns, dict) or len(patterns) != 1:
                raise SourceError("one pattern can be enforced", here)
            for pattern in patterns:
                check_pattern(pattern, self.limits, here)
            changed["patternProperties"] = self._named(patterns, here)
            more = False
        if "propertyNames" in part:
            names, here = part["propertyNames"], f"{place}/propertyNames"
            if more is not True:
                raise SourceError("propertyNames beside additionalProperties cannot be enforced", here)
            if not isinstance(names, dict) or names.keys() - ANNOTATIONS - {"type"} != {"pattern"}:
                raise SourceError("propertyNames is enforced with a pattern only", here)
            changed["propertyNames"] = {"pattern": self.node({"type": "string", **names}, here)["pattern"]}
            return changed  # the names are the whole rule; additionalProperties would replace it
        if more is not False and part.get("minProperties"):
            raise SourceError("minProperties of an open object cannot be enforced", f"{place}/minProperties")
        key = "unevaluatedProperties" if "unevaluatedProperties" in part else "additionalProperties"
        changed["additionalProperties"] = more if isinstance(more, bool) else self.node(more, f"{place}/{key}")
        return changed

    def _array(self, part: dict[str, Any], names: list[str], place: str) -> dict[str, Any]:
        self._counts(part, "minItems", "maxItems", place)
        if part.get("uniqueItems", False) is not False:
            raise SourceError("uniqueItems cannot be enforced; remove it", f"{place}/uniqueItems")
        result = {key: value for key, value in part.items() if key != "uniqueItems"}
        if "prefixItems" in part:
            if not isinstance(part["prefixItems"], list) or not part["prefixItems"]:
                raise SourceError("must be a list of at least one schema", f"{place}/prefixItems")
            result["prefixItems"] = [
                self.node(item, f"{place}/prefixItems/{index}") for index, item in enumerate(part["prefixItems"])
            ]
        items = part.get("items", "prefixItems" not in part)
        result["items"] = items if isinstance(items, bool) else self.node(items, f"{place}/items")
        if items is False and "prefixItems" not in part:
            result = {"prefixItems": [], **result}
        return result

    def _counts(self, part: dict[str, Any], low: str, high: str, place: str) -> None:
        for key in (low, high):
            value = part.get(key, 0)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_EXACT:
                raise SourceError("must be a whole number, 0 or more", f"{place}/{key}")
        if high in part and part.get(low, 0) > part[high]:
            raise SourceError(f"{low} is greater than {high}", f"{place}/{low}")


def _is_a(value: Any, name: str) -> bool:
    match name:
        case "string":
            return isinstance(value, str)
        case "number":
            return is_number(value)
        case "integer":
            return is_number(value) and value == int(value)
        case "object":
            return isinstance(value, dict)
        case "array":
            return isinstance(value, list)
        case "boolean":
            return isinstance(value, bool)
        case _:
            return value is None


def _disjoint(branches: list[Any]) -> bool:
    """True if no value can match two of these normalised branches: other types, or another constant in one key."""
    kinds = [_kinds(branch) for branch in branches]
    if all(kinds) and sum(map(len, kinds)) == len(frozenset().union(*kinds)):
        return True
    keyed = [_constants(branch) for branch in branches]
    return any(
        all(key in branch for branch in keyed) and len({branch[key] for branch in keyed}) == len(keyed)
        for key in keyed[0]
    )


def _kinds(branch: Any) -> frozenset[str]:
    """Types that a branch may have, empty for unknown; integers are numbers."""
    if not isinstance(branch, dict) or "type" not in branch:
        return frozenset()
    names = branch["type"] if isinstance(branch["type"], list) else [branch["type"]]
    return frozenset("number" if name == "integer" else name for name in names)


def _constants(branch: Any) -> dict[str, str]:
    """Required properties of a branch that have one string as their only value."""
    if not isinstance(branch, dict) or branch.get("type") != "object":
        return {}
    found = {}
    for name in branch.get("required", []):
        rule = branch["properties"][name]
        values = [rule["const"]] if isinstance(rule, dict) and "const" in rule else []
        values = rule["enum"] if isinstance(rule, dict) and "enum" in rule else values
        if len(values) == 1 and isinstance(values[0], str):
            found[name] = values[0]
    return found
