"""JSON of unknown authors, decoded in Python: decoders in C hold the GIL until they end, and so would stop all streams.

A quarter of a megabyte of numbers such as 1e308 takes msgspec more than a second.
"""

from __future__ import annotations

import json
import json.decoder
import json.scanner
import math
from pathlib import Path
from typing import Any

from quire.kernels.errors import ModelError, quoted
from quire.kernels.weights.json_files import read_bounded


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
    """The decoder of `json`, with the parts that are in C by default in Python."""

    def __init__(self) -> None:
        super().__init__(parse_float=_finite, parse_constant=_reject)
        self.parse_string = json.decoder.py_scanstring  # type: ignore[attr-defined]
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"{quoted(number)} is out of range")
    return value


def _reject(name: str) -> None:
    raise ValueError(f"JSON has no number {name}")
