"""The bodies of the Messages API, their tools, and their content blocks as messages of Chat Completions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from quire.frontend.http.conversation import Transcript
from quire.frontend.http.errors import bad_request, errors_renamed
from quire.frontend.http.shared_fields import EFFORT, NOT_HERE, TOOL_REFUSED
from quire.frontend.http.transport.bodies import ITEMS, NOT_EMPTY, Body, Refusals, convert
from quire.frontend.text.chat.tools import ToolUse, check_tools, hosted_tools
from quire.protocol.messages import StructuredOutputs

FIELD_NAMES = {  # name in errors -> name in this API
    ".function.parameters": ".input_schema",
    ".function": "",
    "'required', to a function": "'any', to 'tool'",
    "'required'": "'any'",
    "stop=": "stop_sequences=",
    "structured_outputs.json": "output_config.format.schema",
}

_KEEPS_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}

MESSAGES_REFUSED: Refusals = {
    "container": ((), "no code is run here"),
    "context_management": (({}, {"edits": []}, _KEEPS_ALL), NOT_HERE),
    "diagnostics": (({},), NOT_HERE),
    "fallbacks": (([],), NOT_HERE),
    "inference_geo": ((), NOT_HERE),
    "mcp_servers": (([],), "the client calls the tools"),
    "output_format": ((), 'use output_config={"format": ...}'),
    "speed": (("standard",), NOT_HERE),
    "service_tier": (("auto", "standard_only"), "all requests are served alike"),
    "user_profile_id": ((), NOT_HERE),
    "workspace_id": ((), NOT_HERE),
}


_BUDGET = Meta(description="Required with type enabled, and below max_tokens, which limits thoughts; else ignored.")


class ThinkingConfig(msgspec.Struct, forbid_unknown_fields=True):
    """Choice of thinking before the answer, for models with such a chat template; max_tokens limits thoughts."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, _BUDGET] | None = None
    display: Literal["summarized", "omitted"] | None = None

    def check(self, max_tokens: int) -> None:
        """Raise `ApiError` 400 unless the budget fits into the answer."""
        if self.type == "enabled" and self.budget_tokens is None:
            raise bad_request("thinking.budget_tokens is missing; give it with type 'enabled'", "thinking")
        if self.type != "enabled" or self.budget_tokens is None:
            return  # clients send a budget of 0 with the other types
        if not 0 < self.budget_tokens < max_tokens:
            raise bad_request(
                f"thinking.budget_tokens={self.budget_tokens} must be from 1 to max_tokens - 1 = {max_tokens - 1}",
                "thinking",
            )


class OutputSchema(msgspec.Struct, forbid_unknown_fields=True):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """`effort` goes to the chat template, `format` constrains the answer."""

    effort: Annotated[str, EFFORT] | None = None
    format: OutputSchema | None = None

    @property
    def structured_outputs(self) -> StructuredOutputs | None:
        """The constraint on the answer, None without one."""
        return None if self.format is None else StructuredOutputs(json=self.format.schema)


class PromptFields(Body, kw_only=True):
    """The fields of the prompt. `cache_control` is accepted and ignored: prefixes are always cached."""

    refused: ClassVar[Refusals] = MESSAGES_REFUSED

    messages: Annotated[list[dict[str, Any]], NOT_EMPTY, ITEMS]
    system: str | Annotated[list[dict[str, Any]], ITEMS] | None = None
    tools: Annotated[list[dict[str, Any]], ITEMS] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None


class MessagesBody(PromptFields, kw_only=True):
    """The body of a message request, with Anthropic's fields."""

    max_tokens: Annotated[int, Meta(description="Maximum number of tokens of the answer; the context may allow fewer.")]
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None


class CountBody(PromptFields, kw_only=True):
    """The body of a token count, with Anthropic's fields."""


class _Tool(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None  # arguments are always streamed as they are generated


_REFUSED: Refusals = {**TOOL_REFUSED, "input_examples": (([],), "say it in the description")}


class _ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


_MODES = {"auto": "auto", "any": "required", "none": "none"}


def tool_use(tools: list[dict[str, Any]] | None, choice: dict[str, Any] | None) -> ToolUse | None:
    """Return the tools of a body and the choice among them, None without tools. Raises `ApiError` 400."""
    chosen = _ToolChoice("auto") if choice is None else convert(choice, _ToolChoice, "tool_choice")
    hosted = server_tools(tools)
    functions = [
        {"type": hosted[index]} if index in hosted else _function(tool, f"tools[{index}]")
        for index, tool in enumerate(tools or [])
    ]
    with errors_renamed(FIELD_NAMES):
        return check_tools(functions, _mode(chosen), not chosen.disable_parallel_tool_use, skip_hosted=True)


def server_tools(tools: list[dict[str, Any]] | None) -> dict[int, str]:
    """Return the types of tools that Anthropic's server would run, by their places; see `hosted_tools`."""
    return hosted_tools(tools, "custom")


def _function(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type") or "custom"
    if kind != "custom":
        raise bad_request(
            f"{where} is of type {kind!r}; this server has no tools of its own, so give name, description and "
            "input_schema",
            f"{where}.type",
        )
    given = convert(tool, _Tool, where, _REFUSED)
    function = {"name": given.name, "description": given.description, "parameters": given.input_schema}
    return {"type": "function", "function": {**function, "strict": bool(given.strict)}}


def _mode(choice: _ToolChoice) -> str | dict[str, Any]:
    if choice.type != "tool":
        return _MODES[choice.type]
    if choice.name is None:
        raise bad_request("tool_choice.name is missing; give it with type 'tool'", "tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}


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


_MEDIA = {"image": "images", "document": "documents", "search_result": "search results"}
_UNREADABLE = ("redacted_thinking", "container_upload")  # only their provider can decrypt, or has, what is in them
_SERVER_CALLS = ("server_tool_use", "mcp_tool_use")
_SERVER_RESULT = "_tool_result"  # ends the type of a result, but that of a client's tool
_RESULT_TEXTS = ("error_code", "title", "url", "text", "stdout", "stderr", "content", "source", "data")
_RESULT_DEPTH = 6  # of a fetched document


MESSAGE_KEYS = frozenset(_InputMessage.__struct_fields__)


def chat_messages(
    messages: Sequence[Mapping[str, Any]], system: Blocks | None, ignored: Collection[str]
) -> list[dict[str, Any]]:
    """Return `messages`, but for blocks at `ignored` places, and `system` as messages of Chat Completions.

    Raises `ApiError` 400.
    """
    transcript = Transcript()
    if system:
        transcript.say("system", _texts(system, "system"))
    if not messages:
        raise bad_request('messages is empty; give at least {"role": "user", "content": ...}', "messages")
    for index, given in enumerate(messages):
        where = f"messages[{index}]"
        message = convert(given, _InputMessage, where)
        blocks = message.content
        if isinstance(blocks, str):
            blocks = [{"type": "text", "text": blocks}]
        elif not blocks and message.role == "assistant" and index == len(messages) - 1:
            transcript.say("assistant", [])
        elif not blocks:
            raise bad_request(f"{where}.content is empty; give a text or content blocks", f"{where}.content")
        for position, block in enumerate(blocks):
            if (place := f"{where}.content[{position}]") not in ignored:
                _read(block, message.role, place, transcript)
    if not transcript.messages:
        raise bad_request("messages has no block that this server reads; give a text", "messages")
    return transcript.messages


def ignored_blocks(messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the types of blocks that no model can read, by their places.

    Of the tools that Anthropic's server runs, these are calls without a result and results without their call.
    """
    placed = [
        (f"messages[{index}].content[{position}]", block)
        for index, message in enumerate(messages)
        if isinstance(blocks := message.get("content"), list)
        for position, block in enumerate(blocks)
        if isinstance(block, Mapping) and isinstance(block.get("type"), str)
    ]
    calls = {_id_of(block, "id") for _, block in placed if block["type"] in _SERVER_CALLS}
    results = {_id_of(block, "tool_use_id") for _, block in placed if _is_server_result(block)}
    return {
        place: block["type"]
        for place, block in placed
        if block["type"] in _UNREADABLE
        or (block["type"] in _SERVER_CALLS and _id_of(block, "id") not in results)
        or (_is_server_result(block) and _id_of(block, "tool_use_id") not in calls)
    }


def _id_of(block: Mapping[str, Any], key: str) -> str:
    return str(block.get(key))


def _is_server_result(block: Mapping[str, Any]) -> bool:
    return str(block.get("type")).endswith(_SERVER_RESULT)


def _read(block: Mapping[str, Any], role: str, where: str, transcript: Transcript) -> None:
    kind = block.get("type")
    if kind == "text":
        transcript.say(role, [convert(block, _TextBlock, where).text], merge=True)
        return
    if _is_server_result(block):
        text = _result_text(block.get("content"))
        transcript.result(_id_of(block, "tool_use_id"), [f"Error: {text}" if block.get("is_error") else text])
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
    first, *others = _texts(result.content or "", f"{where}.content") or [""]
    # Chat templates have no field for errors.
    transcript.result(result.tool_use_id, [f"Error: {first}" if result.is_error else first, *others])


def _result_text(content: Any, depth: int = _RESULT_DEPTH) -> str:
    """Return what can be read of the result of a tool that Anthropic's server ran: all but files and encrypted text."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = content
    elif isinstance(content, Mapping) and content.get("type") != "base64":
        parts = [content[key] for key in _RESULT_TEXTS if key in content]
    else:
        return ""
    return "\n".join(filter(None, (_result_text(part, depth - 1) for part in parts))) if depth else ""


def _texts(content: Blocks, where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [_text_block(block, f"{where}[{index}]") for index, block in enumerate(content)]


def _text_block(block: Mapping[str, Any], where: str) -> str:
    kind = block.get("type")
    if kind != "text":
        raise bad_request(f"{where} is of type {kind!r}; give {{'type': 'text', 'text': ...}} only", where)
    return convert(block, _TextBlock, where).text


_READERS: dict[str, dict[str, Callable[[Mapping[str, Any], str, Transcript], None]]] = {
    "user": {"tool_result": _tool_result},
    "assistant": {"tool_use": _tool_use, "thinking": _thinking, **dict.fromkeys(_SERVER_CALLS, _tool_use)},
}
