"""Whole tensors and rows of adapters: their requests have the very bits of a model that has them in its checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soft_tiles
from adapter_files import PREFIX, write_adapter
from greedy_steps import generate
from safetensors.numpy import save_file

from quire.kernels.devices.instruction_sets import available_isas
from quire.kernels.options import LoadOptions
from quire.kernels.weights.checkpoint import Checkpoint

Arrays = dict[str, np.ndarray]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LENGTHS = (3, 70)
TOKENS = [0, 1, 31, 32, 100, 7, 470, 502]


def tensors_of(folder: Path) -> Arrays:
    """Return all tensors of a checkpoint as f32."""
    return {name: tensor.to_f32() for name, tensor in Checkpoint(str(folder)).tensors.items()}


def write_changed(folder: Path, target: Path, tensors: Arrays) -> Path:
    """Write a checkpoint with other tensors, as f32."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(tensors, target / "model.safetensors")
    return target


def whole(name: str) -> Callable[[Arrays, Path], Arrays]:
    """Return what writes an adapter that replaces a tensor; it returns the base's tensors with that one."""

    def write(tensors: Arrays, folder: Path) -> Arrays:
        own = np.random.default_rng(5).permutation(tensors[name].reshape(-1)).reshape(tensors[name].shape)
        write_adapter(folder, {f"{PREFIX}{name}": own})
        return tensors | {name: own}

    return write


def rows(tensors: Arrays, folder: Path) -> Arrays:
    """Write an adapter with rows of the embedding."""
    own = tensors[EMBEDDING].copy()
    own[TOKENS] = np.random.default_rng(6).normal(0, 0.3, (len(TOKENS), own.shape[1])).astype(np.float32)
    trained = {f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta": own[TOKENS]}
    write_adapter(folder, trained, trainable_token_indices=TOKENS)
    return tensors | {EMBEDDING: own}


def biases(tensors: Arrays, folder: Path) -> Arrays:
    """Write an adapter with biases of the projections of attention and of gates."""
    random = np.random.default_rng(7)
    own = {
        name: random.normal(0, 0.5, tensor.shape).astype(np.float32)
        for name, tensor in tensors.items()
        if name.endswith(("q_proj.bias", "v_proj.bias", "gate_proj.bias", "down_proj.bias"))
    }
    assert own
    write_adapter(folder, {f"{PREFIX}{name}": tensor for name, tensor in own.items()}, bias="all")
    return tensors | own


CASES: dict[str, tuple[str, Callable[[Arrays, Path], Arrays]]] = {
    "head": ("llama-biases-linear", whole(HEAD)),
    "embedding": ("llama-biases-linear", whole(EMBEDDING)),
    "rows of an embedding": ("llama-biases-linear", rows),
    "rows of a tied head": ("llama-tied-llama3", rows),
    "biases": ("llama-biases-linear", biases),
    "scaled rows of a tied head": ("gemma3-window100", rows),
}


SIZES: dict[str, Any] = {"max_num_batched_tokens": 48, "num_pages": 16}
ADAPTERS: dict[str, Any] = {"max_loras": 2, "max_lora_rank": 8}


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_a_checkpoint_that_has_them(
    case: str, dtype: str, isa: str, checkpoints: Path, tmp_path: Path
) -> None:
    """And without the adapter those of the base."""
    name, write = CASES[case]
    model, adapter = str(checkpoints / name), tmp_path / "adapter"
    changed = write_changed(checkpoints / name, tmp_path / "changed", write(tensors_of(checkpoints / name), adapter))
    options: dict[str, Any] = {"dtype": dtype, "isa": isa, **SIZES}
    expected = generate(LoadOptions(str(changed), **options), LENGTHS)
    assert generate(LoadOptions(model, **options, **ADAPTERS), LENGTHS, adapter) == expected
    base = generate(LoadOptions(model, **options), LENGTHS)
    assert generate(LoadOptions(model, **options, **ADAPTERS), LENGTHS) == base != expected


@pytest.mark.parametrize("isa", ["amx", "avx512-bf16", "neon-dotprod"])
@pytest.mark.parametrize("case", ["head", "biases", "scaled rows of a tied head"])
def test_units_give_the_bits_of_fma(
    case: str, isa: str, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole heads are packed for each of them."""
    name, write = CASES[case]
    model, adapter = str(checkpoints / name), tmp_path / "adapter"
    write(tensors_of(checkpoints / name), adapter)
    options: dict[str, Any] = {"dtype": "bfloat16", "threads": 2, **SIZES, **ADAPTERS}
    expected = generate(LoadOptions(model, isa="avx2", **options), LENGTHS, adapter)
    if isa not in available_isas():
        soft_tiles.use(monkeypatch, tmp_path, isa)
    assert generate(LoadOptions(model, isa=isa, **options), LENGTHS, adapter) == expected
