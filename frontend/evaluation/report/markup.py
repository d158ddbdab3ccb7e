"""Builds HTML and SVG; text becomes markup only through `tag`, which escapes it."""

from __future__ import annotations

import html
from collections.abc import Iterable

_VOID = {"meta", "path", "rect", "line", "circle"}


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str | float | None) -> Markup:
    """An element. Children that are no Markup are escaped. An attribute `class_` is `class`, `a_b` is `a-b`."""
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID and not children:
        return Markup(f"<{name}{words}/>")
    return Markup(f"<{name}{words}>{join(children)}</{name}>")


def join(parts: Iterable[str]) -> Markup:
    """The parts one after the other, those that are no Markup escaped."""
    return Markup("".join(part if isinstance(part, Markup) else html.escape(part) for part in parts))


def _attribute(value: str | float) -> str:
    return html.escape(value) if isinstance(value, str) else f"{value:.6g}"
