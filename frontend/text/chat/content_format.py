"""The form in which a chat template takes the contents of messages: texts, or lists of parts."""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

FormatName = Literal["auto", "string", "openai"]

_CONTENT = r"(?:\w+(?:\[['\"]content['\"]\]|\.content)|content)"
_ALIAS = re.compile(rf"set\s+(\w+)\s*=\s*{_CONTENT}\s*-?%}}")


class ContentFormat(enum.Enum):
    """The form of contents that a template takes."""

    STRING = enum.auto()
    LIST = enum.auto()  # it loops over all contents
    EITHER = enum.auto()  # it loops over contents that are not strings


class PartedText(str):
    """The text of a content that was given as a list of parts, joined by line breaks."""

    __slots__ = ("parts",)
    parts: Sequence[str]

    @classmethod
    def joined(cls, parts: Sequence[str]) -> PartedText:
        """Return the text of parts."""
        text = cls("\n".join(parts))
        text.parts = parts
        return text


@functools.lru_cache(maxsize=8)
def detect_content_format(source: str) -> ContentFormat:
    """Return the form that a chat template takes, by its loops over contents and its tests of their type."""
    aliases = "|".join(map(re.escape, _ALIAS.findall(source)))
    content = rf"(?:{_CONTENT}|{aliases})" if aliases else _CONTENT
    if not re.search(rf"\bfor\s+\w+\s+in\s+{content}(?![\w.\[(|])(?!\s*[|~+])", source):
        return ContentFormat.STRING
    tests_strings = re.search(rf"{content}\s+is\s+(?:not\s+)?string\b", source)
    return ContentFormat.LIST if tests_strings is None else ContentFormat.EITHER


def in_format(messages: Iterable[Mapping[str, Any]], source: str, name: FormatName = "auto") -> list[dict[str, Any]]:
    """Return checked messages with their contents in the form that the template takes, or the one that is named.

    Where a template takes either, answers and messages of the user that were given in several parts are lists: many
    templates read texts only in the other roles.
    """
    form = detect_content_format(source) if name == "auto" else _NAMED[name]
    return [{**message, "content": _formed(message, form)} for message in messages]


_NAMED = {"string": ContentFormat.STRING, "openai": ContentFormat.LIST}


def _formed(message: Mapping[str, Any], form: ContentFormat) -> str | list[dict[str, str]] | None:
    content: str | None = message["content"]
    parts = content.parts if isinstance(content, PartedText) else () if content is None else (content,)
    either = len(parts) > 1 and message["role"] in ("user", "assistant")
    if form is ContentFormat.LIST or (form is ContentFormat.EITHER and either):
        return [{"type": "text", "text": part} for part in parts]
    return content
