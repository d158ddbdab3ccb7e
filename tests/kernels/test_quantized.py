"""Quantized checkpoints are read exactly as their formats specify; the rest is rejected with errors that name it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quantized_checkpoints import (
    RECIPES,
    Floats,
    Raw,
    Recipe,
    by_name,
    load,
    quantization_config,
    raw_floats,
    raw_integers,
    save,
    write_dequantized,
    write_quantized,
)
from tiny_model import CONFIG, write

from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.weights.checkpoint import Checkpoint, Tensor
from quire.kernels.weights.quantized import QuantizedFormat, QuantizedMatrix, Scheme, scheme_of
from quire.kernels.weights.quantized.scheme import unpack

SHAPES = {"self_attn.q_proj": (128, 128), "mlp.up_proj": (256, 128), "mlp.down_proj": (128, 256)}
DOWN = "model.layers.1.mlp.down_proj"
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Write a float checkpoint; some rows have no negative or no positive weight, so zero points take every value."""
    rng = np.random.default_rng(5)
    tensors = {"lm_head.weight": rng.standard_normal((64, 128)).astype(np.float32)}
    for layer in range(2):
        for module, shape in SHAPES.items():
            weight = rng.standard_normal(shape).astype(np.float32)
            weight[3], weight[17] = abs(weight[3]), -abs(weight[17])
            tensors[f"model.layers.{layer}.{module}.weight"] = weight
    return write(tmp_path / "floats", tensors)


def opened(folder: Path) -> tuple[Checkpoint, Scheme]:
    """Return a quantized checkpoint and its scheme."""
    checkpoint = Checkpoint(str(folder))
    scheme = scheme_of(ModelConfig(checkpoint.config))
    assert scheme is not None
    return checkpoint, scheme


def dequantized(matrix: QuantizedMatrix) -> Floats:
    """Return w[n, k] with its columns in natural order."""
    n, k = matrix.values.shape
    group = matrix.format.group or k
    zeros = np.full_like(matrix.scales, matrix.format.middle) if matrix.zeros is None else matrix.zeros
    weight = np.empty((n, k), np.float32)
    for j in range(k):
        column = j if matrix.order is None else matrix.order[j]
        integers = matrix.values[:, j].astype(np.float32) - zeros[:, j // group].astype(np.float32)
        weight[:, column] = integers * matrix.scales[:, j // group]
    return weight


@every_recipe
def test_read_inverts_packing(recipe: Recipe, source: Path, tmp_path: Path) -> None:
    weights = write_quantized(source, tmp_path / "packed", recipe)
    checkpoint, scheme = opened(tmp_path / "packed")
    assert len(weights) == 6
    for name, weight in weights.items():
        module, (n, k) = name.removesuffix(".weight"), weight.shape
        format_ = scheme.format_of(module)
        assert format_ == QuantizedFormat(recipe.bits, max(recipe.group, 0), not recipe.symmetric)
        scheme.check(checkpoint, module, n, k)
        matrix = scheme.read(checkpoint, module, n, k)
        assert matrix.format == format_
        assert matrix.values.dtype == np.uint8
        assert matrix.values.shape == (n, k)
        assert all(array is None or array.flags.c_contiguous for array in (matrix.values, matrix.scales, matrix.zeros))
        assert matrix.scales.dtype == np.float32
        assert matrix.scales.shape == (n, format_.groups(k))
        assert (matrix.zeros is not None) == format_.zeros
        assert (matrix.order is not None) == (recipe.reorder and recipe.group > 0)
        assert np.array_equal(dequantized(matrix), weight)
        floats = scheme.dequantized(checkpoint, module, n, k)
        assert np.array_equal(floats.to_f32(), weight)
        assert np.array_equal(floats.rows(5, 40).to_f32(), weight[5:45])
        order = scheme.order(checkpoint, module, n, k)
        assert order is None if matrix.order is None else np.array_equal(order, matrix.order)  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", [r for r in RECIPES if not r.symmetric], ids=lambda recipe: recipe.name)
def test_zero_points_take_every_value(recipe: Recipe, source: Path, tmp_path: Path) -> None:
    write_quantized(source, tmp_path / "packed", recipe)
    checkpoint, scheme = opened(tmp_path / "packed")
    zeros = scheme.read(checkpoint, DOWN, 128, 256).zeros
    assert zeros is not None
    assert zeros.dtype == np.uint8
    assert (zeros.min(), zeros.max()) == (0, 2**recipe.bits - 1)


@every_recipe
def test_a_check_reads_no_data(recipe: Recipe, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_quantized(source, tmp_path / "packed", recipe)
    checkpoint, scheme = opened(tmp_path / "packed")
    monkeypatch.setattr(Tensor, "to_numpy", None)
    monkeypatch.setattr(Tensor, "to_f32", None)
    scheme.check(checkpoint, DOWN, 128, 256)


def test_the_last_group_of_a_gptq_row_may_be_shorter(tmp_path: Path) -> None:
    weight = np.random.default_rng(1).standard_normal((32, 96)).astype(np.float32)
    source = write(tmp_path / "floats", {f"{DOWN}.weight": weight})
    for name in ("gptq-4-group64", "gptq-4-group128-no-indices", "gptq-4-reordered"):
        weights = write_quantized(source, tmp_path / name, by_name(name))
        checkpoint, scheme = opened(tmp_path / name)
        matrix = scheme.read(checkpoint, DOWN, 32, 96)
        assert matrix.scales.shape[1] == matrix.format.groups(96) == (1 if "128" in name else 2)
        assert np.array_equal(dequantized(matrix), weights[f"{DOWN}.weight"])


def test_rows_that_do_not_fill_words_are_read(tmp_path: Path) -> None:
    weight = np.random.default_rng(1).standard_normal((13, 37)).astype(np.float32)
    source = write(tmp_path / "floats", {f"{DOWN}.weight": weight})
    weights = write_quantized(source, tmp_path / "packed", by_name("pack-4-channel-asymmetric"))
    checkpoint, scheme = opened(tmp_path / "packed")
    assert np.array_equal(dequantized(scheme.read(checkpoint, DOWN, 13, 37)), weights[f"{DOWN}.weight"])


def test_every_byte_is_unpacked() -> None:
    words = np.arange(256, dtype=np.uint8).repeat(4).view("<i4").reshape(256, 1)
    low, high = np.arange(256) % 16, np.arange(256) // 16
    assert np.array_equal(unpack(words, 4, 8), np.stack([low, high] * 4, axis=1))
    assert np.array_equal(unpack(words, 8, 3), np.arange(256)[:, None].repeat(3, axis=1))


def test_words_are_read_in_the_published_order(tmp_path: Path) -> None:
    """Compare with words derived by hand from each format's specification."""
    word = 0x76543210
    checkpoint, scheme = opened(of_words(tmp_path / "gptq", "gptq_v2", [[word] * 8] * 4, [[word]]))
    first = scheme.read(checkpoint, DOWN, 8, 32)
    assert first.values.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7] * 4] * 8
    assert first.zeros is not None
    assert first.zeros.T.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    checkpoint, scheme = opened(of_words(tmp_path / "awq", "awq", [[word]] * 32, [[word]]))
    second = scheme.read(checkpoint, DOWN, 8, 32)
    assert second.values.T.tolist() == [[0, 4, 1, 5, 2, 6, 3, 7]] * 32
    assert second.zeros is not None
    assert second.zeros.T.tolist() == [[0, 4, 1, 5, 2, 6, 3, 7]]


@pytest.mark.parametrize(
    ("stored", "zeros"),
    [
        (0x77777777, [8] * 8),
        (0x00000000, [1] * 8),
        (0xEEEEEEEE, [15] * 8),
        (0x0FFFFFFF, [0, 1, 1, 1, 1, 1, 1, 2]),
        (0x654320FF, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_gptq_stores_zero_points_minus_one_with_borrow(stored: int, zeros: list[int], tmp_path: Path) -> None:
    checkpoint, scheme = opened(of_words(tmp_path / "gptq", "gptq", [[0] * 8] * 4, [[stored]]))
    matrix = scheme.read(checkpoint, DOWN, 8, 32)
    assert matrix.zeros is not None
    assert matrix.zeros[:, 0].tolist() == zeros


def test_symmetric_gptq_zero_points_may_be_in_either_format(source: Path, tmp_path: Path) -> None:
    """A few writers store 8 and say "gptq", which means 7; a symmetric matrix can only mean 8."""
    folder = tmp_path / "packed"
    weights = write_quantized(source, folder, by_name("gptq-4"))
    spoil_config(folder, lambda config: config.update(checkpoint_format="gptq_v2"))
    checkpoint, scheme = opened(folder)
    assert np.array_equal(dequantized(scheme.read(checkpoint, DOWN, 128, 256)), weights[f"{DOWN}.weight"])


def test_indices_apply_even_without_act_order(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    weights = write_quantized(source, folder, by_name("gptq-4-reordered"))
    spoil_config(folder, lambda config: config.update(desc_act=False))
    checkpoint, scheme = opened(folder)
    assert np.array_equal(dequantized(scheme.read(checkpoint, DOWN, 128, 256)), weights[f"{DOWN}.weight"])


def test_unset_indices_mean_the_natural_order(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    weights = write_quantized(source, folder, by_name("pack-4"))
    spoil(folder, f"{DOWN}.weight_g_idx", raw_integers(np.full(256, -1), "I32"))
    checkpoint, scheme = opened(folder)
    matrix = scheme.read(checkpoint, DOWN, 128, 256)
    assert matrix.order is None
    assert np.array_equal(dequantized(matrix), weights[f"{DOWN}.weight"])


def test_base_models_may_omit_the_prefix_of_names(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    weights = write_quantized(source, folder, by_name("gptq-4-reordered"))
    save(folder, {name.removeprefix("model."): raw for name, raw in load(folder).items()}, config_of(folder))
    checkpoint, scheme = opened(folder)
    assert np.array_equal(dequantized(scheme.read(checkpoint, DOWN, 128, 256)), weights[f"{DOWN}.weight"])


def test_gpt2_keeps_its_transposed_weights_apart(tmp_path: Path) -> None:
    weight = np.random.default_rng(1).standard_normal((64, 96)).astype(np.float32)
    name = "transformer.h.0.attn.c_attn.weight"
    source = write(tmp_path / "floats", {name: weight})
    weights = write_quantized(source, tmp_path / "packed", by_name("gptq-4"))
    checkpoint, scheme = opened(tmp_path / "packed")
    assert weights[name].shape == (96, 64)
    assert np.array_equal(dequantized(scheme.read(checkpoint, name.removesuffix(".weight"), 96, 64)), weights[name])
    floats = Checkpoint(str(write_dequantized(source, tmp_path / "back", weights)))
    assert np.array_equal(floats.get(name, (64, 96)).to_f32(), weights[name].T)


def test_a_dequantized_checkpoint_holds_the_dequantized_weights(source: Path, tmp_path: Path) -> None:
    weights = write_quantized(source, tmp_path / "packed", by_name("awq"))
    floats = Checkpoint(str(write_dequantized(source, tmp_path / "back", weights)))
    assert floats.config == CONFIG
    for name, weight in weights.items():
        assert np.array_equal(floats.get(name, weight.shape).to_f32(), weight)
    rounded = Checkpoint(str(write_dequantized(source, tmp_path / "rounded", weights, "BF16")))
    assert rounded.get(f"{DOWN}.weight", (128, 256)).format == "bf16"
    assert np.allclose(rounded.get(f"{DOWN}.weight", (128, 256)).to_f32(), weights[f"{DOWN}.weight"], rtol=2**-8)


# Selection of modules


def scheme_for(section: dict[str, Any]) -> Scheme | None:
    """Return the scheme of a model with this quantization_config."""
    return scheme_of(ModelConfig({**CONFIG, "quantization_config": section}))


def format_of(section: dict[str, Any], module: str) -> QuantizedFormat | None:
    """Return the format of a module."""
    scheme = scheme_for(section)
    assert scheme is not None
    return scheme.format_of(module)


@pytest.mark.parametrize("section", [None, {}])
def test_a_model_without_a_quantization_config_is_not_quantized(section: dict[str, Any] | None) -> None:
    assert scheme_of(ModelConfig({**CONFIG, "quantization_config": section})) is None
    assert scheme_of(ModelConfig(CONFIG)) is None


def test_the_older_name_of_the_config_is_known() -> None:
    section = quantization_config(by_name("int-8"))
    assert scheme_of(ModelConfig({**CONFIG, "compression_config": section})) is not None


@every_recipe
def test_modules_that_are_not_quantized_have_no_format(recipe: Recipe, source: Path, tmp_path: Path) -> None:
    left = "model.layers.0.mlp.up_proj"
    write_quantized(source, tmp_path / "packed", recipe, floats=(left,))
    checkpoint, scheme = opened(tmp_path / "packed")
    for module in ("lm_head", "model.embed_tokens", left):
        assert scheme.format_of(module) is None
    assert scheme.format_of("model.layers.1.mlp.up_proj") is not None
    assert checkpoint.get(f"{left}.weight", (256, 128)).format == "f32"
    with pytest.raises(ValueError, match="not quantized"):
        scheme.read(checkpoint, left, 256, 128)


def test_gptq_overrides_by_module() -> None:
    section = quantization_config(by_name("gptq-4"))
    section["dynamic"] = {
        r"-:.*layers\.0\..*down_proj": {},
        r"+:.*down_proj": {"bits": 8, "group_size": 64},
        r".*up_proj": {"sym": False, "desc_act": True},
        r"layers": {"bits": 8},  # patterns match from the start
    }
    assert format_of(section, "model.layers.0.mlp.down_proj") is None
    assert format_of(section, "model.layers.1.mlp.down_proj") == QuantizedFormat(8, 64, False)
    assert format_of(section, "model.layers.1.mlp.up_proj") == QuantizedFormat(4, 32, True)
    assert format_of(section, "model.layers.1.self_attn.q_proj") == QuantizedFormat(4, 32, False)


def test_gptq_names_what_it_quantizes() -> None:
    section = quantization_config(by_name("gptq-4"))
    section["modules_in_block_to_quantize"] = [["self_attn.k_proj", "self_attn.q_proj"], ["mlp.down_proj"]]
    assert format_of(section, "model.layers.1.mlp.down_proj") is not None
    assert format_of(section, "model.layers.1.self_attn.q_proj") is not None
    assert format_of(section, "model.layers.1.mlp.up_proj") is None
    assert format_of({**section, "lm_head": True}, "lm_head") is not None
    assert format_of(section, "lm_head") is None


def test_awq_leaves_whole_parts_of_names() -> None:
    section = {**quantization_config(by_name("awq")), "modules_to_not_convert": ["self_attn", "layers.1", "mlp.gate"]}
    assert format_of(section, "model.layers.0.self_attn.q_proj") is None
    assert format_of(section, "model.layers.1.mlp.up_proj") is None
    assert format_of(section, "model.layers.11.mlp.up_proj") is not None
    assert format_of(section, "model.layers.0.mlp.gate_proj") is not None


def test_compressed_tensors_prefers_names_to_patterns_to_classes() -> None:
    section = quantization_config(by_name("pack-4"))
    group = section["config_groups"]["group_0"]
    pattern, name = copy.deepcopy(group), copy.deepcopy(group)
    pattern["targets"], pattern["weights"]["num_bits"] = [r"re:.*\.mlp\..*"], 8
    name["targets"], name["weights"]["group_size"] = [DOWN], 128
    section["config_groups"] |= {"group_1": pattern, "group_2": name}
    section["ignore"] = ["lm_head", r"re:.*layers\.0\..*", "model.layers.2.mlp.up_proj"]
    assert format_of(section, DOWN) == QuantizedFormat(4, 128, False)
    assert format_of(section, "model.layers.1.mlp.up_proj") == QuantizedFormat(8, 32, False)
    assert format_of(section, "model.layers.1.self_attn.q_proj") == QuantizedFormat(4, 32, False)
    for module in ("lm_head", "model.layers.0.mlp.up_proj", "model.layers.2.mlp.up_proj", "model.embed_tokens"):
        assert format_of(section, module) is None
    group["targets"] = ["LlamaAttention"]
    assert format_of(section, "model.layers.1.self_attn.q_proj") is None


def test_compressed_tensors_quantizes_no_embedding() -> None:
    section = quantization_config(by_name("pack-4"))
    section["config_groups"]["group_0"]["targets"] = ["Linear", "Embedding"]
    with pytest.raises(ModelError, match=r"model\.embed_tokens"):
        format_of(section, "model.embed_tokens")


def test_compressed_tensors_mixes_formats(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    weights = write_quantized(source, folder, by_name("pack-4"))
    other = write_quantized(source, tmp_path / "other", by_name("int-8"))
    save(folder, load(folder) | {n: raw for n, raw in load(tmp_path / "other").items() if DOWN in n}, config_of(folder))

    def mix(config: dict[str, Any]) -> None:
        second = quantization_config(by_name("int-8"))["config_groups"]["group_0"]
        config["config_groups"]["group_0"]["format"] = "pack-quantized"
        config["config_groups"]["group_1"] = {**second, "targets": [DOWN], "format": "int-quantized"}
        config["format"] = "mixed-precision"

    spoil_config(folder, mix)
    checkpoint, scheme = opened(folder)
    first = "model.layers.0.mlp.down_proj"
    assert np.array_equal(dequantized(scheme.read(checkpoint, DOWN, 128, 256)), other[f"{DOWN}.weight"])
    assert np.array_equal(dequantized(scheme.read(checkpoint, first, 128, 256)), weights[f"{first}.weight"])


# Rejected configs


def group_weights(config: dict[str, Any]) -> dict[str, Any]:
    """Return the weights of the first group."""
    weights: dict[str, Any] = config["config_groups"]["group_0"]["weights"]
    return weights


def update(**fields: Any) -> Callable[[dict[str, Any]], None]:
    """Set fields of quantization_config."""
    return lambda config: config.update(fields)


def update_group(**fields: Any) -> Callable[[dict[str, Any]], None]:
    """Set fields of the first group."""
    return lambda config: config["config_groups"]["group_0"].update(fields)


def update_weights(**fields: Any) -> Callable[[dict[str, Any]], None]:
    """Set fields of the first group's weights."""
    return lambda config: group_weights(config).update(fields)


def update_inputs(**fields: Any) -> Callable[[dict[str, Any]], None]:
    """Set fields of the first group's activations."""
    return lambda config: config["config_groups"]["group_0"]["input_activations"].update(fields)


REJECTIONS = [
    (
        "gptq-4",
        update(quant_method="bitsandbytes"),
        ["quant_method", "'bitsandbytes'", "gptq", "awq", "compressed-tensors"],
    ),
    ("gptq-4", update(quant_method=None), ["quant_method", "None"]),
    ("gptq-4", update(quant_method=["gptq"]), ["quant_method", "['gptq']"]),
    ("gptq-4", update(bits=3), ["bits", "3", "4, 8"]),
    ("gptq-4", update(bits="4"), ["bits", "'4'"]),
    ("gptq-4", update(bits=None), ["bits", "None"]),
    ("gptq-4", update(group_size=16), ["group_size", "16", "32, 64, 128, -1"]),
    ("gptq-4", update(group_size=None), ["group_size", "None"]),
    ("gptq-4", update(sym="yes"), ["sym", "'yes'", "bool"]),
    ("gptq-4", update(checkpoint_format="marlin"), ["checkpoint_format", "'marlin'", "gptq_v2"]),
    ("gptq-4", update(is_marlin_format=True), ["is_marlin_format"]),
    ("gptq-4", update(pack_dtype="int8"), ["pack_dtype", "'int8'", "int32"]),
    ("gptq-4", update(rotation="hadamard"), ["rotation", "'hadamard'"]),
    ("gptq-4", update(dynamic=["-:.*"]), ["dynamic", "object"]),
    ("gptq-4", update(dynamic={"+:.*up_proj": {"bits": 2}}), ["dynamic", "up_proj", "bits", "2"]),
    ("gptq-4", update(dynamic={"+:(": {}}), ["dynamic", "regular expression"]),
    ("gptq-4", update(modules_in_block_to_quantize="mlp"), ["modules_in_block_to_quantize", "'mlp'"]),
    ("gptq-4", update(modules_in_block_to_quantize=[[1]]), ["modules_in_block_to_quantize", "strings"]),
    ("awq", update(version="gemv"), ["version", "'gemv'", "gemm"]),
    ("awq", update(version="marlin"), ["version", "'marlin'", "gemm"]),
    ("awq", update(bits=8), ["bits", "8", "4"]),
    ("awq", update(group_size=256), ["group_size", "256", "128"]),
    ("awq", update(zero_point=False), ["zero_point", "False"]),
    ("awq", update(backend="llm-awq"), ["backend", "'llm-awq'"]),
    ("awq", update(dynamic={"-:.*": {}}), ["dynamic"]),
    ("awq", update(modules_to_not_convert=[1]), ["modules_to_not_convert", "strings"]),
    ("pack-4", update(format="mxfp4-quantized"), ["format", "'mxfp4-quantized'", "pack-quantized", "int-quantized"]),
    ("pack-4", update(format="nvfp4-pack-quantized"), ["format", "'nvfp4-pack-quantized'"]),
    ("pack-4", update(format="marlin-24"), ["format", "'marlin-24'"]),
    ("pack-4", update(format=None), ["format", "None"]),
    ("pack-4", update(format="mixed-precision"), ["group_0.format", "None", "pack-quantized"]),
    ("pack-4", update(quantization_status="frozen"), ["quantization_status", "'frozen'", "compressed"]),
    ("pack-4", update(kv_cache_scheme={"num_bits": 8, "type": "float"}), ["kv_cache_scheme"]),
    ("pack-4", update(transform_config={"config_groups": {"R1": {}}}), ["transform_config"]),
    ("pack-4", update(sparsity_config={"format": "sparse-24-bitmask"}), ["sparsity_config.format", "dense"]),
    ("pack-4", update(config_groups={}), ["config_groups", "targets"]),
    ("pack-4", update(config_groups={"W4A16": ["Linear"]}), ["config_groups.W4A16", "object"]),
    ("pack-4", update(ignore=["re:("]), ["re:(", "regular expression"]),
    ("pack-4", update(ignore="lm_head"), ["ignore", "list of strings"]),
    ("pack-4", update_group(targets="Linear"), ["targets", "list of strings"]),
    ("pack-4", update_group(format="dense"), ["group_0.format", "'dense'"]),
    ("pack-4", update_group(weights=None), ["weights.strategy", "None"]),
    ("pack-4", update_group(output_activations={"num_bits": 8}), ["output_activations"]),
    ("pack-4", update_weights(num_bits=2), ["weights.num_bits", "2", "4, 8"]),
    ("pack-4", update_weights(type="float"), ["weights.type", "'float'", "int"]),
    ("pack-4", update_weights(dynamic=True), ["weights.dynamic", "True"]),
    ("pack-4", update_weights(strategy="tensor"), ["weights.strategy", "'tensor'", "group", "channel"]),
    ("pack-4", update_weights(strategy="block"), ["weights.strategy", "'block'"]),
    ("pack-4", update_weights(strategy="channel"), ["group_size", "32", "'channel'"]),
    ("pack-4", update_weights(group_size=None), ["group_size", "None", "'group'"]),
    ("pack-4", update_weights(group_size=16), ["group_size", "16", "32, 64, 128"]),
    ("pack-4", update_weights(actorder="sideways"), ["actorder", "'sideways'", "weight", "group"]),
    ("pack-4", update_weights(actorder=True), ["actorder", "True"]),
    ("pack-4", update_weights(block_structure=[128, 128]), ["block_structure"]),
    ("int-8", update_inputs(dynamic=False), ["input_activations.dynamic", "False", "static"]),
    ("int-8", update_inputs(num_bits=4), ["input_activations.num_bits", "4", "8"]),
    ("int-8", update_inputs(type="float"), ["input_activations.type", "'float'"]),
]


@pytest.mark.parametrize(("name", "change", "words"), REJECTIONS)
def test_unsupported_fields_are_rejected_with_an_error_that_names_them(
    name: str, change: Callable[[dict[str, Any]], None], words: list[str]
) -> None:
    section = quantization_config(by_name(name))
    assert scheme_for(section) is not None
    change(section)
    with pytest.raises(ModelError) as caught:
        scheme_for(section)
    for word in ["config.json", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gptq-4", update(meta={"quantizer": ["gptqmodel:2.0.0"]}, static_groups=False, true_sequential=True)),
        ("gptq-4", update(checkpoint_format=None, format="gptq_v2", dynamic=None)),
        ("awq", update(version="GEMM", format="gemm", sym=True, desc_act=False)),
        ("awq", update(version=None, zero_point=None)),
        ("pack-4", update_weights(strategy=None)),
        ("pack-4", update_weights(actorder="weight")),
        ("pack-4", update_weights(actorder=False)),
        ("pack-4-channel", update_weights(group_size=-1)),
        ("pack-4", update(sparsity_config=None, ignore=None, transform_config={}, version="0.12.0")),
        ("pack-4", update(sparsity_config={"format": "dense"})),
    ],
)
def test_equivalent_configs_are_accepted(name: str, change: Callable[[dict[str, Any]], None]) -> None:
    section = quantization_config(by_name(name))
    expected = format_of(section, DOWN)
    change(section)
    assert format_of(section, DOWN) == expected


# Tensors that contradict the config


def of_words(folder: Path, method: str, weights: list[list[int]], zeros: list[list[int]]) -> Path:
    """Write a checkpoint of one matrix, given by its words in groups of 32, with scales of 1."""
    words = {name: np.array(rows, np.uint32) for name, rows in (("qweight", weights), ("qzeros", zeros))}
    tensors = {f"{DOWN}.{name}": raw_integers(rows.view(np.int32), "I32") for name, rows in words.items()}
    tensors[f"{DOWN}.scales"] = raw_floats(np.ones((1, 8), np.float32), "F16")
    section = quantization_config(Recipe("words", method, symmetric=False))
    return save(folder, tensors, {**CONFIG, "quantization_config": section})


def config_of(folder: Path) -> dict[str, Any]:
    """Return the config.json of a checkpoint."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def spoil_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the quantization_config of a checkpoint."""
    config = config_of(folder)
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


def spoil(folder: Path, name: str, raw: Raw | None) -> None:
    """Replace a tensor, or remove it."""
    tensors = load(folder)
    if raw is None:
        del tensors[name]
    else:
        tensors[name] = raw
    save(folder, tensors, config_of(folder))


@every_recipe
def test_a_bad_tensor_is_named(recipe: Recipe, source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    write_quantized(source, folder, recipe)
    good = load(folder)
    for name, raw in good.items():
        part = name.removeprefix(f"{DOWN}.")
        if part == name:
            continue
        optional = part == "weight_shape" or (part == "g_idx" and not (recipe.reorder and recipe.group > 0))
        longer = Raw(raw.dtype, (*raw.shape[:-1], 2 * raw.shape[-1]), 2 * raw.data)
        other = Raw("F64", raw.shape, bytes(8 * int(np.prod(raw.shape))))
        for bad, words in (
            (None, ["missing"]),
            (longer, [str(list(raw.shape)), str(list(longer.shape))]),
            (other, ["F64", raw.dtype]),
        ):
            if bad is None and optional:
                continue
            spoil(folder, name, bad)
            checkpoint, scheme = opened(folder)
            with pytest.raises(ModelError) as caught:
                scheme.check(checkpoint, DOWN, 128, 256)
            for word in [name, *words]:
                assert word in str(caught.value)
            with pytest.raises(ModelError, match=re.escape(name)):
                scheme.read(checkpoint, DOWN, 128, 256)
            save(folder, good, config_of(folder))


@pytest.mark.parametrize(
    ("recipe", "tensor", "raw", "words"),
    [
        ("gptq-4", "qzeros", raw_integers(np.zeros((8, 16)), "I32"), ["8", "sym"]),
        ("gptq-4-reordered", "g_idx", raw_integers(np.zeros(256), "I32"), ["groups", "64"]),
        ("gptq-4", "g_idx", raw_integers(np.arange(256), "I32"), ["groups", "32"]),
        ("gptq-4", "g_idx", raw_integers(np.arange(256) // 32 - 1, "I32"), ["groups", "32"]),
        ("gptq-4-channel", "g_idx", raw_integers(np.arange(256) // 128, "I32"), ["groups", "256"]),
        ("pack-4", "weight_shape", raw_integers(np.array([256, 128]), "I64"), ["[256, 128]", "[128, 256]"]),
        ("int-4", "weight", raw_integers(np.full((128, 256), 8), "I8"), ["-8 to 7", "4 bits"]),
        ("int-4", "weight", raw_integers(np.full((128, 256), -9), "I8"), ["-8 to 7", "4 bits"]),
    ],
)
def test_values_that_contradict_the_config_are_rejected(
    recipe: str, tensor: str, raw: Raw, words: list[str], source: Path, tmp_path: Path
) -> None:
    write_quantized(source, tmp_path / "packed", by_name(recipe))
    spoil(tmp_path / "packed", f"{DOWN}.{tensor}", raw)
    checkpoint, scheme = opened(tmp_path / "packed")
    with pytest.raises(ModelError) as caught:
        scheme.read(checkpoint, DOWN, 128, 256)
    for word in [f"{DOWN}.{tensor}", *words]:
        assert word in str(caught.value)


def test_awq_needs_a_multiple_of_eight_outputs(source: Path, tmp_path: Path) -> None:
    write_quantized(source, tmp_path / "packed", by_name("awq"))
    checkpoint, scheme = opened(tmp_path / "packed")
    with pytest.raises(ModelError, match="127 outputs"):
        scheme.check(checkpoint, DOWN, 127, 256)


# Integer tensors of a checkpoint


def test_integer_tensors_are_not_float_tensors(tmp_path: Path) -> None:
    kinds = {"I64": "int64", "I32": "int32", "I8": "int8", "U8": "uint8"}

    def values(dtype: str) -> np.ndarray:
        return np.array([[5 if dtype == "U8" else -5, 0, 7]])

    tensors = {dtype: raw_integers(values(dtype), dtype) for dtype in kinds}
    tensors["floats"] = raw_floats(np.ones((1, 3), np.float32), "F16")
    tensors["others"] = Raw("BOOL", (1, 3), b"\0\1\0")
    checkpoint = Checkpoint(str(save(tmp_path / "model", tensors, CONFIG)))
    assert checkpoint.formats == {"f16"}
    for dtype, name in kinds.items():
        read = checkpoint.get_integers(dtype, (1, 3), dtype).to_numpy()
        assert read.dtype == np.dtype(name)
        assert read.tolist() == values(dtype).tolist()
        with pytest.raises(ModelError, match=f"tensor {dtype} is of type {dtype}; supported are BF16, F16, F32"):
            checkpoint.get(dtype, (1, 3))
        with pytest.raises(ModelError, match=r"has shape \[1, 3\], but config.json asks for \[3, 1\]"):
            checkpoint.get_integers(dtype, (3, 1), dtype)
    with pytest.raises(ModelError, match="tensor floats is of type F16; supported are I32"):
        checkpoint.get_integers("floats", (1, 3), "I32")
    with pytest.raises(ModelError, match="tensor others is of type BOOL; supported are I32"):
        checkpoint.get_integers("others", (1, 3), "I32")
    with pytest.raises(ModelError, match=r"tensor none of shape \[1\] is missing \(i32\)"):
        checkpoint.get_integers("none", (1,), "I32")
    assert checkpoint.has("others")
    assert not checkpoint.has("none")


def test_integer_tensors_may_be_unaligned(tmp_path: Path) -> None:
    tensors = {"a": raw_integers(np.zeros(3), "U8"), "b": raw_integers(np.arange(5), "I32")}
    checkpoint = Checkpoint(str(save(tmp_path / "model", tensors, CONFIG)))
    tensor = checkpoint.get_integers("b", (5,), "I32")
    assert tensor.data.ctypes.data % 4
    assert tensor.to_numpy().tolist() == [0, 1, 2, 3, 4]
