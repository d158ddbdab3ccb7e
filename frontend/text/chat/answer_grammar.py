"""Grammars of answers, in the Lark dialect of llguidance: room to think, then what `structured_outputs` asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from quire.frontend.errors import RequestError
from quire.frontend.text.chat.reasoning import THINK, AnswerStart, ReasoningFormat
from quire.protocol.grammar.gbnf import is_gbnf, lark_of
from quire.protocol.grammar.json_schema import WHITESPACE, enforced_schema
from quire.protocol.grammar.regex_dialect import PYTHON, translate_regex
from quire.protocol.messages import StructuredOutputs

NO_TOKENS: Mapping[str, int] = MappingProxyType({})
_TOKEN_NAME = re.compile(r"<[^<>\s\"]+>")
_MOST_GBNF, _MOST_GBNF_RULES = 8192, 400  # characters and rules, whose translation takes some 50 ms


def answer_rule(structured: StructuredOutputs) -> str:
    """Return the right side of a rule for the texts that `structured` allows; it sets exactly one kind of constraint.

    Raises `RequestError` for one that can't be used, as the engine does.
    """
    kind = structured.kinds[0]
    try:
        return _rule(structured)
    except ValueError as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"structured_outputs.{kind} can't be used: {error}") from None


def _rule(structured: StructuredOutputs) -> str:
    match structured.kinds[0]:
        case "regex":
            return _regex_rule(translate_regex(structured.regex or "", PYTHON))
        case "choice":
            return " | ".join(json.dumps(choice, ensure_ascii=False) for choice in structured.choice or ())
        case "grammar":
            return f"%lark {{\n{_lark(structured.grammar or '')}\n}}"
        case _:
            return f"%json {json.dumps(_schema(structured))}"


def _regex_rule(pattern: str) -> str:
    """Return the pattern between slashes, with the slashes inside it escaped."""
    return "/" + re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), pattern) + "/"


def _lark(grammar: str) -> str:
    num_rules = grammar.count("::=")
    if is_gbnf(grammar) and (len(grammar) > _MOST_GBNF or num_rules > _MOST_GBNF_RULES):
        raise RequestError(
            f"structured_outputs.grammar has {len(grammar)} characters and {num_rules} rules; beside thoughts or tools "
            f"GBNF may have {_MOST_GBNF} characters and {_MOST_GBNF_RULES} rules: make it shorter, or send it as Lark"
        )
    return lark_of(grammar)


def _schema(structured: StructuredOutputs) -> dict[str, Any]:
    given = structured.json if structured.json is not None else {"type": "object"}
    schema = json.loads(given) if isinstance(given, str) else given
    options: dict[str, Any] = {"lenient": False, "whitespace_flexible": not structured.disable_any_whitespace}
    if not structured.disable_any_whitespace:
        blanks = structured.whitespace_pattern
        options["whitespace_pattern"] = translate_regex(blanks, PYTHON) if blanks else WHITESPACE
    return {**enforced_schema(schema), "x-guidance": options}


def after_thinking(
    body: str, start: AnswerStart, special_tokens: Mapping[str, int] = NO_TOKENS, form: ReasoningFormat = THINK
) -> str:
    """Return a grammar of thoughts and then `body`, the right side of a rule such as `%json {...}`.

    Without room to think, a model that was prompted to think would put its constrained answer among its thoughts.
    `special_tokens` are the ids of the tokenizer's special tokens, by their texts.
    """
    root = f"start: {thinking(start, special_tokens, form)} answer\nanswer: {body}\n"
    return root + "\n".join(thinking_rules(start, special_tokens, form)) + "\n"


def thinking(start: AnswerStart, special_tokens: Mapping[str, int] = NO_TOKENS, form: ReasoningFormat = THINK) -> str:
    """Return the part of a rule that precedes the answer; it refers to `thinking_rules`."""
    if start is AnswerStart.ANSWER:
        return ""
    return f"({tag(form.open, special_tokens)} thought GAP)?" if start is AnswerStart.EITHER else "thought GAP"


def thinking_rules(
    start: AnswerStart, special_tokens: Mapping[str, int] = NO_TOKENS, form: ReasoningFormat = THINK
) -> list[str]:
    """Return the rules that `thinking` refers to."""
    if start is AnswerStart.ANSWER:
        return []
    return [*text_up_to("thought", form.close, special_tokens), r"GAP: /\n{0,2}/"]


def text_up_to(rule: str, mark: str, special_tokens: Mapping[str, int] = NO_TOKENS) -> list[str]:
    """Return rules for text up to the end of the first `mark`; the terminal of the text is named after `rule`."""
    terminal = f"{rule.upper()}_TEXT"
    lazy = "" if mark in special_tokens else "[lazy]"
    return [f"{rule}{lazy}: {terminal} {tag(mark, special_tokens)}", rf"{terminal}: /(.|\n)*/"]


def tag(mark: str, special_tokens: Mapping[str, int] = NO_TOKENS) -> str:
    """Return a mark such as `<think>` as a grammar names it; a special token may need its id.

    A mark may also be a special token and text after it, as `<|channel>thought`.
    """
    if mark in special_tokens:
        return mark if _TOKEN_NAME.fullmatch(mark) else f"<[{special_tokens[mark]}]>"
    token, end, text = mark.partition(">")
    return f"{tag(token + end, special_tokens)} {literal(text)}" if token + end in special_tokens else literal(mark)


def literal(text: str) -> str:
    """Return `text` as a terminal; nothing if it is empty."""
    return json.dumps(text) if text else ""
