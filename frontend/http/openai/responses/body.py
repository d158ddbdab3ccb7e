"""The body of `POST /v1/responses`, its tools, and its `input` items as messages of Chat Completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from quire.frontend.errors import kind_of
from quire.frontend.http.conversation import Transcript
from quire.frontend.http.errors import bad_request, errors_renamed
from quire.frontend.http.openai.fields import REFUSED, GenerationFields, check_top_logprobs
from quire.frontend.http.shared_fields import EFFORT, NOT_HERE, TOOL_REFUSED, VERBOSITY, ignored_verbosity
from quire.frontend.http.transport.bodies import ITEMS, Refusals, convert, without_refused
from quire.frontend.text.chat.message_keys import ignored_keys
from quire.frontend.text.chat.tools import ToolUse, check_tools, hosted_tools
from quire.protocol.messages import StructuredOutputs

STORES_NOTHING = (
    "this server stores nothing; send the whole conversation as input, or start the server with --response-store PATH"
)

RESPONSES_REFUSED: Refusals = {
    **{name: why for name, why in REFUSED.items() if name != "store"},
    "access_programs": (({},), NOT_HERE),
    "background": ((False,), "answers are generated while the client waits; use stream=true"),
    "background_options": (({},), NOT_HERE),
    "context_management": (([],), NOT_HERE),
    "conversation": ((), "this server keeps no conversations; use previous_response_id, or send all of it as input"),
    "echo": ((False,), "the answer is only the assistant's text"),
    "image": (({},), "only text is supported"),
    "max_tool_calls": ((), "it counts calls of built-in tools, and there are none"),
    "max_tokens": ((), "use max_output_tokens"),
    "messages": ((), "use input"),
    "prompt": ((), "no prompts are stored; use input and instructions"),
    "reasoning_effort": ((), 'use reasoning={"effort": ...}'),
    "response_format": ((), 'use text={"format": ...}'),
    "truncation": (("disabled",), "send what fits into the context"),
}

FIELD_NAMES = {  # name in errors -> name in this API
    ".function": "",
    '"function": {"name": ...}': '"name": ...',
    "max_tokens": "max_output_tokens",
}

LOGPROBS = "message.output_text.logprobs"
# Thoughts are returned as plain text, so that clients can send them back without encrypted_content.
_INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")
_NEVER_INCLUDED = (  # parts of what only OpenAI's server runs or reads
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)

# Fields of Chat Completions without a meaning here, and the values of them that change nothing.
_FOREIGN = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_route": (False,),
    "add_special_tokens": (False,),
}


_INPUT = Meta(description="A text, or items: messages, function calls, their outputs, thoughts.")


class OutputTextFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The form of the answer's text; all fields but `type` belong to json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None

    @property
    def structured_outputs(self) -> StructuredOutputs | None:
        """The constraint on the answer, None without one. Raises `ApiError` 400."""
        if self.type == "json_schema" and self.schema is None:
            raise bad_request("text.format.schema is missing; give it with type 'json_schema'", "text.format.schema")
        match self.type:
            case "json_schema":
                return StructuredOutputs(json=self.schema)
            case "json_object":
                return StructuredOutputs(json_object=True)
            case _:
                return None


class TextField(msgspec.Struct, forbid_unknown_fields=True):
    """Options of the answer's text."""

    format: OutputTextFormat | None = None
    verbosity: Annotated[str, VERBOSITY] | None = None


class ReasoningField(msgspec.Struct, forbid_unknown_fields=True):
    """`effort` goes to the chat template. The summary fields are ignored: thoughts are always returned in full."""

    effort: Annotated[str, EFFORT] | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesBody(GenerationFields, kw_only=True):
    """The body of a response request, with OpenAI's and vLLM's fields."""

    refused: ClassVar[Refusals] = RESPONSES_REFUSED

    input: Annotated[str | Annotated[list[dict[str, Any]], ITEMS], _INPUT]
    instructions: str | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    tools: Annotated[list[dict[str, Any]], ITEMS] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextField | None = None
    reasoning: ReasoningField | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self, has_store: bool) -> None:
        """Raise `ApiError` 400 for values that have no meaning here; `has_store`: the server stores responses."""
        for name in ("store", "previous_response_id"):
            if not has_store and getattr(self, name) not in (None, False):
                raise bad_request(f"{name} is not supported: {STORES_NOTHING}", name, "unsupported_parameter")
        for name, harmless in _FOREIGN.items():
            value = getattr(self, name)
            if value is not None and value not in harmless:
                raise bad_request(f"{name}={value} is not supported in /v1/responses; leave it out", name)
        for name in self.include or []:
            if name not in _INCLUDABLE + _NEVER_INCLUDED:
                known = ", ".join(_INCLUDABLE + _NEVER_INCLUDED)
                raise bad_request(f"include holds {name!r}, which is not supported; known are {known}", "include")

    def ignored(self) -> list[str]:
        """Return the parts that are ignored, but for tools. Raises `ApiError` 400 for an unknown verbosity."""
        items = () if isinstance(self.input, str) else self.input
        messages = (item for item in items if item.get("type", "message") == "message")
        return [
            *(f"input[].{key}" for key in ignored_keys(messages, _ITEM_KEYS)),
            *(f"input[{index}] ({item['type']})" for index, item in enumerate(items) if item.get("type") in _HOSTED),
            *(f"include ({name})" for name in self.include or () if name in _NEVER_INCLUDED),
            *ignored_verbosity(None if self.text is None else self.text.verbosity, "text.verbosity"),
        ]

    @property
    def format(self) -> StructuredOutputs | None:
        """The constraint on the answer, None without one."""
        form = None if self.text is None or self.text.format is None else self.text.format.structured_outputs
        if form is not None and self.structured_outputs is not None:
            raise bad_request(
                "text.format and structured_outputs both constrain the answer; give only one of them", "text"
            )
        return form

    @property
    def field_names(self) -> dict[str, str]:
        """Names of fields in errors, with their names in this body."""
        return FIELD_NAMES if self.format is None else {**FIELD_NAMES, "structured_outputs.json": "text.format.schema"}

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens with log probabilities at each position, None for no log probabilities."""
        check_top_logprobs(self.top_logprobs)
        if LOGPROBS in (self.include or []):
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise bad_request(
                f'top_logprobs has an effect only with include=["{LOGPROBS}"]; set it, or leave top_logprobs out',
                "top_logprobs",
            )
        return None


FUNCTION_KEYS = ("name", "description", "parameters", "strict")
_REFUSED: Refusals = {**TOOL_REFUSED, "async": ((False,), NOT_HERE), "output_schema": ((), "say it in the description")}


def tool_use(
    tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None, parallel: bool | None
) -> ToolUse | None:
    """Return the tools of a body and the choice among them, None without tools. Raises `ApiError` 400."""
    hosted = hosted_tools(tools)
    nested = [
        {"type": hosted[index]} if index in hosted else _nested(tool, f"tools[{index}]")
        for index, tool in enumerate(tools or [])
    ]
    with errors_renamed(FIELD_NAMES):
        return check_tools(nested, _nested_choice(choice), parallel, skip_hosted=True)


def _nested(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise bad_request(
            f"{where} is of type {tool.get('type')!r}; this server has no tools of its own, so give type 'function'",
            f"{where}.type",
        )
    tool = without_refused(tool, FUNCTION_KEYS, _REFUSED, where)
    if unknown := sorted(set(tool) - {"type", *FUNCTION_KEYS}):
        raise bad_request(
            f"{where} has {unknown[0]!r}, which is not supported; known are type, {', '.join(FUNCTION_KEYS)}", where
        )
    return {"type": "function", "function": {key: tool[key] for key in FUNCTION_KEYS if key in tool}}


def _nested_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, Mapping):
        return choice
    match choice.get("type"):
        case "function":
            return {"type": "function", "function": {"name": choice.get("name")}}
        case "allowed_tools":
            given = choice.get("tools")
            named = [_nested_choice(tool) for tool in given] if isinstance(given, list) else given
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
        case _:
            return choice


class _MessageItem(msgspec.Struct):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]


class _FunctionCallItem(msgspec.Struct):
    call_id: str
    name: str
    arguments: str


class _CustomCallItem(msgspec.Struct):
    call_id: str
    name: str
    input: str


class _ShellCallItem(msgspec.Struct):
    call_id: str
    action: dict[str, Any]


class _McpCallItem(msgspec.Struct):
    id: str
    name: str
    arguments: str
    output: str | None = None
    error: str | None = None


class _FunctionCallOutputItem(msgspec.Struct):
    call_id: str
    output: str | list[dict[str, Any]]


class _ReasoningItem(msgspec.Struct):
    summary: list[dict[str, Any]] | None = None
    content: list[dict[str, Any]] | None = None


_ITEM_KEYS = frozenset({"type", "id", "status", "phase", *_MessageItem.__struct_fields__})
_HOSTED = (  # calls that their provider ran, without a result that a model could read, and what belongs to them
    *("web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call"),
    *("mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
)
_REFERENCE = "references are not resolved; give the item itself, or previous_response_id"
_TEXTS = {  # type of a part -> the key of its text
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "reasoning_text": "text",
    "summary_text": "text",
}
_MEDIA = {"input_image": "images", "input_file": "files", "input_audio": "audio"}


def messages_of(
    given: str | Sequence[dict[str, Any]], instructions: str | None, before: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Return `instructions`, the conversation `before`, and `input` as messages of Chat Completions.

    Raises `ApiError` 400.
    """
    transcript = Transcript()
    if instructions is not None:
        transcript.say("system", [instructions])
    for item in before:
        _read(item, "previous_response_id", transcript)
    if isinstance(given, str):
        transcript.say("user", [given])
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
    transcript.say(message.role, _texts(message.content, f"{where}.content"))


def _function_call(item: dict[str, Any], where: str, transcript: Transcript) -> None:
    call = convert(item, _FunctionCallItem, where)
    try:
        arguments = msgspec.json.decode(call.arguments.strip() or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise bad_request(f"{where}.arguments is not a JSON object: {error}; give the text of one", where) from None
    transcript.call(call.call_id, call.name, arguments)


def _custom_call(item: dict[str, Any], where: str, transcript: Transcript) -> None:
    call = convert(item, _CustomCallItem, where)
    transcript.call(call.call_id, call.name, {"input": call.input})


def _shell_call(item: dict[str, Any], where: str, transcript: Transcript) -> None:
    call = convert(item, _ShellCallItem, where)
    transcript.call(call.call_id, "local_shell", call.action)


def _mcp_call(item: dict[str, Any], where: str, transcript: Transcript) -> None:
    call = convert(item, _McpCallItem, where)
    _function_call({"call_id": call.id, "name": call.name, "arguments": call.arguments}, where, transcript)
    transcript.result(call.id, [call.output or call.error or ""])


def _hosted_call(_item: dict[str, Any], _where: str, _transcript: Transcript) -> None:
    """Skip what only its provider can read."""


def _function_call_output(item: dict[str, Any], where: str, transcript: Transcript) -> None:
    result = convert(item, _FunctionCallOutputItem, where)
    if not transcript.knows_call(result.call_id):
        raise bad_request(
            f"{where} has call_id={result.call_id!r}, but no call before it has this call_id; give the call as well",
            f"{where}.call_id",
        )
    transcript.result(result.call_id, _texts(result.output, f"{where}.output"))


def _reasoning(item: dict[str, Any], where: str, transcript: Transcript) -> None:
    thoughts = convert(item, _ReasoningItem, where)
    content, summary = thoughts.content or [], thoughts.summary or []
    text = "\n".join(_texts(content, f"{where}.content")) or "\n".join(_texts(summary, f"{where}.summary"))
    if text:
        transcript.think(text)


def _texts(content: str | list[dict[str, Any]], where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [_part(part, f"{where}[{index}]") for index, part in enumerate(content)]


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
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _function_call_output,
    "local_shell_call": _shell_call,
    "local_shell_call_output": _function_call_output,
    "mcp_call": _mcp_call,
    **dict.fromkeys(_HOSTED, _hosted_call),
    "reasoning": _reasoning,
}
