"""JSON of unknown authors, decoded in Python: decoders in C hold the GIL until they end, and so would stop all streams.

A quarter of a megabyte of numbers such as 1e308 takes msgspec more than a second. Lists, objects and names must be few:
the garbage collector, and what frees them, hold the GIL as well.
"""

from __future__ import annotations

import json
import json.decoder
import json.scanner
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.kernels.errors import ModelError, quoted
from quire.kernels.weights.json_files import read_bounded

_MOST_CONTAINERS, _MOST_NAMES = 10_000, 50_000


def read_config(path: Path, most_bytes: int) -> dict[str, Any]:
    """Return the JSON object in a small file. Raises ModelError."""
    problem = f"{path} can't be read as a JSON object"
    try:
        found = _PythonDecoder().decode(read_bounded(path, most_bytes, "it is not the config of an adapter").decode())
    except OSError as error:
        raise ModelError(f"{problem}: {error.strerror}") from None
    except ModelError:
        raise
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{problem}: {error}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{problem}: it is of type {type(found).__name__}")
    return found


class _PythonDecoder(json.JSONDecoder):
    """The decoder of `json` with its scanner in Python, but for that of strings: a megabyte takes it a millisecond."""

    def __init__(self) -> None:
        super().__init__(parse_float=_finite, parse_constant=_reject)
        self._num_containers = 0
        self.memo = _ConfigNames()
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


class _ConfigNames(dict[str, str]):
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
        raise ValueError(f"{quoted(number)} is out of range")
    return value


def _reject(name: str) -> None:
    raise ValueError(f"JSON has no number {name}")
