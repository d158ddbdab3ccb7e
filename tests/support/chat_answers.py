"""Answers of chat models as hypothesis makes them up, and the ways in which they may arrive."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from typing import Any

from hypothesis import strategies as st

from quire.frontend.text.chat.assistant import AssistantMessage, AssistantParser, ToolCall
from quire.frontend.text.chat.events import ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallStart

names = st.from_regex(r"[a-zA-Z0-9_-]{1,64}", fullmatch=True)
tricky = st.lists(
    st.sampled_from(
        ['"', "\\", "{", "}", "[", "]", "</tool_call>", "<tool_call>", ";", "\n", "é", "🙂", "<|python_tag|>"]
    )
    | st.text(max_size=3)
).map("".join)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | tricky,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(tricky, inner, max_size=3),
    max_leaves=8,
)
calls = st.tuples(names, st.dictionaries(tricky, values, max_size=3))
FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "<tool", "</", "<", ">", "\n", " ", "\t"),
    *("{", "}", "[", "]", ",", ":", ";", '"', "\\", '\\"', "1", "null", "é", "words", "\\ud83d", " " * 9),
    *(
        '"name"',
        '"f"',
        '"arguments"',
        '"parameters"',
        '"x"',
        '{"name": "f", "arguments": {',
        '{"name": "f"}',
        "{}}",
        "}}",
    ),
    *(
        '{"name": "f", "parameters": {"a": [1]}}',
        '{"arguments": "{}", "name": "f"}',
        '{"name": "f", "arguments": null}',
    ),
]
garbage = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=12).map("".join)


@st.composite
def json_texts(draw: st.DrawFn, value: Any) -> str:
    """A JSON text of `value`, with or without escapes and white space."""
    style = draw(st.sampled_from([(", ", ": "), (",", ":")]))
    indent = draw(st.sampled_from([None, 2]))
    return json.dumps(value, ensure_ascii=draw(st.booleans()), separators=style, indent=indent)


@st.composite
def pieces(draw: st.DrawFn, text: str) -> list[str]:
    """`text` cut at any places, or at all."""
    if draw(st.booleans()):
        return list(text)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]


def numbered_ids() -> Callable[[], str]:
    """A source of ids that is the same for each parser."""
    numbers = itertools.count()
    return lambda: f"call_{next(numbers)}"


def read(parser: AssistantParser, texts: Iterable[str]) -> tuple[AssistantMessage, list[Event]]:
    """The message and the events of an answer that arrives as `texts`; both must tell the same."""
    events = [event for text in texts for event in parser.feed(text)] + parser.finish()
    assert replayed(events) == parser.message
    return parser.message, events


def replayed(events: Iterable[Event]) -> AssistantMessage:
    """The message that a client puts together from the events."""
    content, thoughts, started = "", "", list[list[str]]()
    for event in events:
        match event:
            case ContentDelta(text):
                assert text
                content += text
            case ReasoningDelta(text):
                assert text
                thoughts += text
            case ToolCallStart(index, call_id, name):
                assert index == len(started)
                started.append([call_id, name, ""])
            case ToolCallArguments(index, delta):
                assert index == len(started) - 1
                assert delta
                started[index][2] += delta
    tool_calls = tuple(ToolCall(*call) for call in started)
    return AssistantMessage(content if content or not started else None, thoughts or None, tool_calls)
