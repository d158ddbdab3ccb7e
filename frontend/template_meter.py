"""Counts the work of a template, so that none can run or grow without bound."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Mapping, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

# Units: one for a character that is made or looked at, ITEM for an element, PASS for a pass of a loop or a call; about
# in proportion to their time, so that BASE_UNITS are a few seconds.
BASE_UNITS = 20_000_000
UNITS_PER_INPUT = 100
MAX_INPUT = 100_000_000
ITEM = 16
PASS = 64
MAX_INTEGER_BITS = 4096
WIDE_FORMAT = re.compile(r"\d{5,}|\*|\{[^{}]*\{")


class Meter:
    """The units that one rendering may still spend; `spend` raises SecurityError when there are none left."""

    def __init__(self, units: int, input_size: int = 0) -> None:
        self.left = units
        self.input_size = input_size

    def spend(self, units: int) -> None:
        """Take `units` away."""
        self.left -= units
        if self.left < 0:
            raise SecurityError("it does more work than any chat template needs; use another template")

    def weigh(self, value: object) -> int:
        """Spend for the characters and elements in `value`, at every depth; return the units."""
        if isinstance(value, str):
            self.spend(len(value))
            return len(value)
        before = self.left
        stack = [value]
        while stack:
            item = stack.pop()
            self.spend(ITEM)
            if isinstance(item, (str, bytes)):
                self.spend(len(item))
            elif isinstance(item, (list, tuple, set, frozenset)):
                stack.extend(item)
            elif isinstance(item, Namespace):
                stack.append(_attributes(item))
            elif isinstance(item, Mapping):
                stack.extend(item.keys())
                stack.extend(item.values())
        return before - self.left

    def ticked(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yield `items`, spending for each."""
        for item in items:
            self.spend(PASS)
            yield item

    def received(self, value: Any) -> Any:
        """Spend for a value that an operation made, and return it; an iterator is charged as it goes."""
        if isinstance(value, Generator):
            return self.ticked(value)
        self.weigh(value)
        return value

    def amplify(self, args: list[Any]) -> list[Any]:
        """Spend for an operation whose result may be as large as the product of its arguments; return them."""
        args = [list(arg) if isinstance(arg, Iterator) else arg for arg in args]
        product = 1
        for arg in args:
            product *= 1 + (abs(arg) if isinstance(arg, int) and arg is not args[0] else self.weigh(arg))
        self.spend(product)
        return args

    def multiply(self, left: Any, right: Any) -> None:
        """Spend for `left * right`."""
        if isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > MAX_INTEGER_BITS:
                raise SecurityError(f"it computes an integer of more than {MAX_INTEGER_BITS} bits")
            return
        for value, times in ((left, right), (right, left)):
            if isinstance(value, Sized) and isinstance(times, int):
                self.spend(self.weigh(value) * max(times, 1))

    def power(self, base: Any, exponent: Any) -> None:
        """Refuse `base ** exponent` with more than MAX_INTEGER_BITS bits."""
        if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > MAX_INTEGER_BITS:
            raise SecurityError(f"it computes an integer of more than {MAX_INTEGER_BITS} bits")

    def check_format(self, text: str) -> None:
        """Refuse a format string with a width of five digits, or one that comes from an argument."""
        if WIDE_FORMAT.search(text):
            raise SecurityError(f"it formats with a width that is too large or not constant: {text[:80]!r}")


def _attributes(namespace: Namespace) -> object:
    return getattr(namespace, "_Namespace__attrs", None)


_current: ContextVar[Meter] = ContextVar("quire_template_meter")


def meter() -> Meter:
    """Return the meter of the rendering in progress."""
    return _current.get()


@contextmanager
def metered(input_value: object) -> Iterator[Meter]:
    """Run the block under a meter whose units grow with the size of `input_value`, which MAX_INPUT bounds."""
    input_size = Meter(MAX_INPUT).weigh(input_value)
    inner = Meter(BASE_UNITS + UNITS_PER_INPUT * input_size, input_size)
    token = _current.set(inner)
    try:
        yield inner
    finally:
        _current.reset(token)
