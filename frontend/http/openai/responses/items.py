"""What a response holds: messages, calls and thoughts of the assistant."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.frontend.http.openai.logprobs import TokenLogprob


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """What the assistant says to the user."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """What the model thinks."""

    text: str = ""


Part = OutputText | ReasoningText


class OutputMessage(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    """A message of the assistant's."""

    id: str
    status: str = "in_progress"
    role: str = "assistant"
    content: list[Part] = []


class FunctionCall(msgspec.Struct, tag_field="type", tag="function_call", kw_only=True):
    """A call that the client should make; `arguments` is JSON as the model wrote it."""

    id: str
    status: str = "in_progress"
    call_id: str
    name: str
    arguments: str = ""


class Reasoning(msgspec.Struct, tag_field="type", tag="reasoning", kw_only=True):
    """Thoughts, which are told whole and in the open."""

    id: str
    status: str = "in_progress"
    summary: list[Any] = []
    content: list[Part] = []
    encrypted_content: None = None


Item = OutputMessage | FunctionCall | Reasoning
