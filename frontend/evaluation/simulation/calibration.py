"""How fast an engine is, read from the file that calibration has written."""

from __future__ import annotations

from pathlib import Path

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
    if calibration.step.base + calibration.step.decode <= 0:
        raise ValueError(f"{path}: a step of this engine takes no time; step.base or step.decode must be above 0")
    return calibration
