"""Messages and variables as the chat templates of the harmony format take them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from quire.frontend.errors import ChatTemplateError

EFFORTS = ("low", "medium", "high")


def check_variables(variables: Mapping[str, Any]) -> None:
    """Raise ChatTemplateError for values that the template would write although no model knows them."""
    effort = variables.get("reasoning_effort", EFFORTS[0])
    if effort not in EFFORTS:
        raise ChatTemplateError(
            f"reasoning_effort={effort!r} is not known to this model; it can be {', '.join(EFFORTS)}"
        )
    if variables.get("builtin_tools"):
        raise ChatTemplateError(
            f"builtin_tools={variables['builtin_tools']!r} is not supported: this server has no browser and runs no "
            "code; leave it out, and give functions of your own as tools"
        )


def harmony_messages(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return checked `messages` with thoughts under the template's key, and one call in each message.

    The template writes the first call of a message only, and takes a tool's message for the result of the last call; so
    the results of several calls are put after their calls.
    """
    written: list[dict[str, Any]] = []
    results: list[Mapping[str, Any]] = []
    calling: Mapping[str, Any] = {}
    for message in messages:
        if calling and message["role"] == "tool":
            results.append(message)
            continue
        written += _called(calling, results)
        calling, results = (message if message.get("tool_calls") else {}), []
        if not calling:
            written.append(_with_thoughts(message))
    return [*written, *_called(calling, results)]


def _with_thoughts(message: Mapping[str, Any]) -> dict[str, Any]:
    thoughts = message.get("reasoning_content")
    return {**message, **({"thinking": thoughts} if thoughts else {})}


def _called(message: Mapping[str, Any], results: list[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the calls of a message, each followed by its results.

    The template refuses text beside thoughts, and takes it for thoughts without them; so the text joins them.
    """
    said = "\n".join(filter(None, (message.get("reasoning_content"), message.get("content"))))
    calls = message.get("tool_calls", ())
    ids = [call.get("id") for call in calls]
    for index, call in enumerate(calls):
        thoughts = {"thinking": said} if said and index == 0 else {}
        yield {"role": "assistant", "content": "", "tool_calls": [call], **thoughts}
        is_last = index == len(ids) - 1
        for result in results:
            given = result.get("tool_call_id")
            if ids[index] == given or (is_last and given not in ids):
                yield dict(result)
