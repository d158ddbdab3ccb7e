"""Builder of HTML and SVG; text becomes markup only through `tag`, which escapes it."""

from __future__ import annotations

import html
from collections.abc import Iterable

_VOID = {"meta", "path", "rect", "line", "circle"}


class Markup(str):
    """Text that is markup already, and is not escaped again."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str | float | None) -> Markup:
    """Return an element. Children other than Markup are escaped. An attribute `class_` is `class`, `a_b` is `a-b`."""
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID and not children:
        return Markup(f"<{name}{words}/>")
    return Markup(f"<{name}{words}>{join(children)}</{name}>")


def join(parts: Iterable[str]) -> Markup:
    """Concatenate the parts; those other than Markup are escaped."""
    return Markup("".join(part if isinstance(part, Markup) else html.escape(part) for part in parts))


def line_path(points: Iterable[tuple[float, float] | None], class_: str) -> Markup:
    """Return a line through pixels; None interrupts it."""
    words, pen = [], "M"
    for point in points:
        if point is None:
            pen = "M"
            continue
        words.append(f"{pen}{point[0]:g} {point[1]:g}")
        pen = "L"
    return tag("path", d="".join(words), class_=class_) if words else Markup("")


def label(x: float, y: float, text: str, anchor: str = "start", class_: str = "tick") -> Markup:
    """Return a label in a figure, its baseline at the pixel."""
    return tag("text", text, x=x, y=y, text_anchor=anchor, class_=class_)


def _attribute(value: str | float) -> str:
    return html.escape(value) if isinstance(value, str) else f"{value:.6g}"
