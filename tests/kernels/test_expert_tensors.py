"""Experts are found under one name each, whatever the checkpoint calls or stacks them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from quire.kernels.errors import ModelError
from quire.kernels.weights.checkpoint import Checkpoint

EXPERTS, HIDDEN, INNER = 3, 160, 96
LAYER = "model.layers.1"
Arrays = dict[str, npt.NDArray[np.float32]]


def by_expert() -> Arrays:
    """Return the tensors of a layer's router and experts by the names of the graph."""
    rng = np.random.default_rng(0)
    shapes = {"mlp.gate.weight": (EXPERTS, HIDDEN), "mlp.gate.bias": (EXPERTS,)}
    for expert in range(EXPERTS):
        for part, size in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
            shapes[f"mlp.experts.{expert}.{part}_proj.weight"] = size
            shapes[f"mlp.experts.{expert}.{part}_proj.bias"] = size[:1]
    return {f"{LAYER}.{name}": rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


CORRECTION = "e_score_correction_bias"
CORRECTIONS = {
    "deepseek": f"mlp.gate.{CORRECTION}", "minimax": f"block_sparse_moe.{CORRECTION}",
    "transformers": f"mlp.{CORRECTION}", "ernie": f"mlp.moe_statics.{CORRECTION}",
}  # fmt: skip
"""Names of what is added to the scores of experts."""


@pytest.mark.parametrize("family", CORRECTIONS)
def test_corrections_of_scores_are_found_under_the_names_of_each_family(family: str, tmp_path: Path) -> None:
    stored = np.random.default_rng(1).standard_normal(EXPERTS, np.float32)
    given = stored[None] if family == "ernie" else stored
    save_file({f"{LAYER}.{CORRECTIONS[family]}": given}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    found = Checkpoint(str(tmp_path)).get(f"{LAYER}.mlp.gate.{CORRECTION}", (EXPERTS,)).to_f32()
    assert np.array_equal(found, stored)


def mixtral(tensors: Arrays) -> Arrays:
    names = {"mlp.": "block_sparse_moe.", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)
        renamed[name] = tensor
    return renamed


def _stack(tensors: Arrays, part: str, end: str) -> npt.NDArray[np.float32]:
    return np.stack([tensors[f"{LAYER}.mlp.experts.{expert}.{part}_proj.{end}"] for expert in range(EXPERTS)])


def stacked(tensors: Arrays) -> Arrays:
    """Stack the weights as transformers does: gates, then ups."""
    gate_up = np.concatenate([_stack(tensors, part, "weight") for part in ("gate", "up")], axis=1)
    at = f"{LAYER}.mlp"
    return {
        f"{at}.gate.weight": tensors[f"{at}.gate.weight"],
        f"{at}.experts.gate_up_proj": gate_up,
        f"{at}.experts.down_proj": _stack(tensors, "down", "weight"),
    }


def gpt_oss(tensors: Arrays) -> Arrays:
    """Stack weights and biases as gpt-oss does: transposed, gates and ups in turns."""
    at = f"{LAYER}.mlp"
    found = {f"{at}.router.{end}": tensors[f"{at}.gate.{end}"] for end in ("weight", "bias")}
    for end, name in (("weight", ""), ("bias", "_bias")):
        both = np.stack([_stack(tensors, part, end) for part in ("gate", "up")], axis=2)
        both, down = both.reshape(EXPERTS, 2 * INNER, *both.shape[3:]), _stack(tensors, "down", end)
        found[f"{at}.experts.gate_up_proj{name}"] = both.swapaxes(1, -1)
        found[f"{at}.experts.down_proj{name}"] = down.swapaxes(1, -1)
    return found


def checkpoint(folder: Path, tensors: Arrays, dtype: Any = np.float32) -> Checkpoint:
    (folder / "config.json").write_text(json.dumps({}))
    save_file({name: np.ascontiguousarray(t, dtype) for name, t in tensors.items()}, folder / "model.safetensors")
    return Checkpoint(str(folder))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("form", [dict, mixtral, gpt_oss, stacked])
def test_every_form_has_the_same_tensors(form: Any, dtype: Any, tmp_path: Path) -> None:
    tensors = by_expert()
    found = checkpoint(tmp_path, form(tensors), dtype)
    for name, tensor in tensors.items():
        if form is stacked and name.endswith("bias"):
            continue
        assert found.has(name)
        np.testing.assert_array_equal(found.get(name, tensor.shape).to_f32(), tensor.astype(dtype).astype(np.float32))


@pytest.mark.parametrize("form", [stacked, gpt_oss])
def test_an_expert_that_a_stacked_tensor_lacks_is_named(form: Any, tmp_path: Path) -> None:
    found = checkpoint(tmp_path, form(by_expert()))
    name = f"{LAYER}.mlp.experts.{EXPERTS}.up_proj.weight"
    with pytest.raises(ModelError, match=f"tensor {name} of shape"):
        found.get(name, (INNER, HIDDEN))


@pytest.mark.parametrize("form", [stacked, gpt_oss])
def test_a_stacked_tensor_of_another_shape_is_rejected(form: Any, tmp_path: Path) -> None:
    found = checkpoint(tmp_path, form(by_expert()))
    with pytest.raises(ModelError, match=rf"has shape \[{INNER}, {HIDDEN}\], but config.json asks for"):
        found.get(f"{LAYER}.mlp.experts.0.up_proj.weight", (INNER + 16, HIDDEN))
