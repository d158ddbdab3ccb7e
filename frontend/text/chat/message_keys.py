"""Keys of messages in OpenAI's form: those that are read, those that are refused, and those that are ignored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from quire.frontend.errors import ChatTemplateError

MESSAGE_KEYS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"})
# Fields of API answers that no prompt uses; allowed so that an answer can be sent back as it came.
# `reasoning` is another servers' name for reasoning_content.
_ANSWER_KEYS = frozenset({"refusal", "audio", "annotations", "function_call", "reasoning"})
KNOWN_KEYS = MESSAGE_KEYS | _ANSWER_KEYS

_TEXT_ONLY = "only text is supported; leave it out, or give its text as content"
_CONTINUE = "set continue_final_message=true and add_generation_prompt=false beside messages instead"
REFUSED_KEYS = {  # of other servers, whose values the answer would depend on
    "attachments": _TEXT_ONLY,
    "documents": _TEXT_ONLY,
    "files": _TEXT_ONLY,
    "image": _TEXT_ONLY,
    "images": _TEXT_ONLY,
    "partial": _CONTINUE,
    "prefix": _CONTINUE,
    "videos": _TEXT_ONLY,
}


def check_keys(message: Mapping[str, Any], where: str) -> None:
    """Raise ChatTemplateError for a key that has a meaning at other servers and can't be ignored, unless it is empty.

    All other unknown keys are ignored: other servers add such to their answers, which clients send back.
    """
    for key in REFUSED_KEYS.keys() & message.keys():
        if message[key]:
            raise ChatTemplateError(f"{where}.{key} is not supported: {REFUSED_KEYS[key]}")


def ignored_keys(parts: Iterable[Any], known: frozenset[str] = KNOWN_KEYS) -> list[str]:
    """Return the keys of messages, or of other `parts`, that are not `known` and not null."""
    maps = (part for part in parts if isinstance(part, Mapping))
    return sorted({str(key) for part in maps for key in part.keys() - known if part[key] is not None})
