"""Output of the command line: generated text on stdout, messages on stderr."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.frontend.cli.markdown import MarkdownStream
    from quire.frontend.outputs import RequestOutput

# On a terminal, generated text must not move the cursor, or change colors or the title.
CONTROLS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def is_interactive() -> bool:
    """Return True if stdin and stdout are a terminal."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def say(message: str) -> None:
    """Write a message to stderr."""
    sys.stderr.write(message + "\n")
    sys.stderr.flush()


@dataclass
class PrintedAnswer:
    """An answer that is written while it streams; its fields hold the part so far, also if it is interrupted."""

    text: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None
    began: float = field(default_factory=time.perf_counter)
    first: float | None = None
    markdown: MarkdownStream | None = None  # renderer of the text; None: it is written as it is

    async def stream(self, outputs: AsyncIterator[RequestOutput]) -> None:
        """Write deltas to stdout as they arrive, and accumulate them."""
        async for output in outputs:
            completion = output.outputs[0]
            if completion.token_ids and self.first is None:
                self.first = time.perf_counter()
            self.text += completion.text
            self.num_tokens += len(completion.token_ids)
            self.finish_reason = completion.finish_reason
            if self.markdown is None:
                write(completion.text)
            elif completion.text:
                self.markdown.feed(completion.text.translate(CONTROLS))

    def end_line(self) -> None:
        """Write what has not been rendered yet, and the line break that the last line of the text lacks."""
        if self.markdown is not None:
            self.markdown.end()
        elif self.text[-1:] not in ("", "\n"):
            write("\n")

    def end(self) -> None:
        """End the line of a complete answer, and tell the user if it is empty, which looks like a failure."""
        self.end_line()
        if not self.text.strip():
            say(f"quire: the model's answer is empty (finish reason: {self.finish_reason})")

    @property
    def summary(self) -> str:
        """Number of tokens, seconds to the first, and tokens per second after it."""
        if self.first is None:
            return "no tokens"
        parts = [f"{self.num_tokens} tokens", f"the first after {self.first - self.began:.2f} s"]
        if self.num_tokens > 1:
            rate = (self.num_tokens - 1) / max(time.perf_counter() - self.first, 1e-9)
            parts.append(f"then {rate:.0f} a second")
        if self.finish_reason == "length":
            parts.append("cut off by the length limit")
        return ", ".join(parts)


def write(text: str) -> None:
    """Write generated text to stdout and flush."""
    if not text:
        return
    if sys.stdout.isatty():
        text = text.translate(CONTROLS)
    write_raw(text)


def write_raw(text: str) -> None:
    """Write text that may control the terminal to stdout and flush."""
    sys.stdout.write(text)
    sys.stdout.flush()


def tolerate_encoding() -> None:
    """Write `?` for characters that the locale cannot encode, instead of failing."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
