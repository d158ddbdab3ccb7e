"""A viewer of the live view that keeps the engine's picture, as the page does."""

from __future__ import annotations

import base64
from typing import Any

Json = dict[str, Any]


def changed(picture: Json, change: Json) -> Json:
    """Return a picture after a change, both as JSON."""
    new = {**picture, "ttft": None, "itl": None, **change}
    new["stats"] = {**picture["stats"], **change.get("stats", {})}
    new["pages"] = _pages(picture["pages"], change.get("pages", {}))
    if "prefixes" in change:
        new["prefixes"] = [_prefix(picture["prefixes"], prefix) for prefix in change["prefixes"]]
    return new


def _pages(pages: Json, change: Json) -> Json:
    cells = bytearray(base64.b64decode(pages["cells"]))
    for index, encoded in change.get("runs", []):
        part = base64.b64decode(encoded)
        cells[index : index + len(part)] = part
    numbers = change.get("num_pages", pages["num_pages"])
    return {**pages, "num_pages": numbers, "cells": base64.b64encode(cells).decode()}


def _prefix(prefixes: list[Json], change: Json) -> Json:
    if "new" in change:
        return dict(change["new"])
    return {**prefixes[change["old"]], "hits": change["hits"], "users": change["users"]}
