"""Changes of stacked experts (target_parameters) are taken apart, or rejected with a line that says what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_files import PREFIX, RANK, Arrays, tensors, write_adapter

from quire.kernels.adapters.adapter import Adapter
from quire.kernels.adapters.peft import read_adapter
from quire.kernels.adapters.peft_experts import _Stacked
from quire.kernels.errors import ModelError

AT, COUNT, HIDDEN, INNER = "model.layers.0.mlp.experts", 3, 8, 6
SHAPES = {
    f"{AT}.{expert}.{part}.weight": (HIDDEN, INNER) if part == "down_proj" else (INNER, HIDDEN)
    for expert in range(COUNT)
    for part in ("gate_proj", "up_proj", "down_proj")
}
BIASES: dict[str, tuple[int, ...]] = {f"{AT}.{expert}.up_proj.bias": (INNER,) for expert in range(COUNT)}
FIELDS: dict[str, Any] = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
DOWN, GATES = f"{PREFIX}{AT}", f"{PREFIX}{AT}.base_layer"


def stacked(rank: int = RANK) -> Arrays:
    """Return random changes of both parameters."""
    random = np.random.default_rng(0)
    shapes = {
        f"{DOWN}.lora_A.weight": (COUNT * rank, INNER), f"{DOWN}.lora_B.weight": (HIDDEN, COUNT * rank),
        f"{GATES}.lora_A.weight": (COUNT * rank, HIDDEN), f"{GATES}.lora_B.weight": (2 * INNER, COUNT * rank),
    }  # fmt: skip
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def exchanged(given: Arrays) -> Arrays:
    """Return the tensors with the outer parameter as the inner one."""
    return {
        name.replace(GATES, DOWN) if GATES in name else name.replace(DOWN, GATES): array
        for name, array in given.items()
    }


def read(folder: Path, others: dict[str, tuple[int, ...]] | None = None) -> Adapter:
    return read_adapter(folder, SHAPES, max_rank=8, others=others)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("swapped", [False, True])
def test_each_expert_has_its_own_change(swapped: bool, is_interleaved: bool, tmp_path: Path) -> None:
    """Whichever parameter is the outer one; with biases, gates and ups are in turns."""
    made = stacked()
    given = exchanged(made) if swapped else made
    adapter = read(write_adapter(tmp_path, given, **FIELDS), BIASES if is_interleaved else None)
    assert adapter.layers.keys() == SHAPES.keys()
    for name, change in adapter.layers.items():
        expert, part = int(name.split(".")[-3]), name.split(".")[-2]
        at = DOWN if part == "down_proj" else GATES
        a = made[f"{at}.lora_A.weight"].reshape(COUNT, RANK, -1)[expert]
        b = made[f"{at}.lora_B.weight"].reshape(-1, RANK, COUNT)[:, :, expert]
        if part != "down_proj":
            number = int(part == "up_proj")
            b = b[number::2] if is_interleaved else b[number * INNER : (number + 1) * INNER]
        assert np.array_equal(change.a, a)
        assert np.array_equal(change.b, b)
        assert change.scale == 3 / RANK


def changed(name: str, array: np.ndarray | None) -> Arrays:
    return {key: value for key, value in (stacked() | {name: array}).items() if value is not None}


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


BAD: list[tuple[Arrays, dict[str, Any], str]] = [
    (changed(f"{DOWN}.lora_A.weight", None), {}, f"lacks the part A of {AT}; save the adapter again"),
    (changed(f"{GATES}.lora_B.weight", None), {}, f"lacks the part B of {AT}; save"),
    (changed(f"{DOWN}.lora_A.weight", ones(5, INNER)), {}, "has shape [5, 6], but rank 2 of adapter_config.json with"),
    (changed(f"{GATES}.lora_B.weight", ones(INNER, 6)), {}, "the gate_up_proj of 3 experts of model.layers.0"),
    (changed(f"{GATES}.lora_A.weight", ones(6, 5)), {}, "has shape [6, 5], but"),
    (changed(f"{DOWN}.lora_B.weight", np.full((HIDDEN, 6), np.nan, np.float32)), {}, "NaN or infinite"),
    (
        changed(f"{DOWN}.lora_A.default.weight", ones(6, INNER)),
        {}, f"has the part A of {AT} twice, as {DOWN}.lora_A.",
    ),
    (stacked(), {"use_dora": True}, f"use_dora is true, and target_parameters has {AT}"),
    (stacked(), {"lora_bias": True}, f"lora_bias is true, and target_parameters has {AT}"),
    (stacked(), {"rank_pattern": {"down_proj": 9}}, "rank_pattern is 9; max_lora_rank is 8"),
    (stacked(), {"target_parameters": None}, "has 4 tensors that are not of this base model"),
    (
        stacked() | {name.replace(GATES, f"{GATES}.base_layer"): array for name, array in exchanged(stacked()).items()},
        {}, f"changes {AT}.gate_up_proj of the base model twice",
    ),
    (
        stacked() | {f"{PREFIX}{AT}.1.up_proj.lora_A.weight": ones(RANK, HIDDEN),
                     f"{PREFIX}{AT}.1.up_proj.lora_B.weight": ones(INNER, RANK)},
        {}, f"changes {AT}.1.up_proj.weight of the base model twice",
    ),
    (tensors(), FIELDS, "4 tensors that are not of this base model"),
    (
        {name: array for name, array in stacked().items() if GATES not in name}, {},
        f"lacks changes of {AT}.gate_up_proj, which target_parameters of adapter_config.json names; save the adapter",
    ),
    (stacked(), {"target_parameters": {"mlp": 1}}, "it must list at most 256 names"),
]  # fmt: skip


@pytest.mark.parametrize(("given_", "changes", "message"), BAD)
def test_changes_that_can_not_be_are_rejected(
    given_: Arrays, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as error:
        read(write_adapter(tmp_path, given_, **(FIELDS | changes)))
    assert message in str(error.value)
    assert str(error.value).isprintable()


def test_a_stack_that_is_changed_again_and_again_is_not_taken_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its parameters has a layer for each expert, so that a file could stand for many times its tensors."""
    given = stacked()
    for depth in range(1, 6):
        given |= {name.replace(GATES, f"{GATES}{'.base_layer' * depth}"): array for name, array in stacked().items()}
    folder = write_adapter(tmp_path, given, **FIELDS)
    monkeypatch.setattr(_Stacked, "names", None)
    with pytest.raises(ModelError, match=r"changes model\.layers\.0\.mlp\.experts\.\w+ of the base model twice"):
        read(folder)
