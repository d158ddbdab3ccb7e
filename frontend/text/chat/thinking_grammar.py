"""Grammars of answers that leave room to think before what they constrain, in the Lark dialect of llguidance."""

from __future__ import annotations

import json
from collections.abc import Container

from quire.frontend.text.chat.reasoning import CLOSE, OPEN, Beginning


def after_thinking(body: str, begins: Beginning, special_tokens: Container[str] = ()) -> str:
    """A grammar of thoughts and then `body`, the right side of a rule such as `%json {...}`.

    Without room to think, a model that the prompt has told to would have to put its answer among its thoughts.
    `special_tokens` are the texts that are special tokens of the tokenizer.
    """
    start = f"start: {thinking(begins, special_tokens)} answer\nanswer: {body}\n"
    return start + "\n".join(thinking_rules(begins, special_tokens)) + "\n"


def thinking(begins: Beginning, special_tokens: Container[str] = ()) -> str:
    """What stands before the answer in a rule; it refers to `thinking_rules`."""
    if begins is Beginning.ANSWER:
        return ""
    return f"({tag(OPEN, special_tokens)} thought GAP)?" if begins is Beginning.EITHER else "thought GAP"


def thinking_rules(begins: Beginning, special_tokens: Container[str] = ()) -> list[str]:
    """The rules that `thinking` refers to."""
    return [] if begins is Beginning.ANSWER else [*text_up_to("thought", CLOSE, special_tokens), r"GAP: /\n{0,2}/"]


def text_up_to(rule: str, mark: str, special_tokens: Container[str] = ()) -> list[str]:
    """Rules for text to the end of the first `mark`; the terminal of the text is named after `rule`."""
    terminal = f"{rule.upper()}_TEXT"
    lazy = "" if mark in special_tokens else "[lazy]"
    return [f"{rule}{lazy}: {terminal} {tag(mark, special_tokens)}", rf"{terminal}: /(.|\n)*/"]


def tag(mark: str, special_tokens: Container[str] = ()) -> str:
    """A mark such as `<think>`, which a grammar names in another way when the tokenizer has it as a special token."""
    return mark if mark in special_tokens else literal(mark)


def literal(text: str) -> str:
    """`text` as a terminal; nothing if it is empty."""
    return json.dumps(text) if text else ""
