"""The stored references of the checkpoints are what `transformers` makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import load_references
from checkpoints import CHECKPOINTS, Floats, ReferenceCheckpoint
from pooled_checkpoints import STORED
from reference_libraries import import_reference


def check_config(made: dict[str, Any], stored: dict[str, Any]) -> None:
    """A later transformers may have added fields, but has all that are stored."""
    stored = stored | {"transformers_version": made["transformers_version"]}
    assert {name: made.get(name) for name in stored} == stored


def compare(stored: Floats, made: Floats, stored_bfloat16: Floats, made_bfloat16: Floats) -> None:
    np.testing.assert_allclose(made, stored, rtol=0, atol=5e-4)
    errors = [np.sqrt(np.mean((rounded - stored) ** 2)) for rounded in (made_bfloat16, stored_bfloat16)]
    assert 0.5 < errors[0] / errors[1] < 2


@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=lambda checkpoint: checkpoint.name)
def test_made_again_they_are_the_same(checkpoint: ReferenceCheckpoint, tmp_path: Path) -> None:
    """But for the last bits of sums, whose order depends on the host and on torch; and bfloat16 errs as much."""
    stored, made = load_references(checkpoint.name), import_reference("make_references").make(checkpoint, tmp_path)
    check_config(made.config, stored.config)
    assert made.shapes == stored.shapes
    assert made.prompts == stored.prompts
    assert made.greedy == stored.greedy
    assert made.pooled.keys() == stored.pooled.keys()
    compare(stored.logprobs, made.logprobs, stored.logprobs_bfloat16, made.logprobs_bfloat16)
    for kind in {"last", "mean"} & stored.pooled.keys():
        compare(*(of.pooled[kind + ending] for ending in ("", "_bfloat16") for of in (stored, made)))


def test_configs_and_shapes_of_pooled_checkpoints_are_those_of_transformers(tmp_path: Path) -> None:
    stored, made = json.loads(STORED.read_text()), import_reference("make_references").make_pooled(tmp_path)
    for name, entry in made.items():
        assert entry["shapes"] == stored[name]["shapes"]
        check_config(entry["config"], stored[name]["config"])
