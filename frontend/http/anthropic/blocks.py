"""Conversion of Anthropic's messages, made of content blocks, into messages of Chat Completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from quire.frontend.http.conversation import Transcript
from quire.frontend.http.errors import bad_request
from quire.frontend.http.transport.bodies import convert

T = TypeVar("T", bound=msgspec.Struct)
Blocks = str | Sequence[Mapping[str, Any]]


class _InputMessage(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class _TextBlock(msgspec.Struct):
    text: str


class _ThinkingBlock(msgspec.Struct):
    thinking: str


class _ToolUseBlock(msgspec.Struct):
    id: str
    name: str
    input: dict[str, Any]


class _ToolResultBlock(msgspec.Struct):
    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None


_MEDIA = {"image": "images", "document": "documents", "search_result": "search results", "container_upload": "files"}


def chat_messages(messages: Sequence[Mapping[str, Any]], system: Blocks | None) -> list[dict[str, Any]]:
    """Return `messages` and `system` as messages of Chat Completions. Raises `ApiError` 400."""
    transcript = Transcript()
    if system:
        transcript.say("system", _text(system, "system"))
    if not messages:
        raise bad_request('messages is empty; give at least {"role": "user", "content": ...}', "messages")
    for index, given in enumerate(messages):
        where = f"messages[{index}]"
        message = convert(given, _InputMessage, where)
        blocks = message.content
        if isinstance(blocks, str):
            blocks = [{"type": "text", "text": blocks}]
        elif not blocks:
            raise bad_request(f"{where}.content is empty; give a text or content blocks", f"{where}.content")
        for position, block in enumerate(blocks):
            _read(block, message.role, f"{where}.content[{position}]", transcript)
    return transcript.messages


def _read(block: Mapping[str, Any], role: str, where: str, transcript: Transcript) -> None:
    kind = block.get("type")
    if kind == "text":
        transcript.say(role, convert(block, _TextBlock, where).text, merge=True)
        return
    readers = _READERS.get(role, {})
    if not isinstance(kind, str) or kind not in readers:
        known = ", ".join(["text", *readers])
        reason = f"this server reads no {_MEDIA[kind]}" if kind in _MEDIA else "this role has no such blocks"
        message = f"{where} is of type {kind!r}, but {reason}; a message of the {role} may have {known}"
        raise bad_request(message, where)
    readers[kind](block, where, transcript)


def _thinking(block: Mapping[str, Any], where: str, transcript: Transcript) -> None:
    transcript.think(convert(block, _ThinkingBlock, where).thinking)


def _redacted_thinking(_block: Mapping[str, Any], _where: str, _transcript: Transcript) -> None:
    """Skip thoughts that only their provider can decrypt."""


def _tool_use(block: Mapping[str, Any], where: str, transcript: Transcript) -> None:
    call = convert(block, _ToolUseBlock, where)
    transcript.call(call.id, call.name, call.input)


def _tool_result(block: Mapping[str, Any], where: str, transcript: Transcript) -> None:
    result = convert(block, _ToolResultBlock, where)
    if not transcript.knows_call(result.tool_use_id):
        raise bad_request(
            f"{where} has tool_use_id={result.tool_use_id!r}, but no tool_use block before it has this id; "
            "give the assistant's message as well",
            f"{where}.tool_use_id",
        )
    text = _text(result.content or "", f"{where}.content")
    # Chat templates have no field for errors.
    transcript.result(result.tool_use_id, f"Error: {text}" if result.is_error else text)


def _text(content: Blocks, where: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_text_block(block, f"{where}[{index}]") for index, block in enumerate(content))


def _text_block(block: Mapping[str, Any], where: str) -> str:
    kind = block.get("type")
    if kind != "text":
        raise bad_request(f"{where} is of type {kind!r}; give {{'type': 'text', 'text': ...}} only", where)
    return convert(block, _TextBlock, where).text


_READERS: dict[str, dict[str, Callable[[Mapping[str, Any], str, Transcript], None]]] = {
    "user": {"tool_result": _tool_result},
    "assistant": {"tool_use": _tool_use, "thinking": _thinking, "redacted_thinking": _redacted_thinking},
}
