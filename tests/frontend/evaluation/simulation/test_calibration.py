"""A calibration that is none is named with what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from calibrations import CALIBRATION, calibration_file

from quire.frontend.evaluation.simulation.calibration import load_calibration


def test_a_calibration_is_read(tmp_path: Path) -> None:
    assert load_calibration(calibration_file(tmp_path)) == CALIBRATION


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"step": {"base": None}}, "missing required field `base`"),
        ({"step": {"decode": -1e-3}}, "Expected `float` >= 0.0 - at `$.step.decode`"),
        ({"step": {"base": "fast"}}, "Expected `float`, got `str` - at `$.step.base`"),
        ({"step": {"bass": 1.0}}, "unknown field `bass`"),
        ({"step": {"base": 0, "decode": 0}}, "a step of this engine takes no time"),
        ({"engine": {"num_pages": 0}}, "Expected `int` >= 1 - at `$.engine.num_pages`"),
        ({"client": {"to_engine": -1}}, "Expected `float` >= 0.0 - at `$.client.to_engine`"),
        (
            {"client": {"rests": [{"seconds": -1, "later": 1}]}},
            "Expected `float` >= 0.0 - at `$.client.rests[0].seconds`",
        ),
        ({"client": {"rests": [{"seconds": 2, "later": 1}] * 2}}, "rests must be given in order, the shortest first"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, changes: dict[str, dict[str, Any]], expected: str) -> None:
    with pytest.raises(ValueError, match=r"calibration\.json") as error:
        load_calibration(calibration_file(tmp_path, **changes))
    assert expected in str(error.value)


def test_what_is_no_json_or_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text("{nonsense")
    with pytest.raises(ValueError, match=r"c\.json is not a calibration: JSON is malformed.*quire calibrate"):
        load_calibration(tmp_path / "c.json")
    with pytest.raises(ValueError, match=r"none\.json cannot be read: No such file"):
        load_calibration(tmp_path / "none.json")
