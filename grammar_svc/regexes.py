"""Which regular expressions are taken: the part that the compiler enforces as everybody else reads it.

The compiler ignores misplaced anchors and takes unknown escapes as letters; both would change what an expression
means, so they are refused here, by position. What it refuses itself (lookaround, backreferences) stays its verdict.
"""

from typing import Final

from grammar_svc.limits import SourceLimits, check_bytes
from grammar_svc.verdict import Outcome, SourceError

_LETTERS: Final = frozenset("dDwWsStnrfvxuU0")  # escapes of letters and digits with a meaning that is enforced


def check_pattern(pattern: str, limits: SourceLimits, place: str) -> None:
    """An expression for a string inside JSON: as `check_regex`, and with shorter repeats."""
    check_regex(pattern, limits, place, limits.pattern_repeat)


def check_regex(pattern: str, limits: SourceLimits, place: str = "", repeat: int = 0) -> None:
    """Raises SourceError naming `place` and the position in the expression. `repeat` is its own bound on repeats."""
    check_bytes(pattern, limits.regex_bytes, "the regular expression")
    at, in_class, depth = 0, False, 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            following = pattern[at + 1 : at + 2]
            if not following or (following.isalnum() and following not in _LETTERS):
                raise _wrong(f"the escape \\{following} is not enforced", place, at)
            at += 2
            continue
        if in_class:
            if pattern.startswith("[:", at):
                raise _wrong("POSIX classes are not enforced; write the range, as in a-z", place, at)
            in_class = char != "]"
        elif char == "[":
            in_class = True
            if pattern[at + 1 : at + 2] == "]" or pattern.startswith("[^]", at):
                raise _wrong("an empty class matches nothing; escape the bracket", place, at)
        elif char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
        elif char == "^" and at:
            raise _wrong("^ is enforced at the start of the expression only", place, at)
        elif char == "$" and at != len(pattern) - 1:
            raise _wrong("$ is enforced at the end of the expression only", place, at)
        elif char == "{":
            _check_repeat(pattern, at, repeat or limits.repeat, place, "; maxLength alone takes more" if repeat else "")
        elif char == "|" and depth == 0 and (pattern.startswith("^") != pattern.endswith("$")):
            raise _wrong("an alternative beside a one-sided anchor is ambiguous; put it in (?:...)", place, at)
        at += 1


def without_line_ends(pattern: str) -> str:
    """The same expression for a compiler whose dot takes a line feed too, which nobody else's does."""
    parts, at, in_class = list[str](), 0, False
    while at < len(pattern):
        width = 2 if pattern[at] == "\\" else 1
        char = pattern[at : at + width]
        parts.append(r"[^\n]" if char == "." and not in_class else char)
        in_class = char != "]" if in_class else char == "["
        at += width
    return "".join(parts)


def _check_repeat(pattern: str, at: int, most: int, place: str, hint: str) -> None:
    end = pattern.find("}", at)
    counts = pattern[at + 1 : end if end > 0 else at + 1].split(",")
    for count in counts:
        if count.strip().isdigit() and (len(count) > 9 or int(count) > most):
            message = f"position {at}: a repeat of {count[:12]}, at most {most} are taken{hint}"
            raise SourceError(message, place or f"character {at}", Outcome.TOO_LARGE)


def _wrong(message: str, place: str, at: int) -> SourceError:
    return SourceError(f"position {at}: {message}", place or f"character {at}")
