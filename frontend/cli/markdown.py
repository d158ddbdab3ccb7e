"""Markdown in a terminal, rendered while it streams.

Blocks that are complete are written once. The last one, which still grows, is rendered again and again, and those of
its lines that changed are written anew: emphasis appears when it closes, a table when its second line has come. Lines
are broken here, never by the terminal, so that the cursor finds them again.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Heading, Markdown
from rich.theme import Theme

LEAST_COLUMNS = 10
"""Columns of a terminal that is too narrow for more than plain text."""

_MOST_OPEN = 1 << 17  # characters of a block that is rendered again
_STYLE = re.compile(r"\x1b\[[\d;]*m")
_IDLE = 10  # times as long as the last rendering took, before the next one
_STYLES = {
    "markdown.code": "cyan",
    "markdown.code_block": "cyan",
    "markdown.h1": "bold underline",
    "markdown.h2": "bold",
    "markdown.h3": "bold",
    "markdown.h4": "italic",
    "markdown.h5": "italic",
    "markdown.h6": "italic",
    "markdown.block_quote": "italic",
    "markdown.item.bullet": "bold",
    "markdown.item.number": "bold",
    "markdown.table.border": "dim",
    "markdown.table.header": "bold",
    "markdown.link": "underline",
    "markdown.link_url": "dim",
}

_parser = MarkdownIt("commonmark", {"html": False, "maxNesting": 100}).enable(["table", "strikethrough"])


def can_render() -> bool:
    """Return True if stdout is a terminal that moves its cursor, and colors are welcome (https://no-color.org)."""
    is_plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") in ("dumb", "")
    return sys.stdout.isatty() and not is_plain and terminal_size()[0] >= LEAST_COLUMNS


def terminal_size() -> tuple[int, int]:
    """Return columns and rows of stdout's terminal, whatever COLUMNS and LINES say: the cursor moves on this one."""
    try:
        columns, rows = os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):
        columns = rows = 0
    return columns or 80, rows or 24


class _LeftHeading(Heading):
    """A heading at the left; rich centers those of the first level."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        del console, options
        yield self.text


class _Blocks(Markdown):
    """Blocks that are parsed already."""

    elements = Markdown.elements | {"heading_open": _LeftHeading}

    def __init__(self, tokens: list[Token]) -> None:
        super().__init__("", code_theme="ansi_dark", hyperlinks=False)
        self.parsed = tokens


class MarkdownStream:
    """Text that is written to a terminal as Markdown; `write` takes what is to be written.

    `size`: columns and rows of the terminal. The text must have no control characters but line breaks and tabs.
    """

    def __init__(
        self,
        write: Callable[[str], object],
        size: Callable[[], tuple[int, int]] = terminal_size,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._write = write
        self._size = size
        self._clock = clock
        self._console = Console(force_terminal=True, highlight=False, theme=Theme(_STYLES), legacy_windows=False)
        self._open = ""  # the source of what is not complete
        self._shown: list[str] = []  # its lines on the terminal, the cursor being at the end of the last
        self._begun = False  # there are blocks above
        self._next = 0.0  # time of the next rendering

    def feed(self, text: str) -> None:
        """Take more of the text, and show it, unless that has just been done."""
        self._open += text
        if self._clock() >= self._next:
            began = self._clock()
            self._render()
            ended = self._clock()
            self._next = ended + _IDLE * (ended - began)

    def end(self) -> None:
        """Show what is left, and move to a new line."""
        self._render()
        self._write("\n")
        self._open, self._shown, self._begun = "", [], False

    def _render(self) -> None:
        lines = self._lines(self._open)
        if lines and self._begun and not self._shown:
            self._write("\n\n")
        self._show(lines)
        if end := self._complete():
            if done := self._lines(self._open[:end]):
                self._shown, self._begun = lines[len(done) + 1 :], True
            self._open = self._open[end:]

    def _complete(self) -> int:
        """Return the length of the blocks that no further line can change: all but the last one."""
        whole = self._open[: self._open.rfind("\n") + 1]
        if len(whole) > _MOST_OPEN:
            return len(whole)
        begins = [token.map[0] for token in _parser.parse(whole) if token.level == 0 and token.map is not None]
        return sum(map(len, whole.split("\n")[: begins[-1]])) + begins[-1] if len(begins) > 1 else 0

    def _lines(self, source: str) -> list[str]:
        """Return the lines of the rendered source, with their styles, none of which is as long as the terminal."""
        width = max(self._size()[0], LEAST_COLUMNS) - 1
        lines: list[str] = []
        for tokens in _blocks(_parser.parse(source)):
            with self._console.capture() as captured:
                self._console.print(_Blocks(tokens), width=width, end="")
            block = _without_margins(captured.get().split("\n"))
            lines += ["", *block] if lines and block else block
        return lines

    def _show(self, lines: list[str]) -> None:
        """Write what differs from the lines that are shown, as far up as the cursor can go."""
        same = 0  # lines at the top; at least one line is written, so that the cursor is at the end of the last
        while same < min(len(lines), len(self._shown)) and lines[same] == self._shown[same]:
            same += 1
        if same == len(self._shown) == len(lines):
            return
        reachable = max(0, len(self._shown) - self._size()[1] + 1)
        first = max(min(same, len(lines) - 1), reachable, 0)
        new = lines[first:]
        if first == len(self._shown) - 1 and new and new[0].startswith(self._shown[first]):  # the last line grew
            self._write("\n".join([new[0].removeprefix(self._shown[first]), *new[1:]]))
        elif first >= len(self._shown):
            self._write(("\n" if self._shown else "") + "\n".join(new))
        else:
            up = len(self._shown) - 1 - first
            rest = "\x1b[J" if len(lines) < len(self._shown) else ""
            self._write((f"\r\x1b[{up}A" if up else "\r") + "\x1b[K\n".join(new) + "\x1b[K" + rest)
        self._shown = lines


def _blocks(tokens: list[Token]) -> Iterator[list[Token]]:
    """Yield the tokens of each block, in which line breaks are what they are in the source, as models mean them."""
    block: list[Token] = []
    for token in tokens:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
        block.append(token)
        if token.level == 0 and token.nesting <= 0:
            yield block
            block = []


def _without_margins(lines: list[str]) -> list[str]:
    """Return the lines without the empty ones at both ends, and without spaces at their ends."""
    full = [number for number, line in enumerate(lines) if _STYLE.sub("", line).strip()]
    return [line.rstrip(" ") for line in lines[full[0] : full[-1] + 1]] if full else []
