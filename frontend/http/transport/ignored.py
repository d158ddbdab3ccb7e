"""The header of a response that lists what of its request was ignored."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import Scope

IGNORED = "X-Quire-Ignored"
_MOST = 16  # parts that are listed
_MOST_CHARS = 80  # of each
_UNSAFE = re.compile(r"[^\w.\[\]() -]", re.ASCII)  # in a list in a header


def note_ignored(request: Request, parts: Iterable[str], where: str = "") -> None:
    """List parts of a request, such as `tools[1] (web_search)`, as ignored; `where` is written before each of them."""
    noted: list[str] = request.scope.setdefault(IGNORED, [])
    noted += (f"{where}{part}" for part in parts)


def note_hosted(request: Request, hosted: Mapping[int, str], where: str = "tools") -> None:
    """List tools, by their places and types, as ignored; `where` is the list that holds them."""
    note_ignored(request, (f"{where}[{index}] ({kind})" for index, kind in hosted.items()))


def add_ignored(headers: MutableHeaders, scope: Scope) -> None:
    """Add the header to those of a response, if anything was ignored."""
    noted: list[str] | None = scope.get(IGNORED)
    if not noted:
        return
    shown = [_UNSAFE.sub("?", part[:_MOST_CHARS]) for part in noted[:_MOST]]
    more = [f"and {len(noted) - _MOST} more"] if len(noted) > _MOST else []
    headers.append(IGNORED, ", ".join([*shown, *more]))
