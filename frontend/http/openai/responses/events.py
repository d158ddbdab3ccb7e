"""The events of a streamed response."""

from __future__ import annotations

import msgspec

from quire.frontend.http.openai.logprobs import TokenLogprob
from quire.frontend.http.openai.responses.response import Item, Part, Response


class ResponseStreamEvent(msgspec.Struct, kw_only=True, tag_field="type"):
    """One event of a stream; events are numbered from 0."""

    sequence_number: int = 0

    @property
    def name(self) -> str:
        """The event's type."""
        return str(self.__struct_config__.tag)


class WholeResponseEvent(ResponseStreamEvent, kw_only=True):
    """An event with the whole response in its present state."""

    response: Response


class Created(WholeResponseEvent, tag="response.created", kw_only=True):
    """The response exists."""


class InProgress(WholeResponseEvent, tag="response.in_progress", kw_only=True):
    """The model is generating the response."""


class Completed(WholeResponseEvent, tag="response.completed", kw_only=True):
    """The response is complete."""


class Incomplete(WholeResponseEvent, tag="response.incomplete", kw_only=True):
    """The response was cut off."""


class Failed(WholeResponseEvent, tag="response.failed", kw_only=True):
    """The response failed; an `Error` before this has the reason."""


class Error(ResponseStreamEvent, tag="error", kw_only=True):
    """The error that ends a stream."""

    code: str | None
    message: str
    param: str | None


class ItemAdded(ResponseStreamEvent, tag="response.output_item.added", kw_only=True):
    """An item begins."""

    output_index: int
    item: Item


class ItemDone(ResponseStreamEvent, tag="response.output_item.done", kw_only=True):
    """An item has ended."""

    output_index: int
    item: Item


class ItemEvent(ResponseStreamEvent):
    """An event about the item under construction."""

    item_id: str
    output_index: int


class PartAdded(ItemEvent, tag="response.content_part.added", kw_only=True):
    """A part of an item begins."""

    content_index: int = 0
    part: Part


class PartDone(ItemEvent, tag="response.content_part.done", kw_only=True):
    """A part of an item has ended."""

    content_index: int = 0
    part: Part


class OutputTextDelta(ItemEvent, tag="response.output_text.delta", kw_only=True):
    """A piece of the assistant's text."""

    content_index: int = 0
    delta: str
    logprobs: list[TokenLogprob]


class OutputTextDone(ItemEvent, tag="response.output_text.done", kw_only=True):
    """The complete text."""

    content_index: int = 0
    text: str
    logprobs: list[TokenLogprob]


class ReasoningTextDelta(ItemEvent, tag="response.reasoning_text.delta", kw_only=True):
    """A piece of the model's thoughts."""

    content_index: int = 0
    delta: str


class ReasoningTextDone(ItemEvent, tag="response.reasoning_text.done", kw_only=True):
    """The complete thoughts."""

    content_index: int = 0
    text: str


class ArgumentsDelta(ItemEvent, tag="response.function_call_arguments.delta", kw_only=True):
    """A piece of a call's arguments."""

    delta: str


class ArgumentsDone(ItemEvent, tag="response.function_call_arguments.done", kw_only=True):
    """The complete arguments of a call."""

    name: str
    arguments: str


EVENTS = (
    *(Created, InProgress, Completed, Incomplete, Failed, Error, ItemAdded, ItemDone, PartAdded, PartDone),
    *(OutputTextDelta, OutputTextDone, ReasoningTextDelta, ReasoningTextDone, ArgumentsDelta, ArgumentsDone),
)
