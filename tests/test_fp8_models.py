"""FP8 checkpoints give the bits of the float checkpoint that torch makes of them, and are rejected where damaged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quantized_checkpoints import Floats, Raw, is_linear, load, raw_floats, save, write_dequantized
from reference_libraries import import_reference
from test_quantized_models import log_probabilities

from quire.kernels.errors import ModelError
from quire.kernels.options import LoadOptions
from quire.kernels.runner import describe
from quire.kernels.weights import loader

torch = import_reference("torch")

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    """Return the quantization_config of compressed-tensors."""
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
    fields = {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": False, "symmetric": True, **weights}
    group = {"targets": ["Linear"], "weights": fields, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    }  # fmt: skip


CASES: dict[str, tuple[dict[str, Any], tuple[int, int] | None, str, str]] = {
    "blocks": ({**FP8, "weight_block_size": [128, 128]}, (128, 128), "weight_scale_inv", "BF16"),
    "blocks-f32": ({**FP8, "weight_block_size": [128, 64]}, (128, 64), "weight_scale_inv", "F32"),
    "blocks-cut": ({**FP8, "weight_block_size": [96, 40]}, (96, 40), "weight_scale_inv", "BF16"),
    "tensor": ({**FP8, "activation_scheme": "static"}, None, "weight_scale", "F32"),
    "rows": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, (1, 1 << 16), "weight_scale", "F32"),
    "compressed-channel": (compressed("channel"), (1, 1 << 16), "weight_scale", "BF16"),
    "compressed-tensor": (compressed("tensor"), None, "weight_scale", "F32"),
    "compressed-block": (compressed("block", block_structure=[64, 128]), (64, 128), "weight_scale", "F32"),
}
"""Config, outputs and inputs that share a scale (None: all), name and dtype of the scales."""


def write_fp8(source: Path, target: Path, case: str) -> dict[str, Floats]:
    """Write the linear layers of a model in FP8, rounded by torch; return their products with the scales."""
    config, block, scale_name, scale_dtype = CASES[case]
    tensors, weights = {}, {}
    for name, raw in load(source).items():
        tensors[name] = raw
        if not is_linear(name):
            continue
        weight = torch.from_numpy(raw.to_f32().copy())
        rows, columns = block or weight.shape
        grid = [[part.abs().max() / 448 for part in band.split(columns, 1)] for band in weight.split(rows)]
        scales = torch.tensor(grid).clamp(min=1e-12)
        scales = scales.to(torch.bfloat16).float() if scale_dtype == "BF16" else scales
        wide = scales.repeat_interleave(rows, 0)[: len(weight)].repeat_interleave(columns, 1)[:, : weight.shape[1]]
        codes = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        weights[name] = (codes.float() * wide).numpy()
        tensors[name] = Raw("F8_E4M3", raw.shape, codes.view(torch.uint8).numpy().tobytes())
        given = scales.reshape(()) if case == "tensor" else scales.reshape(1) if block is None else scales
        tensors[name.removesuffix("weight") + scale_name] = raw_floats(given.numpy(), scale_dtype)
        if config.get("activation_scheme") == "static":
            tensors[name.removesuffix("weight") + "input_scale"] = raw_floats(np.array([1.5], np.float32), "F32")
    fields = json.loads((source / "config.json").read_text())
    save(target, tensors, {**fields, "quantization_config": config})
    for file in source.iterdir():
        if not (target / file.name).exists():
            shutil.copy(file, target)
    return weights


@pytest.mark.parametrize("case", CASES)
def test_an_fp8_model_is_its_float_twin(case: str, demo_model: Path, tmp_path: Path) -> None:
    weights = write_fp8(demo_model, tmp_path / "fp8", case)
    assert len(weights) > 4
    write_dequantized(demo_model, tmp_path / "floats", weights)
    for options in ({"dtype": "bfloat16"}, {"dtype": "float32"}, {"dtype": "bfloat16", "quantization": "int8"}):
        twin = log_probabilities(tmp_path / "floats", **options)
        np.testing.assert_array_equal(log_probabilities(tmp_path / "fp8", **options), twin)
    auto = log_probabilities(tmp_path / "fp8")
    np.testing.assert_array_equal(auto, log_probabilities(tmp_path / "floats", dtype="bfloat16"))


@pytest.mark.parametrize("case", ["blocks", "rows"])
@pytest.mark.parametrize("quantization", [None, "int4"])
def test_a_model_that_is_read_in_pieces_has_the_same_bits(
    case: str, quantization: str | None, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_fp8(demo_model, tmp_path / "fp8", case)
    whole = log_probabilities(tmp_path / "fp8", quantization=quantization)
    monkeypatch.setattr(loader, "_PIECE_BYTES", 4 * 256 * 48)  # 48 rows of 256 inputs, which no block of 128 ends with
    np.testing.assert_array_equal(log_probabilities(tmp_path / "fp8", quantization=quantization), whole)


@pytest.mark.parametrize(
    ("model", "part"),
    [("deepseek3-dense-yarn", "kv_b_proj"), ("deepseek3-experts-yarn", ".experts.7.up"), ("qwen3-moe", ".experts.7.")],
)
def test_an_fp8_model_of_another_architecture_is_its_float_twin(
    model: str, part: str, checkpoints: Path, tmp_path: Path
) -> None:
    weights = write_fp8(checkpoints / model, tmp_path / "fp8", "blocks")
    assert any(part in name for name in weights)
    write_dequantized(checkpoints / model, tmp_path / "floats", weights)
    for options in ({"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int4"}):
        twin = log_probabilities(tmp_path / "floats", **options)
        np.testing.assert_array_equal(log_probabilities(tmp_path / "fp8", **options), twin)


def test_the_memory_of_an_fp8_model_is_that_of_bf16(demo_model: Path, tmp_path: Path) -> None:
    write_fp8(demo_model, tmp_path / "fp8", "blocks")
    plans = [describe(LoadOptions(str(folder)))[0] for folder in (demo_model, tmp_path / "fp8")]
    assert plans[0].weight_bytes == plans[1].weight_bytes


def test_every_code_is_the_value_of_torch() -> None:
    from quire.kernels.weights.quantized.fp8 import VALUES

    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(VALUES, values)


def change(folder: Path, ending: str, **fields: Any) -> str:
    """Change the first tensor of this ending: its dtype, shape or data; return its name."""
    tensors = load(folder)
    name = next(name for name in tensors if name.endswith(ending))
    raw = tensors[name]
    tensors[name] = Raw(*(fields.get(field, getattr(raw, field)) for field in ("dtype", "shape", "data")))
    save(folder, tensors, json.loads((folder / "config.json").read_text()))
    return name


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_nan_is_rejected(code: int, demo_model: Path, tmp_path: Path) -> None:
    write_fp8(demo_model, tmp_path / "fp8", "blocks")
    data = next(raw.data for name, raw in load(tmp_path / "fp8").items() if name.endswith("up_proj.weight"))
    name = change(tmp_path / "fp8", "up_proj.weight", data=data[:77] + bytes([code]) + data[78:])
    with pytest.raises(ModelError, match=rf"tensor {name} can't be loaded: it holds a NaN \(code 0x7f or 0xff\)"):
        log_probabilities(tmp_path / "fp8")


@pytest.mark.parametrize(
    ("ending", "fields", "message"),
    [
        (
            "up_proj.weight_scale_inv",
            {"dtype": "I32", "shape": (1,), "data": bytes(4)},
            "there is neither .*scale_inv nor",
        ),
        ("up_proj.weight_scale_inv", {"shape": (7, 1), "data": bytes(14)}, r"has shape \[7, 1\]; for weights of shape"),
        ("up_proj.weight_scale_inv", {"dtype": "BF16", "shape": (), "data": b"\x80\x7f"}, "an infinity or a NaN"),
        ("up_proj.weight", {"dtype": "U8"}, "is of type U8; supported are BF16, F16, F32"),
    ],
)
def test_damaged_tensors_are_named(
    ending: str, fields: dict[str, Any], message: str, demo_model: Path, tmp_path: Path
) -> None:
    write_fp8(demo_model, tmp_path / "fp8", "blocks")
    change(tmp_path / "fp8", ending, **fields)
    with pytest.raises(ModelError, match=message) as raised:
        describe(LoadOptions(str(tmp_path / "fp8")))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**FP8, "fmt": "e5m2"}, "quantization_config.fmt is 'e5m2'"),
        ({**FP8, "weight_block_size": [128]}, r"weight_block_size is \[128\]; it must be two sizes"),
        ({**FP8, "weight_block_size": [0, 128]}, "it must be two sizes"),
        (compressed("group"), "weights.strategy is 'group'; it must be one of 'tensor', 'channel', 'block'"),
        (compressed("channel", num_bits=4), "weights.num_bits is 4"),
        (compressed("channel", type="int"), "weights.type is 'int'"),
    ],
)
def test_other_formats_are_named(config: dict[str, Any], message: str, demo_model: Path, tmp_path: Path) -> None:
    shutil.copytree(demo_model, tmp_path / "model")
    fields = json.loads((demo_model / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**fields, "quantization_config": config}))
    with pytest.raises(ModelError, match=message):
        describe(LoadOptions(str(tmp_path / "model")))
