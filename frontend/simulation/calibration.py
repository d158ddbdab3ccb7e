"""How fast an engine is, read from the file that calibration has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from quire.protocol.simulation import Calibration

_WHENCE = "give a file that `quire calibrate` has written"


def load_calibration(path: Path) -> Calibration:
    """The calibration. Raises ValueError, which names the file and what is wrong with it."""
    try:
        calibration = msgspec.json.decode(path.read_bytes(), type=Calibration)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; {_WHENCE}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a calibration: {error}; {_WHENCE}") from error
    for part, least in ((calibration.step, 0), (calibration.client, 0), (calibration.engine, 1)):
        _check(path, part, least)
    if calibration.step.base + calibration.step.decode <= 0:
        raise ValueError(f"{path}: a step of this engine takes no time; step.base or step.decode must be above 0")
    return calibration


def _check(path: Path, part: msgspec.Struct, least: int) -> None:
    values: dict[str, Any] = msgspec.structs.asdict(part)
    for name, value in values.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and value < least:
            raise ValueError(f"{path}: {name} is {value}, and must be at least {least}; {_WHENCE}")
