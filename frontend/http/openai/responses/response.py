"""The response as a client sees it, and the items that it holds."""

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
    previous_response_id: None = None
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
