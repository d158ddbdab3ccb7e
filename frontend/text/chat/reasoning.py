"""Reasoning parsers: they split an answer into thoughts, between marks such as `<think>`, and content."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass

from quire.frontend.text.chat.events import ContentDelta, Event, ReasoningDelta
from quire.frontend.text.chat.scanning import gap_before, match_mark, partial_mark

OPEN = "<think>"
CLOSE = "</think>"
DEEPSEEK_ASSISTANT = "<\N{FULLWIDTH VERTICAL LINE}Assistant\N{FULLWIDTH VERTICAL LINE}>"


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Marks around thoughts, and around the content (`response`), which are dropped.

    `always` is True if a model thinks first even if neither the prompt nor the model writes `open`. `calls` is a mark
    of calls that ends thoughts as `close` does, for a model that calls tools while it thinks; it stays in the content.
    """

    open: str = OPEN
    close: str = CLOSE
    always: bool = False
    response: tuple[str, ...] = ()
    calls: str = ""

    @property
    def marks(self) -> set[str]:
        """All marks."""
        return {self.open, self.close, *self.response}


THINK = ReasoningFormat()
REASONING_PARSERS = {
    "apertus": ReasoningFormat("<|inner_prefix|>", "<|inner_suffix|>", calls="<|tools_prefix|>"),
    "cohere2": ReasoningFormat(
        "<|START_THINKING|>", "<|END_THINKING|>", response=("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    ),
    "deepseek_r1": ReasoningFormat(always=True),
    "deepseek_v3": THINK,
    "ernie45": ReasoningFormat(response=("<response>", "</response>")),
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>"),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
    "hunyuan": ReasoningFormat(response=("<answer>", "</answer>")),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "olmo3": THINK,
    "qwen3": THINK,
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "think": THINK,
}
_COMPARED_ROLE = re.compile(r"""\brole['"\]]*\s*[!=]=\s*['"](\w+)""")
_HUNYUAN_PROMPT_END = "<|extra_0|>"


class AnswerStart(enum.Enum):
    """The part that an answer begins with, as far as its prompt determines it."""

    ANSWER = enum.auto()  # the prompt has closed the thoughts
    THINKING = enum.auto()  # the prompt has opened them, or the model always thinks
    EITHER = enum.auto()  # thoughts if the model writes <think>


def answer_start(parser: str, prompt: str) -> AnswerStart:
    """Return the part that the answer to `prompt` begins with, for the reasoning parser named `parser`."""
    form = REASONING_PARSERS[parser]
    end = prompt[-64:].rstrip()
    if end.endswith((form.close, *form.response[:1])):
        return AnswerStart.ANSWER
    return AnswerStart.THINKING if form.always or end.endswith(form.open) else AnswerStart.EITHER


def detect_reasoning(template_source: str, added_tokens: Iterable[str] = ()) -> str | None:
    """Return the reasoning parser that a chat template or the added tokens imply; None if they imply none."""
    if CLOSE in template_source:
        return _detect_in_think_tags(template_source)
    for name in ("apertus", "cohere2", "gemma4", "granite", "mistral", "seed_oss"):
        if REASONING_PARSERS[name].open in template_source:
            return name
    return "think" if OPEN in template_source or {OPEN, CLOSE} <= set(added_tokens) else None


def _detect_in_think_tags(template_source: str) -> str:
    for name in ("ernie45", "hunyuan"):
        if _writes_around_answers(template_source, REASONING_PARSERS[name].response[0]):
            return name
    if _HUNYUAN_PROMPT_END in template_source:
        return "hunyuan"
    if DEEPSEEK_ASSISTANT in template_source:
        return "deepseek_v3" if "not thinking" in template_source else "deepseek_r1"
    return "qwen3" if "enable_thinking" in template_source else "think"


def _writes_around_answers(template_source: str, mark: str) -> bool:
    """Return True if a chat template has `mark`, and not for the results of tools, as that of MiniMax-M2."""
    before, found, _ = template_source.partition(mark)
    return bool(found) and _COMPARED_ROLE.findall(before)[-1:] != ["tool"]


class _Part(enum.Enum):
    START = enum.auto()
    REASONING = enum.auto()
    CONTENT = enum.auto()


class ReasoningParser:
    """Parser that splits an answer that arrives in pieces, cut anywhere.

    Tags and the line breaks next to them belong to neither part. A thought that is never closed is reasoning to
    the end; tags after the first closing one are content.
    """

    def __init__(self, start: AnswerStart, form: ReasoningFormat = THINK) -> None:
        self._format = form
        self._part = _Part.CONTENT if start is AnswerStart.ANSWER else _Part.START
        self._untagged = _Part.REASONING if start is AnswerStart.THINKING else _Part.CONTENT
        self._after_tag = start is AnswerStart.THINKING  # line breaks are dropped
        self._buffer = ""

    def feed(self, delta: str) -> list[Event]:
        """Parse the next piece of the text; return the events that are certain now."""
        self._buffer += delta
        events: list[Event] = []
        if self._part is _Part.START:
            self._start()
        if self._part is _Part.REASONING:
            self._read_reasoning(events)
        if self._part is _Part.CONTENT:
            self._read_content(events)
        return events

    def finish(self) -> list[Event]:
        """End the text; return the events that were held back."""
        events: list[Event] = []
        if self._part is _Part.START:
            self._part = self._untagged
        self._emit(events, self._take(len(self._buffer)))
        return events

    def _start(self) -> None:
        end = match_mark(self._buffer, self._format.open)
        if end == 0:
            return
        self._part = self._untagged if end is None else _Part.REASONING
        if end is not None:
            self._take(end)
            self._after_tag = True

    def _read_reasoning(self, events: list[Event]) -> None:
        marks = [mark for mark in (self._format.close, self._format.calls) if mark]
        at, ending = self._first_of(marks)
        end = at if ending else len(self._buffer) - max(partial_mark(self._buffer, mark) for mark in marks)
        self._emit(events, self._take(end - gap_before(self._buffer, end)))
        if ending:
            if ending == self._format.close:
                self._take(self._buffer.index(ending) + len(ending))
            self._part = _Part.CONTENT
            self._after_tag = True

    def _read_content(self, events: list[Event]) -> None:
        marks = self._format.response
        while (found := self._first_of(marks))[1]:
            at, mark = found
            self._emit(events, self._take(at - gap_before(self._buffer, at)))
            self._take(self._buffer.index(mark) + len(mark))
            self._after_tag = True
        end = len(self._buffer) - max((partial_mark(self._buffer, mark) for mark in marks), default=0)
        self._emit(events, self._take(end - gap_before(self._buffer, end) if marks else end))

    def _first_of(self, marks: Iterable[str]) -> tuple[int, str]:
        """Return the place of the first of `marks` in the buffer, and the mark; an empty mark if there is none."""
        return min(((at, mark) for mark in marks if (at := self._buffer.find(mark)) >= 0), default=(-1, ""))

    def _take(self, length: int) -> str:
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        return text

    def _emit(self, events: list[Event], text: str) -> None:
        if self._after_tag:
            text = text.lstrip("\r\n")
        if text:
            self._after_tag = False
            events.append(ReasoningDelta(text) if self._part is _Part.REASONING else ContentDelta(text))
