"""Body fields that several APIs share, with their checks and their JSON schemas for `/openapi.json`."""

from __future__ import annotations

from typing import Any, get_args

from msgspec import Meta

from quire.frontend.http.errors import bad_request
from quire.frontend.http.transport.bodies import Refusals
from quire.frontend.text.chat.message_keys import REFUSED_KEYS
from quire.frontend.text.chat.tools import NAME, Mode
from quire.protocol.messages import SamplingParams, StructuredOutputs

LOCAL_SAMPLING = {  # name in llama.cpp's API, which Ollama's has too -> name of the sampling parameter
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Penalties that change nothing."""


def ignored_window(last: int | None, params: SamplingParams, max_model_len: int) -> list[str]:
    """Return `repeat_last_n` as ignored if it wants penalties for the `last` tokens only: they are for all."""
    has_penalty = any(getattr(params, name) != neutral for name, neutral in NO_PENALTIES.items())
    is_followed = last is None or not 0 < last < max_model_len or not has_penalty
    return [] if is_followed else ["repeat_last_n (penalties apply to all tokens)"]


STRUCTURED_OUTPUTS = "structured_outputs"
RESPONSE_FORMAT = "response_format"

NOT_HERE = "this server does not have it"
TOOL_REFUSED: Refusals = {  # keys of a tool
    "allowed_callers": ((["direct"],), "no code is run here"),
    "defer_loading": ((False,), "the model is shown all tools"),
}

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

EFFORT = Meta(extra_json_schema={"enum": list(_EFFORTS)})

_VERBOSITIES = ("low", "medium", "high")

VERBOSITY = Meta(extra_json_schema={"enum": list(_VERBOSITIES)})


def effort_kwargs(effort: str | None, field: str) -> dict[str, Any]:
    """Return the chat template's variables for a reasoning effort; some templates can only turn thinking off.

    Raises `ApiError` 400 for an unknown effort; `field` is the field that gave it.
    """
    if effort is None:
        return {}
    if effort not in _EFFORTS:
        raise bad_request(f"{field}={effort!r} is not known; it can be {', '.join(_EFFORTS)}", field, "invalid_value")
    return {"reasoning_effort": effort, **(thinking_kwargs(False) if effort == "none" else {})}


def ignored_verbosity(given: str | None, field: str) -> list[str]:
    """Return `field` if its value has no effect here; models are told in the prompt. Raises `ApiError` 400."""
    if given is None or given == _VERBOSITIES[1]:
        return []
    if given not in _VERBOSITIES:
        known = ", ".join(_VERBOSITIES)
        raise bad_request(f"{field}={given!r} is not known; it can be {known}", field, "invalid_value")
    return [field]


def thinking_kwargs(thinks: bool) -> dict[str, Any]:
    """Return the chat template's variables for thinking or not: Qwen's name, and DeepSeek's and Granite's."""
    return {"enable_thinking": thinks, "thinking": thinks}


def only_one(
    structured: StructuredOutputs | None, wanted: StructuredOutputs | None, field: str = RESPONSE_FORMAT
) -> StructuredOutputs | None:
    """Return the one that is given: `structured_outputs`, or `wanted` from `field`. Raises `ApiError` 400 for both."""
    if structured is not None and wanted is not None:
        raise bad_request(f"{field} and structured_outputs both constrain the answer; give only one of them", field)
    return wanted if structured is None else structured


_TEXT_OR_NULL = {"type": ["string", "null"]}
_ONLY_NULL = {"type": "null"}  # an unknown key must be null
_FUNCTION_NAME = {"type": "string", "pattern": f"^{NAME.pattern}$"}
_FUNCTION_TYPE = {"const": "function"}

_TEXT_PART = {
    "title": "TextPart",
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_REFUSAL_PART = {
    "title": "RefusalPart",
    "type": "object",
    "required": ["type", "refusal"],
    "properties": {"type": {"const": "refusal"}, "refusal": {"type": "string"}},
}
_TOOL_CALL = {
    "title": "ToolCall",
    "type": "object",
    "required": ["function"],
    "properties": {
        "id": {"type": "string"},
        "type": _FUNCTION_TYPE,
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {
                "name": {"type": "string"},
                "arguments": {"type": ["string", "object"], "description": "A JSON object, usually as text."},
            },
        },
    },
}
_MESSAGE: dict[str, Any] = {
    "title": "Message",
    "required": ["role"],
    "anyOf": [{"required": ["content"]}, {"required": ["tool_calls"]}, {"required": ["refusal"]}],
    "properties": {
        "role": {"type": "string", "minLength": 1, "examples": ["system", "developer", "user", "assistant", "tool"]},
        "content": {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"anyOf": [_TEXT_PART, _REFUSAL_PART]}},
                {"type": "null"},
            ],
            "description": "Text, or a list of text parts. Null only for the assistant, or with a refusal.",
        },
        "name": _TEXT_OR_NULL,
        "tool_calls": {
            "anyOf": [{"type": "array", "items": _TOOL_CALL}, {"type": "null"}],
            "description": "The calls that the assistant made.",
        },
        "tool_call_id": {**_TEXT_OR_NULL, "description": "The id of the call whose result a tool's message gives."},
        "reasoning_content": {**_TEXT_OR_NULL, "description": "The assistant's thoughts."},
        "reasoning": {**_TEXT_OR_NULL, "description": "Another name of reasoning_content."},
        "refusal": {"description": "Accepted in answers that are sent back."},
        "annotations": {"description": "Accepted in answers that are sent back."},
        "audio": {"const": None},
        "function_call": {"const": None},
    },
    "additionalProperties": {
        "description": "Other keys are ignored, and listed in the header X-Quire-Ignored, except "
        f"{', '.join(REFUSED_KEYS)}: these are not supported unless they are empty."
    },
}
_TOOL = {
    "title": "Tool",
    "required": ["type", "function"],
    "properties": {
        "type": _FUNCTION_TYPE,
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": _FUNCTION_NAME,
                "description": _TEXT_OR_NULL,
                "parameters": {"type": ["object", "null"], "description": "A JSON schema of an object."},
                "strict": {"type": ["boolean", "null"]},
            },
            "additionalProperties": _ONLY_NULL,
        },
        "cache_control": {"description": "Accepted and ignored; prefixes are cached automatically."},
    },
    "additionalProperties": _ONLY_NULL,
}
_NAMED = {
    "required": ["type", "function"],
    "properties": {
        "type": _FUNCTION_TYPE,
        "function": {"type": "object", "required": ["name"], "properties": {"name": _FUNCTION_NAME}},
    },
}
_ALLOWED_TOOLS = {
    "required": ["type", "allowed_tools"],
    "properties": {
        "type": {"const": "allowed_tools"},
        "allowed_tools": {
            "type": "object",
            "required": ["mode", "tools"],
            "properties": {
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "minItems": 1, "items": {"type": "object", **_NAMED}},
            },
        },
    },
}

MESSAGE = Meta(extra_json_schema=_MESSAGE)
TOOL = Meta(extra_json_schema=_TOOL)
CHOICE = Meta(extra_json_schema={"enum": list(get_args(Mode))})
NAMED_TOOL = Meta(extra_json_schema={"anyOf": [_NAMED, _ALLOWED_TOOLS]})
