"""Builder of HTML and SVG, in which text becomes markup only through `tag`, which escapes it; and scales of figures."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

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


_MOST_LOG_TICKS = 5


def logit(share: float) -> float:
    """Stretch both ends of 0 to 1, so that p90, p99 and p99.9 are about as far apart as p50 and p90."""
    return math.log10(share / (1 - share))


def plain(value: float) -> float:
    """Return the value itself, for a linear scale."""
    return value


@dataclass(frozen=True)
class Scale:
    """Map from values of `low` to `high` to pixels of `begin` to `end`; values outside are drawn at the border."""

    low: float
    high: float
    begin: float
    end: float
    bend: Callable[[float], float] = plain

    def __call__(self, value: float) -> float:
        """Return the pixel of a value."""
        low, high = self.bend(self.low), self.bend(self.high)
        place = (self.bend(min(max(value, self.low), self.high)) - low) / (high - low)
        return round(self.begin + place * (self.end - self.begin), 1)


def linear_ticks(high: float, count: int = 4, *, whole: bool = False) -> list[float]:
    """Return round values from 0 to at least `high` in at most `count` steps; `whole` for counts."""
    if high <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(high / count))
    steps = (1, 2, 5, 10, 20) if whole and power <= 1 else (1, 2, 2.5, 5, 10, 20)
    step = next(step * power for step in steps if step * power * count >= high * (1 - 1e-9))
    return [step * number for number in range(math.ceil(high / step - 1e-9) + 1)]


def time_ticks(seconds: float, count: int = 6) -> list[tuple[float, str]]:
    """Return round times from 0 to at most `seconds`, with labels in seconds, minutes or hours."""
    steps = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400]
    step = next((step for step in steps if step * count >= seconds), 86400.0 * math.ceil(seconds / count / 86400))
    size, unit = next((size, unit) for size, unit in ((3600, "h"), (60, "min"), (0, "s")) if step >= size)
    ticks = [step * number for number in range(int(seconds / step + 1e-9) + 1)]
    return [(tick, f"{tick / (size or 1):g} {unit}" if tick else "0") for tick in ticks]


def log_ticks(low: float, high: float) -> list[float]:
    """Return round values between `low` and `high`: as many for each power of ten as fit, from nine to one."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 1.5, 2, 2.5, 3, 4, 5, 6, 8), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        ticks = [digit * 10.0**power for power in powers for digit in digits]
        within = [tick for tick in ticks if low <= tick <= high]
        if len(within) <= _MOST_LOG_TICKS:
            break
    return within
