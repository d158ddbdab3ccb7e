"""Conversion of the `input` items of a response into messages of Chat Completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from quire.frontend.errors import kind_of
from quire.frontend.http.conversation import Transcript
from quire.frontend.http.errors import bad_request
from quire.frontend.http.transport.bodies import convert

T = TypeVar("T", bound=msgspec.Struct)


class _MessageItem(msgspec.Struct):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]


class _FunctionCallItem(msgspec.Struct):
    call_id: str
    name: str
    arguments: str


class _FunctionCallOutputItem(msgspec.Struct):
    call_id: str
    output: str | list[dict[str, Any]]


class _ReasoningItem(msgspec.Struct):
    summary: list[dict[str, Any]] | None = None
    content: list[dict[str, Any]] | None = None


_REFERENCE = "nothing is stored, so references can't be resolved; give the item itself"
_TEXTS = {  # type of a part -> the key of its text
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "reasoning_text": "text",
    "summary_text": "text",
}
_MEDIA = {"input_image": "images", "input_file": "files", "input_audio": "audio"}


def messages_of(given: str | Sequence[dict[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """Return `input` and `instructions` as messages of Chat Completions. Raises `ApiError` 400."""
    transcript = Transcript()
    if instructions is not None:
        transcript.say("system", instructions)
    if isinstance(given, str):
        transcript.say("user", given)
    elif not given:
        raise bad_request('input is empty; give a text, or items such as {"role": "user", "content": ...}', "input")
    else:
        for index, item in enumerate(given):
            _read(item, f"input[{index}]", transcript)
    return transcript.messages


def _read(item: dict[str, Any], where: str, transcript: Transcript) -> None:
    kind = item.get("type") or ("message" if "role" in item else "item_reference")
    if kind == "item_reference":
        raise bad_request(f"{where} is a reference: {_REFERENCE}", where)
    if not isinstance(kind, str) or kind not in _READERS:
        raise bad_request(f"{where} is of type {kind!r}; known are {', '.join(_READERS)}", where)
    _READERS[kind](item, where, transcript)


def _message(item: dict[str, Any], where: str, transcript: Transcript) -> None:
    message = convert(item, _MessageItem, where)
    transcript.say(message.role, _text(message.content, f"{where}.content"))


def _function_call(item: dict[str, Any], where: str, transcript: Transcript) -> None:
    call = convert(item, _FunctionCallItem, where)
    try:
        arguments = msgspec.json.decode(call.arguments.strip() or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise bad_request(f"{where}.arguments is not a JSON object: {error}; give the text of one", where) from None
    transcript.call(call.call_id, call.name, arguments)


def _function_call_output(item: dict[str, Any], where: str, transcript: Transcript) -> None:
    result = convert(item, _FunctionCallOutputItem, where)
    if not transcript.knows_call(result.call_id):
        raise bad_request(
            f"{where} has call_id={result.call_id!r}, but no function_call before it has this call_id; "
            "give the call as well",
            f"{where}.call_id",
        )
    transcript.result(result.call_id, _text(result.output, f"{where}.output"))


def _reasoning(item: dict[str, Any], where: str, transcript: Transcript) -> None:
    thoughts = convert(item, _ReasoningItem, where)
    text = _text(thoughts.content or [], f"{where}.content") or _text(thoughts.summary or [], f"{where}.summary")
    if text:
        transcript.think(text)


def _text(content: str | list[dict[str, Any]], where: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: Mapping[str, Any], where: str) -> str:
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _TEXTS:
        reason = f"this server reads no {_MEDIA[kind]}" if kind in _MEDIA else f"known are {', '.join(_TEXTS)}"
        raise bad_request(f"{where} is of type {kind!r}, but {reason}; give text only", where)
    text = part.get(_TEXTS[kind])
    if not isinstance(text, str):
        raise bad_request(f"{where}.{_TEXTS[kind]} is {kind_of(text)}; give a string", where)
    return text


_READERS: dict[str, Callable[[dict[str, Any], str, Transcript], None]] = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _function_call_output,
    "reasoning": _reasoning,
}
