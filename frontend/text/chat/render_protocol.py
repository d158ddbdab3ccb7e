"""The messages between a `TemplateRenderer` and its processes, as MessagePack."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.frontend.text.chat.template_files import TemplateSource

RENDER_SECONDS = 2.0  # CPU time of a rendering
RENDER_BYTES = 1 << 30  # memory of a rendering, with its input
MAX_CHARS = 64 << 20  # of a prompt


class RenderRequest(msgspec.Struct, array_like=True):
    """A conversation to render: `options` are the other arguments of `ChatTemplate.render`."""

    template: TemplateSource
    messages: Any
    options: dict[str, Any]


class RenderReply(msgspec.Struct, array_like=True):
    """The prompt, or the error in its place."""

    text: str | None
    error: str | None = None
