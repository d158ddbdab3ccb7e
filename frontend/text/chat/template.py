"""Chat templates: the model's own Jinja program that renders a conversation as a prompt, in a sandbox.

The sandbox bounds neither time nor memory, so `renderer` runs this module in a process of its own.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire.frontend.errors import ChatTemplateError
from quire.frontend.text.chat.content_format import FormatName, in_format
from quire.frontend.text.chat.continuation import continued
from quire.frontend.text.chat.generic_tools import HEADING, with_description
from quire.frontend.text.chat.harmony import is_harmony
from quire.frontend.text.chat.harmony_messages import check_variables
from quire.frontend.text.chat.messages import Message, check_messages, with_tools


class GenerationExtension(Extension):
    """`{% generation %}`, which marks the assistant's text for training; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The Jinja environment of chat templates, with what Hugging Face offers them.

    A template cannot reach files, modules or attributes that begin with an underscore, nor change its arguments.
    Its time and memory are not limited: jinja2 bounds a range, but not nested loops, nor numbers and texts.
    """

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationExtension, loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialize as plain JSON; jinja2's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    if len(form) > 256:
        raise SecurityError("strftime_now takes a format of at most 256 characters")
    return datetime.now().astimezone().strftime(form)


class ChatTemplate:
    """A compiled chat template. `source` is Jinja; `variables` are the special tokens it may name (`bos_token`, ...).

    Raises ChatTemplateError if the source is not a valid template; it names the `file` that holds it.
    """

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None, file: str | None = None) -> None:
        self.source = source
        self._variables = dict(variables or {})
        try:
            self._template = _compile(source)
        except ChatTemplateError as error:
            if file is None:
                raise
            advice = f"repair it in {file}, or give another one with --chat-template"
            raise ChatTemplateError(f"{error}; {advice}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        describe_tools: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        content_format: FormatName = "auto",
        **variables: Any,
    ) -> str:
        """Return the prompt; it contains special tokens as text, so encode it with `add_special_tokens=False`.

        `add_generation_prompt` ends it where the assistant's answer begins; `continue_final_message` ends it within
        the last message, to be continued. `describe_tools`: the template shows no calls, so write tools and calls in
        the generic format (`generic_tools`) and don't pass `tools` to it. `content_format`: "string" or "openai" (lists
        of parts) for contents, in place of the form that the template takes. `variables` are passed to the template
        (such as `enable_thinking`). `check_messages` documents the form of messages.
        Raises ChatTemplateError if the messages are malformed or the template rejects them.
        """
        if add_generation_prompt and continue_final_message:
            raise ChatTemplateError(
                "continue_final_message=True continues the last message; set add_generation_prompt=False with it"
            )
        if is_harmony(self.source):
            check_variables(variables)
        conversation = check_messages(messages, self.source, describe_tools)
        described = tools if describe_tools else None
        tools = None if describe_tools else tools
        if tools:
            conversation = with_tools(conversation, tools, self.source)
        values = {
            **self._variables,
            **({"xml_tools": tools} if "xml_tools" in self.source else {}),  # SmolLM 3's name for tools in JSON
            **variables,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        write = functools.partial(self._written, tools=described, values=values, content_format=content_format)
        return continued(conversation, write) if continue_final_message else write(conversation)

    def _written(
        self,
        conversation: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        values: dict[str, Any],
        content_format: FormatName,
        **variables: Any,
    ) -> str:
        """Return the prompt, with `tools` described in it; `variables` replace those of `values`."""
        values = {**values, **variables}
        if tools:
            return self._described(conversation, tools, values, content_format)
        return self._run(in_format(conversation, self.source, content_format), values)

    def _described(
        self,
        conversation: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        values: dict[str, Any],
        content_format: FormatName,
    ) -> str:
        """Return the prompt with the tools described at the first place that the template writes."""
        refusal: ChatTemplateError | None = None
        for messages in with_description(conversation, tools):
            try:
                text = self._run(in_format(messages, self.source, content_format), values)
            except ChatTemplateError as error:
                refusal = error
                continue
            if HEADING in text:
                return text
        raise refusal or ChatTemplateError(
            "the model's chat template writes neither the system's message nor the user's first one, so that the model "
            "can't be told its tools; leave tools out, or use another template"
        )

    def _run(self, messages: Sequence[Mapping[str, Any]], values: dict[str, Any]) -> str:
        """Render the messages; where calls have no content, a template that fails gets an empty one."""
        try:
            return self._rendered(messages, values)
        except ChatTemplateError:
            filled = [{**each, "content": ""} if each.get("content", "") is None else each for each in messages]
            if filled == messages:
                raise
        return self._rendered(filled, values)

    def _rendered(self, messages: Sequence[Mapping[str, Any]], values: dict[str, Any]) -> str:
        try:
            return self._template.render({**values, "messages": messages})
        except TemplateError as error:
            raise ChatTemplateError(f"the model's chat template rejects the messages: {error.message}") from error
        except MemoryError:
            raise ChatTemplateError("the model's chat template runs out of memory with these messages") from None
        except Exception as error:  # a template is a program, and may fail in any way
            what = f"{type(error).__name__}: {error}"
            raise ChatTemplateError(f"the model's chat template fails with these messages: {what}") from error


@functools.lru_cache(maxsize=8)
def _compile(source: str) -> Template:
    try:
        return TemplateSandbox().from_string(source)
    except TemplateSyntaxError as error:
        raise ChatTemplateError(f"the chat template has an error in line {error.lineno}: {error.message}") from error
    except Exception as error:  # compiling folds constants, so it may fail like rendering
        raise ChatTemplateError(f"the chat template cannot be compiled: {type(error).__name__}: {error}") from error
