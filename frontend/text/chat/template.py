"""Writes a conversation as the prompt that a model was trained on, by the model's own Jinja template."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Template
from jinja2.exceptions import TemplateError, TemplateSyntaxError

from quire.frontend.errors import ChatTemplateError
from quire.frontend.text.chat.messages import Message, check_messages
from quire.frontend.text.chat.template_sandbox import TemplateSandbox
from quire.frontend.text.tokenizer_files import read_json, special_tokens

__all__ = ["ChatTemplate", "ChatTemplateError", "load_chat_template", "template_sources"]


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
        What may be in a message, and what becomes of it, is told by `check_messages`.
        Raises ChatTemplateError if the messages are malformed or the template refuses them.
        """
        if add_generation_prompt and continue_final_message:
            raise ChatTemplateError(
                "continue_final_message=True continues the last message; set add_generation_prompt=False with it"
            )
        conversation = check_messages(messages, self.source)
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
