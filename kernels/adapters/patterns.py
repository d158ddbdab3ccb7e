"""Regular expressions of adapters' configs, matched in bounded time, whoever wrote them.

Python's `re` may take years for a hostile expression. Here a node of the parsed expression maps the set of positions at
which it may begin to the set of those at which it may end, so that no position is tried twice, and all steps count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from re import _constants as kinds  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from quire.kernels.errors import ModelError, quoted

_PLAIN = re.compile(r"[\w.-]*")
_MOST_PATTERNS = 10_000
_LONGEST_PATTERN = 4096
_MOST_DEPTH = 50
_MOST_STEPS = 3_000_000
_PLAIN_STEPS = 3  # what a look at a plain pattern costs, beside one at a character


class ModulePatterns:
    """Values by patterns of module paths, such as `rank_pattern`: that of the first pattern that matches holds.

    As in PEFT, a pattern matches a whole path, or its end after a dot.
    """

    def __init__(self, field: str, values: Mapping[str, Any]) -> None:
        if len(values) > _MOST_PATTERNS:
            raise ModelError(f"{field} has {len(values)} patterns; {_MOST_PATTERNS} are allowed")
        longest = max(values, key=len, default="")
        if len(longest) > _LONGEST_PATTERN:
            raise ModelError(
                f"{field} has the pattern {quoted(longest)}, of {len(longest)} characters; at most "
                f"{_LONGEST_PATTERN} are allowed"
            )
        self._field = field
        self._values = [(pattern, bool(_PLAIN.fullmatch(pattern)), value) for pattern, value in values.items()]
        self._matchers: dict[str, _Matcher] = {}
        self._steps = _MatchSteps(field)

    def get(self, module: str, default: Any) -> Any:
        """Return the value of a module. Raises ModelError for a pattern that is bad, or takes too long."""
        return next((value for pattern, plain, value in self._values if self._matches(pattern, plain, module)), default)

    def _matches(self, pattern: str, is_plain: bool, module: str) -> bool:
        if is_plain:
            self._steps.take(_PLAIN_STEPS)
            return _is_end(pattern, module)
        if pattern not in self._matchers:
            self._matchers[pattern] = self._parsed(pattern)
        return self._matchers[pattern].matches(module, self._steps)

    def _parsed(self, pattern: str) -> _Matcher:
        try:
            return _Matcher(parser.parse(rf"(.*\.)?({pattern})$"))
        except (re.error, RecursionError, OverflowError, ValueError) as error:
            raise ModelError(
                f"{self._field} has {quoted(pattern)}, which is no regular expression: {quoted(str(error))}; "
                "correct it, or write the names of modules"
            ) from None


def _is_end(pattern: str, module: str) -> bool:
    """Return whether a plain pattern, in which a dot stands for any character, matches."""
    start = len(module) - len(pattern)
    if start < 0 or (start and module[start - 1] != "."):
        return False
    return all(expected in (".", given) for expected, given in zip(pattern, module[start:], strict=True))


class _MatchSteps:
    """The steps that all matches of a field have taken."""

    def __init__(self, field: str) -> None:
        self._field = field
        self._taken = 0

    def take(self, count: int = 1) -> None:
        """Count steps. Raises ModelError when they are too many."""
        self._taken += count
        if self._taken > _MOST_STEPS:
            raise ModelError(
                f"{self._field} takes more than {_MOST_STEPS} steps to match; write fewer patterns, or simpler ones"
            )


class _Matcher:
    """A parsed expression. Raises ValueError for what only backtracking could match: look-around and references."""

    def __init__(self, parsed: Any) -> None:
        self._parsed = parsed
        _check(parsed)

    def matches(self, text: str, steps: _MatchSteps) -> bool:
        """Return whether the expression matches from the beginning of a text without line ends."""
        return bool(_sequence(self._parsed, text, {0}, steps))


def _check(nodes: Iterable[tuple[Any, Any]], depth: int = 0) -> None:
    if depth > _MOST_DEPTH:
        raise ValueError(f"groups are nested more than {_MOST_DEPTH} times")
    for kind, value in nodes:
        if kind not in _KNOWN or (kind is kinds.AT and value not in _BEGINNINGS + _ENDS):
            raise ValueError(f"{str(value if kind is kinds.AT else kind).lower()} is not supported")
        for inner in _inner(kind, value):
            _check(inner, depth + 1)


def _inner(kind: Any, value: Any) -> Iterator[Any]:
    """Yield the expressions in a node."""
    if kind is kinds.BRANCH:
        yield from value[1]
    elif kind is kinds.SUBPATTERN:
        if value[1] or value[2]:
            raise ValueError("flags are not supported")
        yield value[3]
    elif kind in _REPEATS:
        yield value[2]
    elif kind is kinds.IN:
        yield [node for node in value if node[0] not in _IN_CLASSES]


def _sequence(nodes: Iterable[tuple[Any, Any]], text: str, starts: set[int], steps: _MatchSteps) -> set[int]:
    """Return all positions at which nodes end that may begin at `starts`."""
    for kind, value in nodes:
        steps.take(1 + len(starts) * (len(value) if kind is kinds.IN else 1))
        if not starts:
            break
        starts = _ends(kind, value, text, starts, steps)
    return starts


def _ends(kind: Any, value: Any, text: str, starts: set[int], steps: _MatchSteps) -> set[int]:
    if kind is kinds.AT:
        return starts & ({0} if value in _BEGINNINGS else {len(text)})
    if kind is kinds.BRANCH:
        return set().union(*(_sequence(branch, text, starts, steps) for branch in value[1]))
    if kind is kinds.SUBPATTERN:
        return _sequence(value[3], text, starts, steps)
    if kind in _REPEATS:
        least, most, nodes = value
        return _repeat(least, most, nodes, text, starts, steps)
    return {start + 1 for start in starts if start < len(text) and _is_one(kind, value, text[start])}


def _repeat(least: int, most: Any, nodes: Any, text: str, starts: set[int], steps: _MatchSteps) -> set[int]:
    """Return the ends of `least` to `most` repeats, which is over when another one changes nothing."""
    for _ in range(least):
        ends = _sequence(nodes, text, starts, steps)
        if ends == starts:
            break
        starts = ends
    found, last, count = set(starts), starts, int(least)
    while last and (most is kinds.MAXREPEAT or count < most):
        last = _sequence(nodes, text, last, steps) - found
        found |= last
        count += 1
    return found


def _is_one(kind: Any, value: Any, character: str) -> bool:
    """Return whether a node for one character stands for this one."""
    if kind is kinds.IN:
        negated = value[0][0] is kinds.NEGATE
        return bool(negated != any(_is_one(node[0], node[1], character) for node in value[negated:]))
    if kind is kinds.CATEGORY:
        inverted, is_member = _CATEGORIES[value]
        return bool(inverted != is_member(character))
    if kind is kinds.RANGE:
        return bool(value[0] <= ord(character) <= value[1])
    return kind is kinds.ANY or bool((kind is kinds.LITERAL) == (value == ord(character)))


_REPEATS = (kinds.MAX_REPEAT, kinds.MIN_REPEAT)
_IN_CLASSES = (kinds.NEGATE, kinds.RANGE, kinds.CATEGORY)
_KNOWN = {
    kinds.AT, kinds.BRANCH, kinds.SUBPATTERN, *_REPEATS, kinds.IN, kinds.ANY, kinds.LITERAL, kinds.NOT_LITERAL,
}  # fmt: skip
_ENDS = (kinds.AT_END, kinds.AT_END_STRING)
_BEGINNINGS = (kinds.AT_BEGINNING, kinds.AT_BEGINNING_STRING)
_CATEGORIES = {
    kinds.CATEGORY_DIGIT: (False, str.isdecimal),
    kinds.CATEGORY_NOT_DIGIT: (True, str.isdecimal),
    kinds.CATEGORY_SPACE: (False, str.isspace),
    kinds.CATEGORY_NOT_SPACE: (True, str.isspace),
    kinds.CATEGORY_WORD: (False, lambda character: character.isalnum() or character == "_"),
    kinds.CATEGORY_NOT_WORD: (True, lambda character: character.isalnum() or character == "_"),
}
