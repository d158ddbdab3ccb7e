"""Calibration for tests, and files of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from simulations import STEP_TIME, shape

from quire.protocol.simulation import Calibration

CALIBRATION = Calibration("demo", "a host", "2026-01-02", shape(), STEP_TIME)


def calibration_file(folder: Path, **changes: dict[str, Any]) -> Path:
    """Write a calibration with changed fields of `engine`, `step`, `client` and `fetch`; None removes a field."""
    parts: dict[str, Any] = json.loads(msgspec.json.encode(CALIBRATION))
    for part, fields in changes.items():
        parts[part] = {name: value for name, value in (parts[part] | fields).items() if value is not None}
    path = folder / "calibration.json"
    path.write_text(json.dumps(parts))
    return path
