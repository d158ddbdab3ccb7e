"""llama.cpp's grammars (GBNF) in the Lark dialect of llguidance."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from quire.protocol.grammar.gbnf_lexemes import BEYOND_ASCII, Chars, Part, Reference, Text, char_set, safe_lexemes

_IS_GBNF = re.compile(r"^[ \t]*[\w-]+\s*::=", re.MULTILINE)
_IS_LARK = re.compile(r"^[ \t]*(?:%llguidance\b|start\s*:)", re.MULTILINE)
_MAX_DEPTH = 150  # of groups within groups; llguidance reads no more than about as many
_MAX_SHOWN = 80  # characters of a line or a name
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[\w-]+")
_REPEAT = re.compile(r"\{\s*(\d{1,9})\s*(?:(,)\s*(?:(\d{1,9})\s*)?)?\}")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([\"\\\[\]nrt]))")
_CONTROL = {"n": "\n", "r": "\r", "t": "\t"}
_NO_TEXT = Text("")
_ANY = Chars(r"/(.|\n)/", char_set("\0", "\U0010ffff"))
_START = "start"


class GbnfError(ValueError):
    """A grammar that can't be read; the message shows the line."""


def lark_of(grammar: str) -> str:
    """Return a client's grammar in Lark, which it may be. Raises ValueError if it is neither that nor GBNF."""
    if is_gbnf(grammar):
        return gbnf_to_lark(grammar)
    if not ("start" in grammar or "%llguidance" in grammar) or _IS_LARK.search(grammar) is None:
        raise ValueError("it is neither Lark nor GBNF: there is no rule such as 'start: ...' or 'root ::= ...'")
    return grammar


def is_gbnf(grammar: str) -> bool:
    """Return True if a grammar has a rule as GBNF writes it, with `::=`, which Lark does not know."""
    return "::=" in grammar and _IS_GBNF.search(grammar) is not None


def gbnf_to_lark(grammar: str) -> str:
    """Return the grammar in Lark, with each rule in the line in which it begins.

    A rule that leads to no recursive rule becomes a terminal, which llguidance matches as a whole, unless that loses
    texts where rules meet. Raises GbnfError.
    """
    return _Reader(grammar).lark()


def line_of(grammar: str, number: int) -> str:
    """Return a line of the grammar, the first one being 1, as an error shows it."""
    lines = grammar.split("\n")
    return _shown(lines[number - 1].strip()) if 0 < number <= len(lines) else ""


def _shown(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


@dataclass
class _Rule:
    at: int
    body: list[Part] = field(default_factory=list)

    @property
    def references(self) -> set[str]:
        return {part.name for part in self.body if isinstance(part, Reference)}


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._rules: dict[str, _Rule] = {}

    def lark(self) -> str:
        self._read()
        if "root" not in self._rules:
            raise GbnfError(f"GBNF: there is no rule 'root', with which the text begins; its rules are {self._known()}")
        for rule in self._rules.values():
            for part in rule.body:
                if isinstance(part, Reference) and part.name not in self._rules:
                    raise self._error(f"there is no rule {_shown(part.name)!r}; the rules are {self._known()}", part.at)
        terminals = self._terminals()
        lexemes = safe_lexemes({name: rule.body for name, rule in self._rules.items()}, terminals)
        in_terminals, in_rules = self._lark_names(terminals)
        in_rules |= {name: in_terminals[name] for name in lexemes.rules}

        def written(part: Part, names: Mapping[str, str]) -> str:
            if isinstance(part, Reference):
                return names[part.name]
            if isinstance(part, Text):
                is_split = names is in_rules and part.text in lexemes.split_texts
                return " ".join(_quoted(text) for text in (part.text if is_split else [part.text])) or _quoted("")
            return part.pattern if isinstance(part, Chars) else part

        def line(name: str, names: Mapping[str, str]) -> str:
            return f"{names[name]}: {' '.join(written(part, names) for part in self._rules[name].body)}"

        parts, at = list[str](), 0
        for name, rule in sorted(self._rules.items(), key=lambda item: item[1].at):
            parts.append("\n" * self._text.count("\n", at, rule.at))
            at = rule.at
            parts.append(line(name, in_terminals if name in lexemes.rules else in_rules))
        needed = set(lexemes.rules)
        for name in reversed(terminals):
            needed |= self._rules[name].references if name in needed else set()
        parts += [f"\n{line(name, in_terminals)}" for name in terminals if name in needed - lexemes.rules]
        if in_rules["root"] != _START:
            parts.append(f"\n{_START}: {in_rules['root']}")
        return "".join([*parts, "\n"])

    def _known(self) -> str:
        names = [_shown(name) for name in self._rules]
        return ", ".join([*names[:10], *(["..."] if len(names) > 10 else [])])

    def _lark_names(self, terminals: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
        """Return unique names of the terminals, in capitals, and of all rules."""
        own = {name: f"{number}_{re.sub(r'[^A-Za-z0-9]', '_', name)}" for number, name in enumerate(self._rules)}
        of_rules = {name: f"r{each.lower()}" for name, each in own.items()} | {"root": _START}
        return {name: f"T{own[name].upper()}" for name in terminals}, of_rules

    def _terminals(self) -> list[str]:
        """Return the rules that refer to terminals only, each after those that it refers to."""
        users = defaultdict[str, list[str]](list)
        num_open = {}
        for name, rule in self._rules.items():
            num_open[name] = len(rule.references)
            for other in rule.references:
                users[other].append(name)
        ready = [name for name, number in num_open.items() if number == 0]
        terminals = list(ready)
        while ready:
            for user in users[ready.pop()]:
                num_open[user] -= 1
                if num_open[user] == 0:
                    terminals.append(user)
                    ready.append(user)
        return terminals

    def _read(self) -> None:
        self._skip(lines=True)
        while self._at < len(self._text):
            begin = self._at
            name = self._name()
            self._skip(lines=False)
            if not self._text.startswith("::=", self._at):
                raise self._error("expected '::=' after the name of a rule")
            self._at += 3
            self._skip(lines=True)
            self._rules.pop(name, None)  # the last one counts, in its place
            rule = _Rule(begin)
            self._alternatives(rule, depth=0)
            self._rules[name] = rule
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                raise self._error("expected a literal, a class, a group, a name, '|' or the end of the line")
            self._skip(lines=True)

    def _alternatives(self, rule: _Rule, depth: int) -> None:
        """Read alternatives up to the end of the group, or of the rule."""
        if depth > _MAX_DEPTH:
            raise self._error(f"more than {_MAX_DEPTH} groups within each other; give some of them names")
        while True:
            before = len(rule.body)
            while self._item(rule, depth):
                self._skip(lines=depth > 0)
            if len(rule.body) == before:
                rule.body.append(_NO_TEXT)
            if not self._text.startswith("|", self._at):
                return
            self._at += 1
            rule.body.append("|")
            self._skip(lines=True)

    def _item(self, rule: _Rule, depth: int) -> bool:
        """Read an item with what repeats it; return False if there is none."""
        char = self._text[self._at : self._at + 1]
        begin = len(rule.body)
        if char == '"':
            rule.body.append(self._literal())
        elif char == "[":
            rule.body.append(self._class())
        elif char == ".":
            self._at += 1
            rule.body.append(_ANY)
        elif char == "(":
            opened = self._at
            self._at += 1
            rule.body.append("(")
            self._skip(lines=True)
            self._alternatives(rule, depth + 1)
            if not self._text.startswith(")", self._at):
                raise self._error("a group without its ')'", opened)
            self._at += 1
            rule.body.append(")")
        elif char in ("<", "!"):
            raise self._error("tokens ('<...>') are not supported; write the text that they stand for")
        elif _NAME.match(self._text, self._at):
            at = self._at
            rule.body.append(Reference(self._name(), at))
        else:
            return False
        self._repetitions(rule, begin, lines=depth > 0)
        return True

    def _repetitions(self, rule: _Rule, begin: int, *, lines: bool) -> None:
        """Read what repeats the item that begins at an index of the rule's body."""
        for _ in range(_MAX_DEPTH):
            after = self._at
            self._skip(lines=lines)
            if self._text[self._at : self._at + 1] in ("*", "+", "?"):
                times = self._text[self._at]
                self._at += 1
            elif self._text.startswith("{", self._at):
                times = self._bounds()
            else:
                self._at = after
                return
            if times == "{0,0}":
                rule.body[begin:] = [_NO_TEXT]
            elif times != "{1,1}":
                rule.body[begin:] = ["(", *rule.body[begin:], f"){times}"]
        raise self._error(f"more than {_MAX_DEPTH} repetitions of one another; write fewer")

    def _bounds(self) -> str:
        found = _REPEAT.match(self._text, self._at)
        if found is None:
            raise self._error("expected {m}, {m,} or {m,n} with numbers of up to nine digits")
        least, comma, most = found.groups()
        if most is None:
            most = "" if comma else least
        if most and int(most) < int(least):
            raise self._error(f"{found[0]} repeats nothing; write {{m,n}} with m of at most n")
        self._at = found.end()
        return f"{{{int(least)},{int(most) if most else ''}}}"

    def _literal(self) -> Text:
        opened = self._at
        self._at += 1
        chars = list[str]()
        while not self._text.startswith('"', self._at):
            chars.append(self._char(opened, "a literal without its '\"'"))
        self._at += 1
        return Text(self._text_of(chars, opened))

    def _class(self) -> Chars:
        opened = self._at
        self._at += 1
        negation = "^" if self._text.startswith("^", self._at) else ""
        self._at += len(negation)
        members, found = list[str](), 0
        while not self._text.startswith("]", self._at):
            first = self._member(opened)
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                last = self._member(opened)
                if last < first:
                    raise self._error(
                        f"the range from {first!r} to {last!r} is empty; write the lower one first", opened
                    )
                members.append(f"{_in_class(first)}-{_in_class(last)}")
                found |= char_set(first, last)
            else:
                members.append(_in_class(first))
                found |= char_set(first)
        self._at += 1
        if not members:
            raise self._error("a class without characters; write '.' for any, or leave it out", opened)
        return Chars(f"/[{negation}{''.join(members)}]/", _ANY.chars & ~found | BEYOND_ASCII if negation else found)

    def _member(self, opened: int) -> str:
        """Return the next character of a class, which two escapes may write as UTF-16 does."""
        char = self._char(opened, "a class without its ']'")
        if "\ud800" <= char <= "\udbff":
            char += self._char(opened, "a class without its ']'")
        return self._text_of([char], opened)

    def _char(self, opened: int, unclosed: str) -> str:
        if self._at >= len(self._text):
            raise self._error(unclosed, opened)
        if self._text[self._at] != "\\":
            self._at += 1
            return self._text[self._at - 1]
        found = _ESCAPE.match(self._text, self._at)
        if found is None:
            given = self._text[self._at : self._at + 2]
            raise self._error(
                rf"the escape {given} is not known; there are \n \r \t \\ \" \[ \] \xHH \uHHHH \UHHHHHHHH"
            )
        code = found[1] or found[2] or found[3]
        if code and int(code, 16) > 0x10FFFF:
            raise self._error(f"{found[0]} is no character; the last one is \\U0010FFFF")
        self._at = found.end()
        return chr(int(code, 16)) if code else _CONTROL.get(found[4], found[4])

    def _text_of(self, chars: list[str], at: int) -> str:
        """Return the text, with characters that are written as the two halves of UTF-16."""
        try:
            return "".join(chars).encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            raise self._error("half of a character of UTF-16; write both halves, or \\UHHHHHHHH", at) from None

    def _name(self) -> str:
        found = _NAME.match(self._text, self._at)
        if found is None:
            raise self._error("expected the name of a rule")
        self._at = found.end()
        return found[0]

    def _skip(self, *, lines: bool) -> None:
        found = (_SPACE_AND_LINES if lines else _SPACE).match(self._text, self._at)
        assert found is not None
        self._at = found.end()

    def _line(self, at: int) -> int:
        return self._text.count("\n", 0, at) + 1

    def _error(self, words: str, at: int | None = None) -> GbnfError:
        number = self._line(self._at if at is None else at)
        return GbnfError(f"GBNF, line {number}: {words}: {line_of(self._text, number)}")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _in_class(char: str) -> str:
    """Return a character as a member of a class of a regular expression between slashes."""
    if char in "\n\r\t":
        return {"\n": r"\n", "\r": r"\r", "\t": r"\t"}[char]
    if not char.isprintable():
        return f"\\u{{{ord(char):x}}}"
    return f"\\{char}" if char in r"[]^-&~\/" else char
