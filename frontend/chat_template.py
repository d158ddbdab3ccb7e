"""Writes a conversation as the prompt that a model was trained on, by the model's own Jinja template."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Template
from jinja2.exceptions import TemplateError, TemplateSyntaxError

from quire.frontend.template_sandbox import TemplateSandbox
from quire.frontend.tokenizer_files import read_json, special_tokens

MESSAGE_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"}

Message = Mapping[str, Any]


class ChatTemplateError(ValueError):
    """A conversation cannot be written as a prompt: no template, a broken one, or messages that it refuses."""


class ChatTemplate:
    """A compiled chat template. `source` is Jinja; `variables` are the special tokens it may name (`bos_token`, ...).

    Raises ChatTemplateError if the source is no template.
    """

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None) -> None:
        self.source = source
        self._variables = dict(variables or {})
        self._template = _compile(source)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt: special tokens are in it as text, so encode it with `add_special_tokens=False`.

        `add_generation_prompt` ends it where the assistant's answer begins; `continue_final_message` ends it within
        the last message, to be continued. `variables` are given to the template (such as `enable_thinking`).
        Raises ChatTemplateError if the messages are malformed or the template refuses them.
        """
        if add_generation_prompt and continue_final_message:
            raise ChatTemplateError(
                "continue_final_message=True continues the last message; set add_generation_prompt=False with it"
            )
        conversation = check_messages(messages)
        values = {
            **self._variables,
            **variables,
            "messages": conversation,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run(values)
        return _cut_after_final_message(text, conversation) if continue_final_message else text

    def _run(self, values: dict[str, Any]) -> str:
        try:
            return self._template.render(values)
        except TemplateError as error:
            raise ChatTemplateError(f"the model's chat template refuses the messages: {error.message}") from error
        except Exception as error:  # a template may fail in any way, as a program may
            what = f"{type(error).__name__}: {error}"
            raise ChatTemplateError(f"the model's chat template fails with these messages: {what}") from error


def _compile(source: str) -> Template:
    try:
        return TemplateSandbox().from_string(source)
    except TemplateSyntaxError as error:
        raise ChatTemplateError(f"the chat template has an error in line {error.lineno}: {error.message}") from error
    except Exception as error:  # compiling folds constants, so it may fail as running may
        raise ChatTemplateError(f"the chat template cannot be compiled: {type(error).__name__}: {error}") from error


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages with their contents as strings (text parts are joined by line breaks).

    Raises ChatTemplateError naming the message and what is wrong with it.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ChatTemplateError(
            f'messages is a {type(messages).__name__}; give a list such as [{{"role": "user", "content": "Hello"}}]'
        )
    if not messages:
        raise ChatTemplateError('messages is empty; give at least one, such as {"role": "user", "content": "Hello"}')
    return [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _check_message(message: Message, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ChatTemplateError(f'{where} is a {type(message).__name__}; give {{"role": ..., "content": ...}}')
    unknown = sorted(str(key) for key in set(message) - MESSAGE_KEYS)
    if unknown:
        raise ChatTemplateError(
            f"{where} has the unknown key {unknown[0]!r}; known are {', '.join(sorted(MESSAGE_KEYS))}"
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ChatTemplateError(f"{where} has role={role!r}; give a role such as 'system', 'user' or 'assistant'")
    return {**message, "content": _check_content(message, where)}


def _check_content(message: Message, where: str) -> str | None:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message.get("tool_calls"):
        return None
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        return "\n".join(_check_part(part, f"{where}.content[{index}]") for index, part in enumerate(content))
    given = "is missing" if "content" not in message else f"is a {type(content).__name__}"
    raise ChatTemplateError(f'{where}.content {given}; give a string or a list of {{"type": "text", "text": ...}}')


def _check_part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text" or not isinstance(part, Mapping):
        raise ChatTemplateError(f'{where} is of type {kind!r}; only {{"type": "text", "text": ...}} is understood')
    text = part.get("text")
    if not isinstance(text, str):
        raise ChatTemplateError(f"{where}.text is a {type(text).__name__}; give a string")
    return text


def _cut_after_final_message(text: str, conversation: list[dict[str, Any]]) -> str:
    """End `text` after the content of the last message, with the white space that the template kept."""
    content = conversation[-1]["content"] or ""
    at = text.rfind(content.strip())
    if at < 0 or not content.strip():
        raise ChatTemplateError(
            "continue_final_message=True, but the last message is empty or the template does not write it as it is"
        )
    kept = content.lstrip()
    return text[: at + len(kept if text.startswith(kept, at) else content.strip())]


def template_sources(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Return the chat templates of a model folder by name; the one to use is `default`.

    chat_template.jinja and additional_chat_templates/*.jinja outrank tokenizer_config.json.
    """
    path = Path(folder)
    listed = read_json(path, "tokenizer_config.json").get("chat_template")
    if listed is None:
        listed = read_json(path, "chat_template.json").get("chat_template")
    if isinstance(listed, str):
        sources = {"default": listed}
    else:
        sources = {str(entry["name"]): str(entry["template"]) for entry in listed or []}
    for file in [*sorted(path.glob("additional_chat_templates/*.jinja")), path / "chat_template.jinja"]:
        if file.is_file():
            sources["default" if file.name == "chat_template.jinja" else file.stem] = file.read_text(encoding="utf-8")
    return sources


def load_chat_template(
    folder: str | os.PathLike[str], name: str = "default", source: str | None = None
) -> ChatTemplate:
    """Compile the chat template `name` of a model folder, or `source` in its place.

    Raises ChatTemplateError if the folder has none.
    """
    path = Path(folder)
    if source is None:
        sources = template_sources(path)
        if name not in sources:
            raise ChatTemplateError(_missing(path, name, sorted(sources)))
        source = sources[name]
    return ChatTemplate(source, special_tokens(path, read_json(path, "tokenizer_config.json")))


def _missing(path: Path, name: str, known: list[str]) -> str:
    if known:
        return f"model folder {path} has no chat template named {name!r}; it has {', '.join(known)}"
    return (
        f"model folder {path} has no chat template (neither in tokenizer_config.json nor in chat_template.jinja); "
        "it is a model that continues text: give a prompt instead of messages, or add a template"
    )
