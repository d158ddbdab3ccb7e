"""Adapters that are damaged, of another base model or not supported are rejected with one line that says what to do."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_files import DOWN, HEAD, OTHERS, PREFIX, QUERY, SHAPES, Arrays, renamed, tensors, write_adapter

from quire.kernels.adapters.peft import read_adapter
from quire.kernels.errors import ModelError

MODEL = "adapter_model.safetensors"
A = f"{PREFIX}{QUERY}.lora_A.weight"

BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "ADALORA"}, "peft_type is 'ADALORA'; supported is LORA"),
    ({"peft_type": None}, "peft_type is missing; supported is LORA"),
    ({"r": 9}, "r is 9; max_lora_rank is 8; start the engine with a higher one"),
    ({"r": 0}, "r is 0; ranks must be from 1 to 8, which is max_lora_rank"),
    ({"r": True}, "r is True; ranks must be"),
    ({"r": None}, "r is missing; ranks must be"),
    ({"rank_pattern": {"q_proj": 100}}, "rank_pattern is 100; max_lora_rank is 8"),
    ({"rank_pattern": {"q_proj": 4}}, "lora_A.weight has shape [2, 8], but rank 4 of adapter_config.json with "),
    ({"rank_pattern": {"q_proj(": 4}}, "rank_pattern has 'q_proj(', which is no regular expression"),
    ({"rank_pattern": {"[\n-\0]": 4}}, "which is no regular expression: 'bad character range"),
    ({"rank_pattern": [4]}, "rank_pattern is [4]; it must be an object"),
    ({"lora_alpha": "8"}, "lora_alpha is '8'; it must be a finite number"),
    ({"lora_alpha": 10**40}, "it must be a finite number"),
    ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern is missing; it must be a finite number"),
    ({"alpha_pattern": {"(.*)*q_proj": False}}, "alpha_pattern is False; it must be a finite number"),
    ({"modules_to_save": [DOWN]}, f"lacks {DOWN}.weight, which modules_to_save of adapter_config.json names"),
    ({"modules_to_save": "norm"}, "lacks model.norm.weight, which modules_to_save"),
    ({"modules_to_save": [1]}, "modules_to_save is [1]; it must list at most 64 names"),
    ({"use_rslora": "yes"}, "use_rslora is 'yes'; it must be true or false"),
    ({"use_dora": True}, f"lacks the part magnitude of {DOWN} where adapter_config.json has use_dora true"),
    ({"lora_bias": True}, f"lacks the part bias of {DOWN} where adapter_config.json has lora_bias true"),
    ({"lora_bias": True, "use_dora": True}, "lora_bias is True; with use_dora it must be false"),
    ({"bias": "some"}, "bias is 'some'; it must be one of none, all, lora_only"),
    ({"bias": {}}, "bias is {}; it must be one of none"),
    *(
        ({"init_lora_weights": kind}, f"init_lora_weights is '{kind}'; such an initialization changes the weights")
        for kind in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga")
    ),
    ({"init_lora_weights": 1}, "init_lora_weights is 1"),
    ({"layer_replication": [[0, 1]]}, "layer_replication is [[0, 1]]; models with replicated layers are not supported"),
    ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is [1]; adapters that begin at some tokens"),
    ({"invocation_string": "<x>"}, "invocation_string is '<x>'; adapters that begin at some text"),
    ({"use_bdlora": {"nblocks": 2}}, "block-diagonal adapters (BD-LoRA) are not supported"),
    ({"use_qalora": True}, "use_qalora is True; adapters of grouped inputs"),
    ({"arrow_config": {"top_k": 3}}, "routing between adapters (Arrow) is not supported"),
    ({"kasa_config": {"beta": 1}}, "it changes the weights of the base model (KaSA)"),
    ({"monteclora_config": {"x": 1}}, "random adapters (MonteCLoRA) are not supported"),
    ({"ensure_weight_tying": True}, "tied adapters are not supported; train with it false"),
    ({"enable_lora": [True, False]}, "this form of peft 0.2 is not supported"),
    ({"of_next_year": 3}, "of_next_year is 3; this field is not known; remove it if it changes nothing"),
    ({"new\nline" * 40: 3}, "this field is not known"),
    ({"eva_config": [[[]]] * 2, "deep": json.loads("[" * 40 + "]" * 40)}, "nests values more than 32 times"),
    ({"base_model_name_or_path": "x" * (1 << 21)}, "has more than 2097152 bytes; it is not the config of an adapter"),
    ({"of_next_year": [[]] * 10_000}, "can't be read as a JSON object: it has more than 10000 lists and objects"),
    ({"of_next_year": {str(n): 0 for n in range(50_001)}}, "JSON object: it has more than 50000 names of values"),
    ({"of_next_year": [1e308] * 30_000}, "of_next_year is [1e+308, 1e+308, "),
    ({"of_next_year": {"x" * 1000: "y" * 10_000}}, "of_next_year is {'xxxx"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_FIELDS)
def test_fields_that_are_not_supported(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    check_error(write_adapter(tmp_path, **changes), message)


def check_error(folder: Path, message: str) -> None:
    with pytest.raises(ModelError) as error:
        read_adapter(folder, SHAPES, max_rank=8, others=OTHERS)
    assert message in str(error.value)
    assert str(error.value).isprintable()  # and so has one line


@pytest.mark.parametrize("off", [None, False, "", [], {}])
def test_unknown_fields_that_are_off_are_allowed(off: Any, tmp_path: Path) -> None:
    read_adapter(write_adapter(tmp_path, of_next_year=off, alora_invocation_tokens=off), SHAPES, max_rank=8)


@pytest.mark.parametrize("kind", [True, False, None, "gaussian", "Gaussian", "eva", "orthogonal", "mica"])
def test_initializations_that_leave_the_base_alone_are_allowed(kind: Any, tmp_path: Path) -> None:
    read_adapter(write_adapter(tmp_path, init_lora_weights=kind), SHAPES, max_rank=8)


def changed(name: str, array: np.ndarray | None) -> Arrays:
    """The tensors with one that is another, or missing."""
    made = tensors() | ({} if array is None else {name: array})
    return {key: value for key, value in made.items() if key != name or array is not None}


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


EMBEDDING = {
    f"{PREFIX}model.embed_tokens.lora_embedding_A": ones(2, 10),
    f"{PREFIX}model.embed_tokens.lora_embedding_B": ones(8, 2),
}
DELTA = f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta"
BAD_TENSORS: list[tuple[Arrays, dict[str, Any], str]] = [
    ({}, {}, "has no tensors; save the adapter again"),
    (changed(A, None), {}, f"lacks the part A of {QUERY}; save the adapter again"),
    (changed(A.replace("lora_A", "lora_B"), None), {}, f"lacks the part B of {QUERY}"),
    (changed(A, ones(2, 9)), {}, "lora_A.weight has shape [2, 9], but rank 2 of adapter_config.json with "),
    (changed(A, ones(8, 2)), {}, "asks for [2, 8]; give an adapter of this base model"),
    (changed(A, ones(16)), {}, "has shape [16], but"),
    (changed(A, ones(2, 0)), {}, "has shape [2, 0], but"),
    (changed(A, np.ones((2, 8), np.int32)), {}, "is of type i32; adapters are f32, f16 or bf16"),
    (changed(A, np.ones((2, 8), np.float64)), {}, f"{A} is of type F64; adapters are f32, f16 or bf16"),
    (changed(A, np.full((2, 8), np.nan, np.float32)), {}, "has elements that are NaN or infinite"),
    (changed(A, np.full((2, 8), -np.inf, np.float16)), {}, "has elements that are NaN or infinite"),
    (tensors(lora_B__bias=(6,)), {}, f"has the part bias of {QUERY} where adapter_config.json has lora_bias false"),
    (tensors(lora_magnitude_vector=(6,)), {}, f"has the part magnitude of {QUERY} where"),
    (tensors(lora_A__bias=(2,)), {}, "1 tensors that are not of this base model"),
    (tensors(lora_diag=(2,)), {}, "1 tensors that are not of this base model"),
    (tensors(lora_A__other__weight=(2, 8)), {}, "1 tensors that are not of this base model"),
    (tensors(lora_A__default__weight=(2, 8)), {}, f"changes {QUERY}.weight of the base model twice"),
    (tensors() | renamed("model.layers", "language_model.model.layers"), {}, "of the base model twice"),
    (renamed("layers.0", "layers.1"), {}, "4 tensors that are not of this base model, or not supported: "),
    (renamed("model.layers", "visual.blocks"), {}, "4 tensors that are not of this base model"),
    (tensors(weight=(8, 6)), {}, f"has shape [8, 6], but {QUERY}.weight of the base model asks for [6, 8]"),
    (tensors(weight=(6, 8)), {"fan_in_fan_out": True}, "fan_in_fan_out, so that it may be transposed"),
    (tensors() | {f"{PREFIX}{DOWN}.bias": ones(8)}, {}, "1 tensors that are not of this base model"),
    (tensors() | {f"{PREFIX}{HEAD}.lora_embedding_A": ones(2, 8)}, {}, "1 tensors that are not of this base model"),
    (tensors() | {f"{PREFIX}model.norm.lora_embedding_A": ones(2, 8)}, {}, "1 tensors that are not of this base model"),
    (
        tensors() | {f"{PREFIX}model.embed_tokens.lora_embedding_A": ones(2, 10)},
        {},
        "lacks the part embedding B of model.embed_tokens",
    ),
    (EMBEDDING, {"use_dora": True}, "use_dora changes model.embed_tokens too, and an embedding can't have it"),
    (tensors() | {f"{PREFIX}model.embed_tokens.weight": ones(12, 8)}, {}, "has shape [12, 8], but model.embed_tokens"),
    (tensors(), {"trainable_token_indices": [1]}, "lacks the rows of the trainable_token_indices of adapter_config"),
    (tensors() | {DELTA: ones(2, 8)}, {}, "trainable_token_indices is missing; for model.embed_tokens it must"),
    (tensors() | {DELTA: ones(2, 8)}, {"trainable_token_indices": [1]}, "with 1 trainable_token_indices asks for"),
    (tensors() | {DELTA: ones(2, 8)}, {"trainable_token_indices": [1, 1]}, "different tokens"),
    (tensors() | {DELTA: ones(2, 8)}, {"trainable_token_indices": [1, 10]}, "has token 10, but"),
    (tensors() | {DELTA: ones(2, 8)}, {"trainable_token_indices": {"x": [1, 2]}}, "for model.embed_tokens it"),
    (tensors(lora_B__bias=(6,)) | {f"{PREFIX}{DOWN}.lora_B.bias": 3e38 * ones(8)}, {"lora_bias": True}, "infinite"),
]  # fmt: skip


@pytest.mark.parametrize(("given_", "changes", "message"), BAD_TENSORS)
def test_tensors_that_are_not_supported(given_: Arrays, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    check_error(write_adapter(tmp_path, given_, **changes), message)


@pytest.mark.parametrize("place", [0, -1])
def test_one_bad_element_of_many_is_found(place: int, tmp_path: Path) -> None:
    inputs = 3 * (1 << 20)
    a = np.zeros((1, inputs), np.float16)
    a[0, place] = np.inf
    given_ = {f"{PREFIX}x.lora_A.weight": a, f"{PREFIX}x.lora_B.weight": np.ones((1, 1), np.float16)}
    folder = write_adapter(tmp_path, given_, r=1)
    with pytest.raises(ModelError, match="NaN or infinite"):
        read_adapter(folder, {"x.weight": (1, inputs)}, max_rank=8)


def header_only(entries: Any, data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


def with_pickle(folder: Path) -> None:
    (folder / MODEL).rename(folder / "adapter_model.bin")


BAD_FILES: list[tuple[Callable[[Path], Any], str]] = [
    (lambda folder: (folder / "adapter_config.json").unlink(), "has no adapter_config.json; give a folder that PEFT's"),
    (lambda folder: (folder / "adapter_config.json").write_bytes(b"\xff"), "can't be read as a JSON object"),
    (lambda folder: (folder / "adapter_config.json").write_text("[1]"), "as a JSON object: it is of type list"),
    (lambda folder: (folder / "adapter_config.json").write_text('{"r": NaN}'), "JSON has no number NaN"),
    (
        lambda folder: (folder / "adapter_config.json").write_text('{"r": ' + "9" * 5000),
        "can't be read as a JSON object",
    ),
    (lambda folder: (folder / "adapter_config.json").write_text("[" * 100_000), "can't be read as a JSON object"),
    (lambda folder: (folder / MODEL).unlink(), "has no adapter_model.safetensors; give a folder"),
    (with_pickle, "has no adapter_model.safetensors; it has adapter_model.bin, which is a program to run: convert it"),
    (lambda folder: (folder / MODEL).write_bytes(b""), "is not a safetensors file, or is truncated"),
    (lambda folder: os.truncate(folder / MODEL, (folder / MODEL).stat().st_size - 1), "is truncated"),
    (
        lambda folder: (folder / MODEL).write_bytes((folder / MODEL).read_bytes() + b"x"),
        "no tensor has the last 1 bytes",
    ),
    (
        lambda folder: (folder / MODEL).write_bytes(
            header_only({str(i): {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(32)})
        ),
        "has more than 30 tensors, the most that adapters of this base model have; give an adapter of this base model",
    ),
    (
        lambda folder: (folder / MODEL).write_bytes(header_only({"x": "y" * 1024})),
        "header can't be read: an entry has more than 1024 bytes",
    ),
    (
        lambda folder: (folder / MODEL).write_bytes(header_only({"__metadata__": "y" * (1 << 16)})),
        "header can't be read: an entry has more than 65536 bytes",
    ),
    (
        lambda folder: (folder / MODEL).write_bytes(header_only({"__metadata__": "y" * 300_000})),
        "has a header of 300020 bytes; those of adapters of this base model have at most 269824: give an adapter of",
    ),
    (lambda folder: (folder / MODEL).write_bytes(header_only([1])), "header can't be read: it is no JSON object"),
]


@pytest.mark.parametrize(("break_", "message"), BAD_FILES)
def test_files_that_are_missing_or_damaged(break_: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path)
    break_(folder)
    check_error(folder, message)


@pytest.mark.parametrize("name", ["missing", "null\0", "x" * 5000])
def test_folders_that_can_not_be(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no adapter_config.json|can't be read"):
        read_adapter(tmp_path / name, SHAPES, max_rank=8)


def test_a_file_larger_than_all_that_may_change_is_not_read(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path)
    os.truncate(folder / MODEL, 1 << 40)  # sparse
    check_error(folder, "the file is damaged, or its header incomplete")


def test_a_file_that_is_cut_later_does_not_change_the_adapter(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path)
    adapter = read_adapter(folder, SHAPES, max_rank=8)
    os.truncate(folder / MODEL, 0)
    for module in (QUERY, DOWN):
        assert np.array_equal(adapter.layers[f"{module}.weight"].a, tensors()[f"{PREFIX}{module}.lora_A.weight"])


@pytest.mark.parametrize("name", ["adapter_config.json", MODEL])
def test_pipes_are_not_waited_for(name: str, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    check_error(folder, "it is a pipe, and the files of a model must be regular ones")


def test_a_module_that_is_trained_as_a_whole_and_by_tokens_is_an_error_of_both_fields(tmp_path: Path) -> None:
    """PEFT writes such a head of a tied model, and fails to compute it."""
    given = {f"{PREFIX}lm_head.token_adapter.base_layer.weight": np.ones((10, 8), np.float32)}
    folder = write_adapter(tmp_path, given | {DELTA: np.ones((2, 8), np.float32)}, trainable_token_indices=[1, 2])
    with pytest.raises(ModelError, match=r"modules_to_save and trainable_token_indices both change 'lm_head'"):
        read_adapter(folder, SHAPES, max_rank=8, others=OTHERS)
