"""Messages in OpenAI's form, checked and prepared for a chat template."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from quire.frontend.errors import ChatTemplateError, kind_of
from quire.frontend.text.chat.call_writers import CallWriter, hermes, listed, writer_for
from quire.frontend.text.chat.content_format import PartedText
from quire.frontend.text.chat.harmony import is_harmony
from quire.frontend.text.chat.harmony_messages import harmony_messages
from quire.frontend.text.chat.message_keys import MESSAGE_KEYS, check_keys

Message = Mapping[str, Any]

TEXT_PARTS = {"text": "text", "refusal": "refusal"}  # type -> the key of its text
MEDIA_PARTS = {"image_url": "images", "input_audio": "audio", "file": "files", "video_url": "videos"}
TOOL_CALL_FORM = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": "{...}"}}'

# A template that joins arguments to other text needs them as JSON text; all others read or serialize the object.
_JOINS_ARGUMENTS = re.compile(
    r"""arguments(?:['"]\])?\s*[+~]   # arguments + ...
      | [+~]\s*[\w.\[\]'"]*arguments(?:['"]\])?(?!['"\]\s]*(?:\||\sis\s))  # ... + call.arguments, unless filtered
    """,
    re.VERBOSE,
)
_SERIALIZES_ARGUMENTS = re.compile(r"""arguments['"\]]*\s*\|\s*tojson""")
_TESTS_ARGUMENTS = re.compile(r"""arguments['"\]]*\s+is\s""")
_READS_TOOLS_OF_SYSTEM = re.compile(r"""message(?:\[['"]tools['"]\]|\.tools\b)""")


def check_messages(
    messages: Sequence[Message], template_source: str = "", describe_tools: bool = False
) -> list[dict[str, Any]]:
    """Return the messages in the form that the template takes.

    Contents become strings (text parts are joined by line breaks; `content_format` makes lists of them again), or None
    next to tool calls. Arguments of tool calls become objects, unless the template joins them to text. The role
    `developer` becomes `system`, unless the template supports it. Null and unknown fields are dropped (see
    `message_keys`). If the template does not write calls, they are written as text, and so are results if it has no
    tools at all (see `calls_as_text`), or with `describe_tools`, in the generic format. Without a source it is assumed
    to write calls. Raises ChatTemplateError that names the message and the problem.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ChatTemplateError(
            f'messages is {kind_of(messages)}; give a list such as [{{"role": "user", "content": "Hello"}}]'
        )
    if not messages:
        raise ChatTemplateError('messages is empty; give at least one, such as {"role": "user", "content": "Hello"}')
    to_system = "developer" not in template_source
    parse = _keep_text if _takes_text(template_source) and not describe_tools else _parse_arguments
    checked = [_check_message(message, f"messages[{index}]", parse) for index, message in enumerate(messages)]
    for message in checked:
        if message["role"] == "developer" and to_system:
            message["role"] = "system"
    checked = in_call_order(checked)
    if describe_tools:
        return calls_as_text(checked, hermes)
    if is_harmony(template_source):
        return harmony_messages(checked)
    if not template_source or "tool_calls" in template_source:
        return checked
    if "tool" in template_source:
        write = writer_for(template_source)
        return [_with_calls(message, message.get("tool_calls", ()), write) for message in checked]
    return calls_as_text(checked)


def _takes_text(template_source: str) -> bool:
    """Return True if a template joins arguments to other text.

    One that also serializes them, without a test of their type, joins those of another form of messages, as Apertus's.
    """
    joins, serializes, tests = (
        pattern.search(template_source) is not None
        for pattern in (_JOINS_ARGUMENTS, _SERIALIZES_ARGUMENTS, _TESTS_ARGUMENTS)
    )
    return joins and (tests or not serializes)


def _check_message(message: Message, where: str, parse: Callable[[str, str], Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ChatTemplateError(f'{where} is {kind_of(message)}; give {{"role": ..., "content": ...}}')
    check_keys(message, where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ChatTemplateError(f"{where} has role={role!r}; give a role such as 'system', 'user' or 'assistant'")
    _refuse_legacy(message, where)
    kept = {key: message[key] for key in message if key in MESSAGE_KEYS and message[key] is not None}
    if message.get("reasoning") is not None:
        kept.setdefault("reasoning_content", message["reasoning"])
    for key in ("name", "tool_call_id", "reasoning_content"):
        if not isinstance(kept.get(key, ""), str):
            raise ChatTemplateError(f"{where}.{key} is {kind_of(kept[key])}; give a string")
    calls = _check_tool_calls(kept.pop("tool_calls", None), where, role, parse)
    return {**kept, "content": _check_content(message, where, bool(calls)), **({"tool_calls": calls} if calls else {})}


def _refuse_legacy(message: Message, where: str) -> None:
    if message.get("function_call") is not None:
        raise ChatTemplateError(
            f"{where}.function_call belongs to OpenAI's legacy API; give tool_calls: [{TOOL_CALL_FORM}]"
        )
    if message.get("role") == "function":
        raise ChatTemplateError(
            f"{where} has role='function' of OpenAI's legacy API; give role='tool' with the tool_call_id of the call"
        )
    if message.get("audio") is not None:
        raise ChatTemplateError(f"{where}.audio is given, but only text is supported; give its transcript as content")


def _check_content(message: Message, where: str, has_calls: bool) -> str | None:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and has_calls:
        return None
    if content is None and isinstance(message.get("refusal"), str):
        return str(message["refusal"])
    if content is None and "content" in message and message.get("role") == "assistant":
        return ""  # an answer may be empty: it was cut off, or had thoughts only
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        return PartedText.joined([_check_part(part, f"{where}.content[{index}]") for index, part in enumerate(content)])
    given = "is missing" if "content" not in message else f"is {kind_of(content)}"
    raise ChatTemplateError(f'{where}.content {given}; give a string or a list of {{"type": "text", "text": ...}}')


def _check_part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if isinstance(kind, str) and kind in MEDIA_PARTS and isinstance(part, Mapping):
        raise ChatTemplateError(
            f"{where} is of type {kind!r}, but this server does not support {MEDIA_PARTS[kind]}; "
            'give {"type": "text", "text": ...} only'
        )
    if not isinstance(kind, str) or kind not in TEXT_PARTS or not isinstance(part, Mapping):
        raise ChatTemplateError(f'{where} is of type {kind!r}; only {{"type": "text", "text": ...}} is supported')
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise ChatTemplateError(f"{where}.{TEXT_PARTS[kind]} is {kind_of(text)}; give a string")
    return text


def _check_tool_calls(given: Any, where: str, role: str, parse: Callable[[str, str], Any]) -> list[dict[str, Any]]:
    if not given and isinstance(given, (list, tuple, type(None))):
        return []
    if role != "assistant":
        raise ChatTemplateError(f"{where} has tool_calls with role={role!r}; only an assistant message may have them")
    if not isinstance(given, (list, tuple)):
        raise ChatTemplateError(f"{where}.tool_calls is {kind_of(given)}; give a list of {TOOL_CALL_FORM}")
    return [_check_tool_call(call, f"{where}.tool_calls[{index}]", parse) for index, call in enumerate(given)]


def _check_tool_call(call: Any, where: str, parse: Callable[[str, str], Any]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or call.get("type", "function") != "function":
        raise ChatTemplateError(f"{where} is not a function call; give {TOOL_CALL_FORM}")
    if not isinstance(function.get("name"), str):
        raise ChatTemplateError(f"{where}.function.name is {function.get('name')!r}; give the name of the function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = parse(arguments, f"{where}.function.arguments")
    elif not isinstance(arguments, Mapping):
        what = kind_of(arguments)
        raise ChatTemplateError(f"{where}.function.arguments is {what}; give a string that holds a JSON object")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _parse_arguments(arguments: str, where: str) -> dict[str, Any]:
    """Parse `arguments` as a JSON object; an empty string is an empty object."""
    try:
        value = json.loads(arguments.strip() or "{}", strict=False)
    except (ValueError, RecursionError) as error:
        raise ChatTemplateError(f"{where} is not JSON: {error}; give a string that holds a JSON object") from None
    if not isinstance(value, dict):
        raise ChatTemplateError(f"{where} holds {kind_of(value)}; give a string that holds a JSON object")
    return value


def _keep_text(arguments: str, where: str) -> str:
    _parse_arguments(arguments, where)
    return arguments


def in_call_order(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `messages` with the results of an answer's calls in the order of the calls.

    Most templates write no ids, so that the order alone tells which call a result is of. Results of unknown calls come
    last.
    """
    ordered: list[dict[str, Any]] = []
    for role, group in itertools.groupby(messages, lambda message: message["role"] == "tool"):
        results = list(group)
        if role and ordered:
            calls = ordered[-1].get("tool_calls", ())
            ids = (call.get("id") for call in calls)
            places = {given: index for index, given in enumerate(ids) if isinstance(given, str)}
            results.sort(key=lambda result: places.get(result.get("tool_call_id", ""), len(calls)))
        ordered += results
    return ordered


def _labels(calls: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return what results are called by the ids of their calls: the function's name, and a number if it has several."""
    names = [call["function"]["name"] for call in calls]
    counts = Counter(names)
    return {
        call["id"]: name if counts[name] == 1 else f"{name} (call {number})"
        for number, (call, name) in enumerate(zip(calls, names, strict=True), start=1)
        if isinstance(call.get("id"), str)
    }


def calls_as_text(messages: Iterable[Mapping[str, Any]], write: CallWriter | None = None) -> list[dict[str, Any]]:
    """Rewrite checked `messages` as text without tools.

    Calls become the assistant's text, as `write` has them, by default in the `json_call` format. Results become
    messages of the user, joined with the next ones, since many templates require roles to alternate. Raises
    ChatTemplateError for arguments that are nested too deep to be serialized.
    """
    written: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # what results are called, by the id of their call
    results: dict[str, Any] | None = None  # message that consecutive results are joined to
    for message in messages:
        calls = message.get("tool_calls", ())
        names |= _labels(calls)
        if message["role"] != "tool":
            if results is not None and message["role"] == "user":
                results["content"] += f"\n\n{message['content']}"
                continue
            results = None
            written.append(_with_calls(message, calls, write or listed))
            continue
        name = names.get(message.get("tool_call_id", ""), message.get("name", "the call"))
        text = f"Result of {name}: {message['content']}"
        if results is None:
            results = {"role": "user", "content": text}
            written.append(results)
        else:
            results["content"] += "\n" + text
    return written


def with_tools(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], template_source: str
) -> list[dict[str, Any]]:
    """Return checked `messages` with the tools in the system's one, if that is where the template looks for them.

    The template of Phi-4-mini does, for the JSON text of a list of functions.
    """
    if not _READS_TOOLS_OF_SYSTEM.search(template_source):
        return messages
    has_system = messages[0]["role"] == "system"
    system = messages[0] if has_system else {"role": "system", "content": ""}
    functions = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    return [{**system, "tools": functions}, *messages[has_system:]]


def _with_calls(
    message: Mapping[str, Any],
    calls: Iterable[Mapping[str, Any]],
    write: CallWriter = listed,
) -> dict[str, Any]:
    if not calls:
        return dict(message)
    functions = [{key: call["function"][key] for key in ("name", "arguments")} for call in calls]
    try:
        text = write(functions)
    except RecursionError:
        raise ChatTemplateError("tool_calls have arguments that are nested too deep; give flatter ones") from None
    content = f"{message['content']}\n{text}" if message["content"] else text
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content}
