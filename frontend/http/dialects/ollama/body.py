"""The bodies of Ollama's API, and its messages as messages of Chat Completions."""

from __future__ import annotations

import math
import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from quire.frontend.http.dialects.ollama.options import GIVEN_OPTIONS
from quire.frontend.http.errors import ApiError, bad_request
from quire.frontend.http.shared_fields import NOT_HERE, TOOL, effort_kwargs, thinking_kwargs
from quire.frontend.http.transport.bodies import ITEMS, MAX_ITEMS, Body, Refusals, convert
from quire.protocol.messages import StructuredOutputs

_NO_IMAGES = "this server reads no images"
_NUMBER = r"[0-9]+(\.[0-9]*)?"
_DURATION = Meta(pattern=rf"^[-+]?({_NUMBER}|({_NUMBER}(ns|us|µs|ms|s|m|h))+)(?![\s\S])", max_length=64)

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}

KeepAlive = Annotated[str, _DURATION] | int | float
"""A duration such as 5m or 1h30m, or seconds. A negative one is for ever, as is one of decades."""

_MOST_SECONDS = 1e9


def seconds_of(duration: str | float) -> float:
    """Return the seconds of a `KeepAlive`, infinite for one that is for ever."""
    if isinstance(duration, str):
        parts = re.findall(rf"({_NUMBER})([a-zµ]*)", duration)
        seconds = sum(float(number) * _UNITS[unit or "s"] for number, _, unit in parts)
        return math.inf if duration.startswith("-") or seconds > _MOST_SECONDS else seconds
    return float(duration) if 0 <= duration <= _MOST_SECONDS else math.inf


_MOST_SHOWN = 200  # characters of an unknown name in its error


class OllamaNames(Body, kw_only=True):
    """Base class of Ollama's bodies that name a model. Their clients rarely send a Content-Type."""

    is_lenient: ClassVar[bool] = True

    @staticmethod
    def unknown_model(name: str, known: Sequence[str]) -> ApiError:
        """See `Body`: in Ollama's words, which its clients look for."""
        return ApiError(
            404,
            f'model "{name[:_MOST_SHOWN]}" not found, this server has {", ".join(known)}; start one for another: quire '
            "serve MODEL",
            code="model_not_found",
            param="model",
        )


class OllamaBody(OllamaNames, kw_only=True):
    """Fields of all bodies for the model."""

    options: Annotated[dict[str, Any], GIVEN_OPTIONS] | None = None
    keep_alive: KeepAlive | None = None

    @property
    def keep_seconds(self) -> float | None:
        """See `Body`."""
        return None if self.keep_alive is None else seconds_of(self.keep_alive)


_FORMATS = ("", "json")  # without a schema; the first is how some clients leave it out

_REFUSED: Refusals = {
    "logprobs": ((False,), "use POST /v1/chat/completions or /v1/completions, which have them"),
    "shift": ((False,), "an answer ends where the context does"),
    "top_logprobs": ((0,), "use POST /v1/chat/completions or /v1/completions, which have them"),
}


class OllamaGenerationBody(OllamaBody, kw_only=True):
    """Fields of a body that asks for text."""

    stream: Annotated[bool | None, Meta(description="Send the answer as lines of JSON, which is the default.")] = None
    format: Annotated[str, Meta(extra_json_schema={"enum": list(_FORMATS)})] | dict[str, Any] | None = None
    think: bool | str | None = None

    def check(self) -> None:
        """Raise `ApiError` 400 for an unknown format or effort."""
        if isinstance(self.format, str) and self.format not in _FORMATS:
            raise bad_request(f"format={self.format!r} is not known; it can be 'json' or a JSON schema", "format")
        self.template_kwargs()

    @property
    def structured_outputs(self) -> StructuredOutputs | None:
        """The constraint on the answer, None without one."""
        if isinstance(self.format, dict):
            return StructuredOutputs(json=self.format)
        return StructuredOutputs(json_object=True) if self.format else None

    def template_kwargs(self) -> dict[str, Any]:
        """Return the chat template's variables for thinking. Raises `ApiError` 400 for an unknown effort."""
        match self.think:
            case None:
                return {}
            case bool():
                return thinking_kwargs(self.think)
            case effort:
                return {**thinking_kwargs(True), **effort_kwargs(effort, "think")}


class GenerateBody(OllamaGenerationBody, kw_only=True):
    """The body of a request for one answer, with Ollama's fields."""

    refused: ClassVar[Refusals] = {
        **_REFUSED,
        "context": (([],), "send the conversation so far to POST /api/chat"),
        "height": ((0,), "no images are made here"),
        "images": (([],), _NO_IMAGES),
        "steps": ((0,), "no images are made here"),
        "suffix": (("",), "fill-in-the-middle is not available; give the preceding text as prompt"),
        "template": (("",), "a template is a program; use the model's own, or raw=true and a prompt that needs none"),
        "truncate": ((False,), "a prompt that does not fit the context is rejected; shorten it"),
        "width": ((0,), "no images are made here"),
    }

    prompt: Annotated[str | None, Meta(description="The text to answer. Without it, only the model is checked.")] = None
    system: Annotated[str | None, Meta(description="The system prompt.")] = None
    raw: bool | None = None


class CalledTool(msgspec.Struct):
    """The function of a tool call; `index` is its place among the calls of a message."""

    name: str
    arguments: dict[str, Any] = {}
    index: int | None = None


class OllamaToolCall(msgspec.Struct):
    """A tool call of the assistant."""

    function: CalledTool
    id: str | None = None
    type: Literal["function"] | None = None


class OllamaMessage(msgspec.Struct):
    """A message. A tool's has its result, for the call with the id `tool_call_id`, or the first open one of the tool.

    `images` are not supported. Other keys are ignored.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaToolCall], ITEMS] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: list[str] | None = None


MESSAGE_KEYS = frozenset(OllamaMessage.__struct_fields__)

_TEXT_OR_NULL = {"type": ["string", "null"]}
_CALLED = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string"},
        "arguments": {"type": "object"},
        "index": {"type": ["integer", "null"], "description": "Its place among the calls of a message."},
    },
}
_CALL = {
    "type": "object",
    "required": ["function"],
    "properties": {"function": _CALLED, "id": _TEXT_OR_NULL, "type": {"enum": ["function", None]}},
}
_MESSAGE = Meta(
    extra_json_schema={
        "title": "OllamaMessage",
        "description": OllamaMessage.__doc__,
        "required": ["role"],
        "properties": {
            "role": {"enum": ["system", "user", "assistant", "tool"]},
            "content": _TEXT_OR_NULL,
            "thinking": _TEXT_OR_NULL,
            "tool_calls": {"anyOf": [{"type": "array", "items": _CALL, "maxItems": MAX_ITEMS}, {"type": "null"}]},
            "tool_name": _TEXT_OR_NULL,
            "tool_call_id": _TEXT_OR_NULL,
            "images": {"type": ["array", "null"], "maxItems": 0},
        },
    }
)


class OllamaChatBody(OllamaGenerationBody, kw_only=True):
    """The body of a chat, with Ollama's fields."""

    refused: ClassVar[Refusals] = _REFUSED

    messages: Annotated[list[Annotated[dict[str, Any], _MESSAGE]], ITEMS] | None = None
    truncate: Annotated[
        bool | None,
        Meta(
            description="Leave out the oldest turns, but for the system's, when all exceed the context. Default: true."
        ),
    ] = None
    tools: Annotated[list[Annotated[dict[str, Any], TOOL]], ITEMS] | None = None


class OllamaEmbedBody(OllamaBody, kw_only=True):
    """The body of an embedding request, with Ollama's fields."""

    input: Annotated[str | list[str], Meta(description="A text, or a list of texts.")]
    truncate: Annotated[bool | None, Meta(description="Shorten texts that exceed the context. Default: true.")] = None
    dimensions: int | None = None


class OllamaEmbeddingsBody(OllamaBody, kw_only=True):
    """The body of a request for one embedding, with the fields of Ollama's older endpoint."""

    prompt: Annotated[str | None, Meta(description="The text.")] = None


class NamedBody(OllamaNames, kw_only=True):
    """A body that only names a model, in `model` or by its old name `name`."""

    name: str | None = None

    @property
    def named(self) -> str | None:
        """The name, None if there is none."""
        return self.name if self.model is None else self.model


class ShowBody(NamedBody, kw_only=True):
    """The body of a request for the description of a model, with Ollama's fields."""

    refused: ClassVar[Refusals] = {
        "options": (({},), NOT_HERE),
        "system": (("",), NOT_HERE),
        "template": (("",), NOT_HERE),
        "verbose": ((False,), "this server shows neither tensors nor vocabulary; POST /tokenize gives token ids"),
    }


class PullBody(NamedBody, kw_only=True):
    """The body of a request to download a model, with Ollama's fields. `insecure` has no effect without a download."""

    refused: ClassVar[Refusals] = {
        "password": (("",), "nothing is downloaded"),
        "username": (("",), "nothing is downloaded"),
    }

    insecure: bool | None = None
    stream: Annotated[bool | None, Meta(description="Answer in a line of JSON, which is the default.")] = None


def chat_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return `messages` as messages of Chat Completions. Raises `ApiError` 400."""
    ledger = _CallLedger()
    return [_chat_message(message, f"messages[{index}]", ledger) for index, message in enumerate(messages)]


def _chat_message(given: Mapping[str, Any], where: str, ledger: _CallLedger) -> dict[str, Any]:
    message = convert(given, OllamaMessage, where)
    if message.images:
        raise bad_request(f"{where}.images is not supported: {_NO_IMAGES}", f"{where}.images", "unsupported_parameter")
    for name, role in (("thinking", "assistant"), ("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if getattr(message, name) and message.role != role:
            raise bad_request(
                f"{where}.{name} is given with role {message.role!r}; only a message of the {role} has it",
                f"{where}.{name}",
            )
    result: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.thinking:
        result["reasoning_content"] = message.thinking
    if message.tool_calls:
        result["tool_calls"] = [ledger.call(call) for call in message.tool_calls]
    if message.role == "tool":
        result |= ledger.result(message)
    return result


class _CallLedger:
    """The calls of a conversation, which get ids where clients leave them out, and those without a result."""

    def __init__(self) -> None:
        self._count = 0
        self._tools: dict[str, str] = {}  # by the id of a call without a result
        self._queues: defaultdict[str, deque[str]] = defaultdict(deque)  # ids by tool, in "" all; some have a result

    def call(self, given: OllamaToolCall) -> dict[str, Any]:
        """Return a call in the form of Chat Completions."""
        call_id, name = given.id or f"call{self._count:05}", given.function.name  # Mistral's template wants 9 letters
        self._count += 1
        self._tools[call_id] = name
        for key in ("", name):
            self._queues[key].append(call_id)
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": given.function.arguments}}

    def result(self, message: OllamaMessage) -> dict[str, Any]:
        """Return the fields of a message with a result that say which call it is of."""
        call_id = message.tool_call_id or self._first(message.tool_name or "") or self._first("")
        name = self._tools.pop(call_id or "", None) or message.tool_name
        return {key: value for key, value in (("tool_call_id", call_id), ("name", name)) if value}

    def _first(self, tool: str) -> str | None:
        queue = self._queues[tool]
        while queue and queue[0] not in self._tools:
            queue.popleft()
        return queue[0] if queue else None
