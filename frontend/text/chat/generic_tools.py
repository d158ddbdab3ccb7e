"""The generic format of tools, for models whose chat template shows none: the system's message describes them.

Calls are the JSON of an object in `<tool_call>` tags, a form that many models have seen; results are messages of the
user. A grammar holds the answers to the format, so that it works with any model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

GENERIC = "generic"
"""The name of the format's parser."""

HEADING = "You can call these functions. Each has the JSON schema of its arguments as parameters."
_HOW = """To call functions, write for each call:
<tool_call>
{"name": FUNCTION, "arguments": {...}}
</tool_call>
The results come in the next message. If no function is needed, answer in plain words."""


def described(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the description of tools, which have the form that chat templates take."""
    functions = (json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return "\n".join([HEADING, *functions, _HOW])


def with_description(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> Iterator[list[Mapping[str, Any]]]:
    """Yield checked `messages` with the tools described in the system's message, then in the user's first one.

    The second place is for templates that refuse or drop messages of the system.
    """
    text = described(tools)
    first = messages[0]
    if first["role"] == "system":
        yield [_joined(first, f"{first['content']}\n\n{text}"), *messages[1:]]
    else:
        yield [{"role": "system", "content": text}, *messages]
    for index, message in enumerate(messages):
        if message["role"] == "user":
            yield [*messages[:index], _joined(message, f"{text}\n\n{message['content']}"), *messages[index + 1 :]]
            return


def _joined(message: Mapping[str, Any], content: str) -> dict[str, Any]:
    return {**message, "content": content.strip()}
