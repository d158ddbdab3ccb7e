"""Which parts of a grammar in GBNF llguidance may read as one lexeme each.

Its lexer takes the longest lexeme that it can and never goes back. That loses texts where a lexeme can end and what
follows it can be read as more of one: with `"a" | root "ab"` as two lexemes, "aa" and then "b" can't be read.
Such lexemes are read as their parts, in the end character by character, which is exact, but takes longer to mask.

What can happen is overestimated: a repetition counts as one without bounds, lexemes count as possible everywhere, and
all characters beyond ASCII as one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

BEYOND_ASCII = 1 << 128
"""The bit of all characters beyond ASCII in a set of characters; each other character has its own."""

_MOST_STEPS = 20_000  # of one analysis, which take some 50 ms
_STEP_BITS = 1024  # of a set


@dataclass(frozen=True)
class Reference:
    """The name of a rule, and its place in the text."""

    name: str
    at: int = field(compare=False)


@dataclass(frozen=True)
class Text:
    """A literal."""

    text: str


@dataclass(frozen=True)
class Chars:
    """A class of characters: its regular expression, and the set of its characters."""

    pattern: str
    chars: int = field(compare=False)


Symbol = Reference | Text | Chars
Part = str | Symbol
"""A part of a rule: a symbol, "(", "|", or ")" with what repeats the group."""


@dataclass(frozen=True)
class Lexemes:
    """The rules that are lexemes where other rules refer to them, and the literals that are none."""

    rules: frozenset[str]
    split_texts: Collection[str]


def safe_lexemes(rules: Mapping[str, Sequence[Part]], terminals: Sequence[str]) -> Lexemes:
    """Return the lexemes among `terminals`, which refer only to those before them, that lose no text."""
    kept, split = frozenset(terminals), set[str]()
    steps = _StepsLeft(_MOST_STEPS)
    try:
        while unsafe := _Analysis(rules, terminals, kept, split, steps).unsafe():
            kept -= {symbol.name for symbol in unsafe if isinstance(symbol, Reference)}
            split |= {symbol.text for symbol in unsafe if isinstance(symbol, Text)}
    except _TooManyStepsError:
        texts = (part.text for body in rules.values() for part in body if isinstance(part, Text))
        return Lexemes(frozenset(), frozenset(texts))
    return Lexemes(kept, split)


class _TooManyStepsError(Exception):
    """The grammar is too large for the analysis."""


@dataclass
class _StepsLeft:
    left: int

    def take(self, number: int) -> None:
        self.left -= number
        if self.left < 0:
            raise _TooManyStepsError


@dataclass
class _Facts:
    """Facts about an expression: whether it may be empty, and the sets of its first and last items, as bits."""

    is_nullable: bool = True
    first: int = 0
    last: int = 0

    def then(self, other: _Facts, connect: Callable[[int, int], None]) -> None:
        """Add what follows."""
        connect(self.last, other.first)
        if self.is_nullable:
            self.first |= other.first
        self.last = other.last | (self.last if other.is_nullable else 0)
        self.is_nullable &= other.is_nullable

    def either(self, other: _Facts) -> None:
        """Add an alternative."""
        self.is_nullable |= other.is_nullable
        self.first |= other.first
        self.last |= other.last


def _facts_of(body: Sequence[Part], leaf: Callable[[Symbol], _Facts], connect: Callable[[int, int], None]) -> _Facts:
    """Return the facts of a rule; `connect` is told which items follow which."""
    groups = [(_Facts(is_nullable=False), _Facts())]  # alternatives so far, and the one that is being read
    for part in body:
        alternatives, sequence = groups[-1]
        if not isinstance(part, str):
            sequence.then(leaf(part), connect)
        elif part == "(":
            groups.append((_Facts(is_nullable=False), _Facts()))
        else:
            alternatives.either(sequence)
            if part == "|":
                groups[-1] = (alternatives, _Facts())
                continue
            groups.pop()
            times = part[1:]
            alternatives.is_nullable |= times[:1] in ("*", "?") or times.startswith("{0,")
            if times and times != "?" and not times.endswith(",1}"):
                connect(alternatives.last, alternatives.first)
            groups[-1][1].then(alternatives, connect)
    [(alternatives, sequence)] = groups
    alternatives.either(sequence)
    return alternatives


def _bits(number: int) -> Iterator[int]:
    while number:
        low = number & -number
        yield low.bit_length() - 1
        number ^= low


class _Follow:
    """For each item the set of those that may follow it."""

    def __init__(self, steps: _StepsLeft) -> None:
        self.after = defaultdict[int, int](int)
        self._steps = steps

    def connect(self, last: int, first: int) -> None:
        """Note that any of the `first` items may follow any of the `last` ones."""
        if first:
            self._steps.take(last.bit_count() * (1 + first.bit_length() // _STEP_BITS))
            for item in _bits(last):
                self.after[item] |= first


def _unconnected(_last: int, _first: int) -> None:
    """Connect nothing as long as not all facts are known."""


class _Analysis:
    """The analysis of a grammar in which the rules `kept` and literals that are not `split` are lexemes."""

    def __init__(
        self,
        rules: Mapping[str, Sequence[Part]],
        terminals: Sequence[str],
        kept: frozenset[str],
        split: Collection[str],
        steps: _StepsLeft,
    ) -> None:
        self._rules = rules
        self._kept = kept
        self._split = split
        self._steps = steps
        self._chars: list[int] = []  # the set of characters at each position of a lexeme
        self._inner = _Follow(steps)  # of these positions
        self._terminals: dict[str, _Facts] = {}
        for name in terminals:
            steps.take(len(rules[name]))
            self._terminals[name] = _facts_of(rules[name], self._inside, self._inner.connect)
        self._symbols: list[Symbol] = []
        self._facts: list[_Facts] = []  # of each symbol, in positions
        self._numbers: dict[Symbol, int] = {}
        self._outer = _Follow(steps)  # of symbols

    def unsafe(self) -> set[Symbol]:
        """Return the lexemes with which the lexer would go on where another one ends."""
        self._follow_symbols()
        firsts = [self._chars_of(facts.first) for facts in self._facts]
        goes_on = [any(self._inner.after[at] for at in _bits(facts.first)) for facts in self._facts]
        long = [number for number, is_long in enumerate(goes_on) if is_long]
        found = set[Symbol]()
        for number, first in enumerate(firsts):
            following = 0
            self._steps.take(self._outer.after[number].bit_count() // 4)
            for other in _bits(self._outer.after[number]):
                following |= firsts[other]
            self._steps.take(1 + len(long) // 8)
            for other in long:
                is_new = self._symbols[other] not in found
                if first & firsts[other] and is_new and self._goes_on(number, other, following):
                    found.add(self._symbols[other])
        return found

    def _inside(self, symbol: Symbol) -> _Facts:
        """Return the facts of a symbol within a lexeme, in positions."""
        if isinstance(symbol, Reference):
            found = self._terminals[symbol.name]
            return _Facts(found.is_nullable, found.first, found.last)
        facts = _Facts()
        sets = [symbol.chars] if isinstance(symbol, Chars) else [char_set(char) for char in symbol.text]
        self._steps.take(len(sets))
        for chars in sets:
            self._chars.append(chars)
            here = 1 << (len(self._chars) - 1)
            facts.then(_Facts(is_nullable=False, first=here, last=here), self._inner.connect)
        return facts

    def _number(self, symbol: Symbol) -> int:
        if symbol not in self._numbers:
            self._numbers[symbol] = len(self._symbols)
            self._symbols.append(symbol)
            self._facts.append(self._inside(symbol))
        return self._numbers[symbol]

    def _follow_symbols(self) -> None:
        """Find which symbols may follow which."""
        known = {name: _Facts(is_nullable=False) for name in self._rules if name not in self._kept}
        connect: Callable[[int, int], None] = _unconnected
        users = defaultdict[str, list[str]](list)
        for name in known:
            for part in self._rules[name]:
                if isinstance(part, Reference) and part.name in known:
                    users[part.name].append(name)

        def outside(symbol: Symbol) -> _Facts:
            if isinstance(symbol, Reference) and symbol.name in known:
                found = known[symbol.name]
                return _Facts(found.is_nullable, found.first, found.last)
            facts = _Facts()
            parts = [symbol]
            if isinstance(symbol, Text) and symbol.text in self._split:
                parts = [Text(char) for char in symbol.text]
            for part in parts:
                number = self._number(part)
                bit = 1 << number
                one = self._facts[number]
                facts.then(_Facts(one.is_nullable, bit if one.first else 0, bit if one.first else 0), connect)
            return facts

        waiting = dict.fromkeys(known)
        while waiting:
            name = next(iter(waiting))
            del waiting[name]
            self._steps.take(1 + len(self._rules[name]))
            facts = _facts_of(self._rules[name], outside, connect)
            if facts != known[name]:
                known[name] = facts
                waiting.update(dict.fromkeys(users[name]))
        connect = self._outer.connect
        for name in known:
            self._steps.take(1 + len(self._rules[name]))
            _facts_of(self._rules[name], outside, connect)

    def _chars_of(self, positions: int) -> int:
        found = 0
        for at in _bits(positions):
            found |= self._chars[at]
        return found

    def _goes_on(self, number: int, other: int, following: int) -> bool:
        """Return whether a lexeme may end where another one would go on with one of the `following` characters."""
        ends, chars, after = self._facts[number].last, self._chars, self._inner.after
        self._steps.take(1 + self._facts[number].first.bit_count() * self._facts[other].first.bit_count())
        waiting = [
            (mine, its)
            for mine in _bits(self._facts[number].first)
            for its in _bits(self._facts[other].first)
            if chars[mine] & chars[its]
        ]
        seen = set(waiting)
        while waiting:
            mine, its = waiting.pop()
            self._steps.take(1 + after[mine].bit_count() * after[its].bit_count())
            if ends >> mine & 1 and self._chars_of(after[its]) & following:
                return True
            for pair in ((a, b) for a in _bits(after[mine]) for b in _bits(after[its]) if chars[a] & chars[b]):
                if pair not in seen:
                    seen.add(pair)
                    waiting.append(pair)
        return False


def char_set(first: str, last: str | None = None) -> int:
    """Return the set of the characters of a range, or of one."""
    low, high = ord(first), ord(last or first)
    ascii_part = ((1 << (min(high, 127) + 1)) - (1 << low)) if low < 128 else 0
    return ascii_part | (BEYOND_ASCII if high > 127 else 0)
