"""Adapters are read by any names that their files may have, and told apart by what they compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_files import DOWN, OTHERS, PREFIX, QUERY, RANK, SHAPES, Arrays, renamed, tensors, write_adapter

from quire.kernels.adapters.adapter import Adapter
from quire.kernels.adapters.peft import read_adapter
from quire.kernels.errors import ModelError

A = f"{PREFIX}{QUERY}.lora_A.weight"


def read(folder: Path, max_rank: int = 8) -> Adapter:
    return read_adapter(folder, SHAPES, max_rank=max_rank, others=OTHERS)


def same(one: Adapter, other: Adapter) -> bool:
    return one.digest == other.digest and one.layers.keys() == other.layers.keys()


def test_an_adapter_is_read(tmp_path: Path) -> None:
    stored, adapter = tensors(), read(write_adapter(tmp_path))
    assert adapter.layers.keys() == {f"{QUERY}.weight", f"{DOWN}.weight"}
    for module in (QUERY, DOWN):
        layer = adapter.layers[f"{module}.weight"]
        assert np.array_equal(layer.a, stored[f"{PREFIX}{module}.lora_A.weight"])
        assert np.array_equal(layer.b, stored[f"{PREFIX}{module}.lora_B.weight"])
        assert (layer.scale, layer.rank, layer.bias, layer.magnitude) == (1.5, RANK, None, None)
    assert adapter.max_rank == RANK
    assert adapter.num_bytes == sum(array.nbytes for array in stored.values())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (PREFIX, ""),
        (".weight", ".default.weight"),
        (f"{PREFIX}model.", PREFIX),
        (f"{PREFIX}model.", f"{PREFIX}model.language_model."),
        (PREFIX, f"{PREFIX}language_model."),
    ],
)
def test_names_with_other_prefixes(old: str, new: str, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "renamed", renamed(old, new))
    assert same(read(folder), read(write_adapter(tmp_path / "plain")))


def test_names_that_may_be_several_are_an_error(tmp_path: Path) -> None:
    shapes = {"model.layers.0.q.weight": (6, 8), "transformer.layers.0.q.weight": (6, 8)}
    stored = {f"{PREFIX}layers.0.q.lora_A.weight": np.ones((2, 8), np.float32)}
    with pytest.raises(ModelError, match=r"may be any of model.layers.0.q.weight, transformer"):
        read_adapter(write_adapter(tmp_path, stored), shapes, max_rank=8)


def test_links_are_followed(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "blobs")
    (tmp_path / "links").mkdir()
    for file in folder.iterdir():
        (tmp_path / "links" / file.name).symlink_to(file)
    assert same(read(tmp_path / "links"), read(folder))


CHANGES: dict[str, tuple[Arrays, dict[str, Any]]] = {
    "alpha": (tensors(), {"lora_alpha": 4}),
    "alpha of a module": (tensors(), {"alpha_pattern": {"q_proj": 4}}),
    "rank-stabilized": (tensors(), {"use_rslora": True}),
    "bias": (tensors(lora_B__bias=(6,)) | {f"{PREFIX}{DOWN}.lora_B.bias": np.ones(8, np.float32)}, {"lora_bias": True}),
    "magnitude": (
        tensors(lora_magnitude_vector=(6,)) | {f"{PREFIX}{DOWN}.lora_magnitude_vector": np.ones(8, np.float32)},
        {"use_dora": True},
    ),
    "less": ({name: array for name, array in tensors().items() if QUERY in name}, {}),
    "replaced": (tensors() | {f"{PREFIX}model.norm.weight": np.ones(8, np.float32)}, {}),
    "replaced bias": (tensors(bias=(6,)), {"bias": "all"}),
    "replaced bias of a wrapped layer": (tensors(base_layer__bias=(6,)), {"bias": "lora_only"}),
    "dtype": ({name: array.astype(np.float16) for name, array in tensors().items()}, {}),
    "value": (tensors() | {A: tensors()[A] + np.float32(1)}, {}),
    "embedding": (
        tensors()
        | {
            f"{PREFIX}model.embed_tokens.lora_embedding_A": np.ones((2, 10), np.float32),
            f"{PREFIX}model.embed_tokens.lora_embedding_B": np.ones((8, 2), np.float32),
        },
        {},
    ),
    **{
        f"tokens {token}": (
            tensors()
            | {f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta": np.ones((2, 8), np.float32)},
            {"trainable_token_indices": [1, token]},
        )
        for token in (2, 3)
    },
}


def test_the_digest_changes_with_what_is_computed_and_with_nothing_else(tmp_path: Path) -> None:
    plain = read(write_adapter(tmp_path / "plain"))
    digests = {
        name: read(write_adapter(tmp_path / name, *CHANGES[name][:1], **CHANGES[name][1])).digest for name in CHANGES
    }
    wrapped = digests.pop("replaced bias of a wrapped layer")
    assert wrapped == digests["replaced bias"]
    assert len({plain.digest, *digests.values()}) == 1 + len(digests)
    other = {"task_type": None, "target_modules": "all-linear", "lora_dropout": 0.5, "base_model_name_or_path": "x"}
    shuffled = dict(reversed(tensors("").items()))
    assert read(write_adapter(tmp_path / "other names", shuffled, **other)).digest == plain.digest
