"""The response as a client sees it, the items that it holds, and the events of a streamed one."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.frontend.http.openai.logprobs import TokenLogprob


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """Text of the assistant."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """Text of the model's thoughts."""

    text: str = ""


Part = OutputText | ReasoningText


class OutputMessage(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    """A message of the assistant."""

    id: str
    status: str = "in_progress"
    role: str = "assistant"
    content: list[Part] = []


class FunctionCall(msgspec.Struct, tag_field="type", tag="function_call", kw_only=True):
    """A call that the client should make; `arguments` is JSON as the model generated it."""

    id: str
    status: str = "in_progress"
    call_id: str
    name: str
    arguments: str = ""


class Reasoning(msgspec.Struct, tag_field="type", tag="reasoning", kw_only=True):
    """Thoughts of the model, returned in full as plain text."""

    id: str
    status: str = "in_progress"
    summary: list[Any] = []
    content: list[Part] = []
    encrypted_content: None = None


Item = OutputMessage | FunctionCall | Reasoning


class InputTokensDetails(msgspec.Struct):
    """`cached_tokens`: input tokens found in the prefix cache. Writing to the cache is never counted."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    """`reasoning_tokens`: output tokens of the thoughts."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    """The reason why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    """The reason why a response was cut off."""

    reason: str


class Response(msgspec.Struct, kw_only=True):
    """A response. `status` is "in_progress", then "completed", "incomplete", "cancelled" or "failed"."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str = "in_progress"
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    metadata: dict[str, Any]
    model: str
    output: list[Item] = []
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: dict[str, Any]
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None


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


class ContentEvent(ItemEvent, kw_only=True):
    """An event about the content of an item, which has one part."""

    content_index: int = 0


class PartAdded(ContentEvent, tag="response.content_part.added", kw_only=True):
    """A part of an item begins."""

    part: Part


class PartDone(ContentEvent, tag="response.content_part.done", kw_only=True):
    """A part of an item has ended."""

    part: Part


class OutputTextDelta(ContentEvent, tag="response.output_text.delta", kw_only=True):
    """A piece of the assistant's text."""

    delta: str
    logprobs: list[TokenLogprob]


class OutputTextDone(ContentEvent, tag="response.output_text.done", kw_only=True):
    """The complete text."""

    text: str
    logprobs: list[TokenLogprob]


class ReasoningTextDelta(ContentEvent, tag="response.reasoning_text.delta", kw_only=True):
    """A piece of the model's thoughts."""

    delta: str


class ReasoningTextDone(ContentEvent, tag="response.reasoning_text.done", kw_only=True):
    """The complete thoughts."""

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
