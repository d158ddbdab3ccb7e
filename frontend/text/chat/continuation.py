"""Prompts that end within their last message, so that the answer continues it."""

from __future__ import annotations

from typing import Any, Protocol

from quire.frontend.errors import ChatTemplateError
from quire.frontend.text.chat.content_format import PartedText

_MARK = "5207391846"  # digits, which no template changes


class Write(Protocol):
    """Writes a conversation by a chat template; `variables` replace those of the request."""

    def __call__(self, conversation: list[dict[str, Any]], **variables: Any) -> str:
        """Return the text. Raises ChatTemplateError."""


def continued(conversation: list[dict[str, Any]], write: Write) -> str:
    """Return the prompt of checked messages that ends within the last one, with the white space that `write` kept.

    An empty answer is continued like one that has not begun. Raises ChatTemplateError for a last message that has
    thoughts or calls but no text, or that is not written unchanged.
    """
    last = conversation[-1]
    content = last["content"] or ""
    if isinstance(content, PartedText) and content.parts and content.parts[-1].strip():
        return _cut_after(write(conversation), content.parts[-1])
    if content.strip():
        return _cut_after(write(conversation), content)
    if not content and (last.get("tool_calls") or last.get("reasoning_content")):
        raise ChatTemplateError(
            "continue_final_message=True, but the last message has thoughts or tool calls and no text that could be "
            "continued; give some text, or leave the message out"
        )
    if not content and last["role"] == "assistant" and len(conversation) > 1:
        return write(conversation[:-1], add_generation_prompt=True)
    text = write([*conversation[:-1], {**last, "content": content + _MARK}])
    return text[: _found(text, _MARK)]


def _cut_after(text: str, content: str) -> str:
    at = _found(text, content.strip())
    kept = content.lstrip()
    return text[: at + len(kept if text.startswith(kept, at) else content.strip())]


def _found(text: str, content: str) -> int:
    at = text.rfind(content)
    if at < 0:
        raise ChatTemplateError(
            "continue_final_message=True, but the chat template does not write the last message unchanged, so that "
            "its end can't be found; leave continue_final_message out"
        )
    return at
