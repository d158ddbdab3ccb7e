"""adapter_config.json of an adapter whose author may mean harm, read beside the streams of a server.

A decoder in C would hold the GIL for seconds. This is how the engine reads it (kernels/adapters/json_config.py), whose
code the frontend may not import, with the same limits; a test compares the two.
"""

from __future__ import annotations

import json
import json.decoder
import json.scanner
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_CONFIG_BYTES = 1 << 21
_MOST_CONTAINERS, _MOST_NAMES = 10_000, 50_000

_decoding = threading.Lock()  # several decoders at a time would leave the event loop less of the GIL


def read_adapter_config(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises `ValueError`, which names the limit for one that is too large."""
    problem = f"{path} cannot be read as a JSON object"
    try:
        with path.open("rb") as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{problem}: {error.strerror}") from None
    if len(content) > MAX_CONFIG_BYTES:
        raise ValueError(f"{path} has more than {MAX_CONFIG_BYTES} bytes; it is not the config of an adapter")
    try:
        with _decoding:
            found = _ServerConfigDecoder().decode(content.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{problem}: {error}; give a folder that PEFT has written") from None
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise ValueError(f"{problem}: it is of type {kind}; give a folder that PEFT has written")  # noqa: TRY004
    return found


class _ServerConfigDecoder(json.JSONDecoder):
    """The decoder of `json` with its scanner in Python, but for that of strings: a megabyte takes it a millisecond."""

    def __init__(self) -> None:
        super().__init__(parse_float=_finite, parse_constant=_reject)
        self._num_containers = 0
        self.memo = _ServerConfigNames()
        self.parse_array = self._counted(json.decoder.JSONArray)  # type: ignore[attr-defined]
        self.parse_object = self._counted(json.decoder.JSONObject)  # type: ignore[attr-defined]
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]

    def _counted(self, parse: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that parses a list or an object unless there are too many."""

        def parse_counted(*arguments: Any) -> Any:
            self._num_containers += 1
            if self._num_containers > _MOST_CONTAINERS:
                raise ValueError(f"it has more than {_MOST_CONTAINERS} lists and objects")
            return parse(*arguments)

        return parse_counted


class _ServerConfigNames(dict[str, str]):
    """The names of values, each once; the decoder looks every one up."""

    num_found = 0

    def setdefault(self, name: str, default: str = "") -> str:
        """See `dict`. Raises ValueError if it is called too often."""
        self.num_found += 1
        if self.num_found > _MOST_NAMES:
            raise ValueError(f"it has more than {_MOST_NAMES} names of values")
        return super().setdefault(name, default)


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"{number[:80]} is out of range")
    return value


def _reject(name: str) -> None:
    raise ValueError(f"JSON has no number {name}")
