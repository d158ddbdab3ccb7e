"""Float checkpoints saved as compressed-tensors: what is quantized and how well, and that the model is the same one."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from quire.kernels._native import SamplingConfig
from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.options import LoadOptions
from quire.kernels.quantize import SaveRequest, quantize
from quire.kernels.runner import load_model
from quire.kernels.saving.compressed_folder import SavedModule, pack, section_of
from quire.kernels.saving.feedback import Feedback, fit_with_feedback
from quire.kernels.saving.fit import Fitted, Floats, fit
from quire.kernels.step import StepInput
from quire.kernels.trial import TrialTokens
from quire.kernels.weights import quantization
from quire.kernels.weights.gguf_checkpoint import open_checkpoint
from quire.kernels.weights.quantized import scheme_of


def dequantized(fitted: Fitted, group: int) -> Floats:
    zeros: Floats = np.repeat(fitted.zeros, group, axis=1).astype(np.float32)
    values: Floats = (fitted.values - zeros) * np.repeat(fitted.scales, group, axis=1)
    return values


def test_weights_on_a_grid_are_found_again() -> None:
    random = np.random.default_rng(0)
    values = random.integers(0, 16, (64, 96))
    values[:, 0::32], values[:, 1::32] = 0, 15
    zeros, scales = random.integers(0, 16, (64, 3)), 2.0 ** random.integers(-9, -3, (64, 3))
    weights = ((values - np.repeat(zeros, 32, 1)) * np.repeat(scales, 32, 1)).astype(np.float32)
    found = fit(weights, None, 4, 32)
    assert (found.values == values).all()
    assert (found.scales == scales).all()
    assert (found.zeros == zeros).all()


def test_four_bits_lose_less_than_rounding_and_less_where_it_counts() -> None:
    random = np.random.default_rng(1)
    weights = random.standard_normal((128, 256)).astype(np.float32)
    importance = np.exp(2 * random.standard_normal(256)).astype(np.float32)
    low, high = (getattr(weights.reshape(128, 8, 32), name)(axis=-1, keepdims=True) for name in ("min", "max"))
    scales = (high - low) / 15
    rounded = np.rint((weights.reshape(128, 8, 32) - low) / scales) * scales + low
    plain = dequantized(fit(weights, None, 4, 32), 32)
    weighted = dequantized(fit(weights, importance, 4, 32), 32)

    def error(values: Floats, counts: Floats) -> float:
        return float((np.square(values - weights) * counts).sum())

    alike = np.ones(256, np.float32)
    assert error(plain, alike) < error(rounded.reshape(128, 256), alike)
    assert error(weighted, importance) < 0.8 * error(plain, importance)


def test_eight_bits_and_groups_of_zeros() -> None:
    weights = np.random.default_rng(2).standard_normal((48, 128)).astype(np.float32)
    weights[:, 32:64] = 0
    weights[3, 64:96] = 1e-38
    for bits, most in ((8, 0.006), (4, 0.09)):
        found = fit(weights, None, bits, 32)
        assert np.sqrt(np.square(dequantized(found, 32) - weights).mean()) < most
        assert (dequantized(found, 32)[:, 32:64] == 0).all()
        assert np.isfinite(found.scales).all()
        assert (found.scales > 0).all()
    assert (fit(weights, None, 8, 32).zeros == 128).all()


def test_feedback_makes_products_of_correlated_inputs_better() -> None:
    generator = np.random.default_rng(11)
    weights = generator.standard_normal((48, 128)).astype(np.float32)
    inputs = (generator.standard_normal((512, 20)) @ generator.standard_normal((20, 128))).astype(np.float32)
    inputs += 0.1 * generator.standard_normal(inputs.shape).astype(np.float32)
    feedback = Feedback.of(inputs)
    assert feedback is not None

    def error(fitted: Fitted) -> float:
        return float(np.linalg.norm(inputs @ (dequantized(fitted, 32) - weights).T))

    found = fit_with_feedback(weights, feedback, 4, 32)
    assert error(found) < 0.5 * error(fit(weights, np.square(inputs).mean(axis=0), 4, 32))
    again = fit_with_feedback(weights[5:20], feedback, 4, 32)
    np.testing.assert_allclose(dequantized(again, 32), dequantized(found, 32)[5:20], atol=0.3)  # rows have no ties


def test_feedback_of_inputs_that_do_not_correlate_is_none() -> None:
    weights = np.random.default_rng(12).standard_normal((16, 64)).astype(np.float32)
    feedback = Feedback.of(np.diag(np.arange(1, 65, dtype=np.float32)))
    assert feedback is not None
    assert (feedback.factors == np.eye(64)).all()
    found, plain = fit_with_feedback(weights, feedback, 4, 32), fit(weights, feedback.importance, 4, 32)
    assert (found.values == plain.values).all()
    assert (found.scales == plain.scales).all()
    assert (found.zeros == plain.zeros).all()


def test_inputs_that_have_no_feedback() -> None:
    assert Feedback.of(np.full((2, 32), 1e30, np.float32)) is None
    zero = Feedback.of(np.zeros((2, 32), np.float32))
    assert zero is not None
    assert (zero.importance == 1).all()


def test_words_hold_the_first_value_in_their_lowest_bits() -> None:
    values = np.arange(1, 11, dtype=np.uint8)[None]
    assert pack(values, 4).view(np.uint32).tolist() == [[0x87654321, 0x000000A9]]
    assert pack(values[:, :4], 8).view(np.uint32).tolist() == [[0x04030201]]


def losses(folder: Path) -> list[float]:
    """Return the log probabilities of a prompt's tokens."""
    model = load_model(LoadOptions(str(folder), dtype="bfloat16", num_pages=8))
    prompt = TrialTokens.arbitrary(min(500, model.vocab_size), 96).places.tolist()
    slot = model.sequences.open(prompt, 96, sampling=SamplingConfig(temperature=0.0, prompt_logprobs=0))
    assert model.sequences.reserve(slot, 97)
    return [entry[1][0] for entry in model.run(StepInput([slot], [0], [96])).prompt_logprobs[0]]


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *(
            (name, "int8")
            for name in (
                "phi3-long",
                "gemma3-window100",
                "gemma4-shared-window100",
                "gemma3n-window100",
                "mixtral-window100",
                "deepseek2-groups-yarn",
            )
        ),
        *((name, "int4") for name in ("llama-biases-linear", "qwen2-moe-shared-window")),
    ],
)
def test_saved_model_is_the_same_one(name: str, mode: str, checkpoints: Path, tmp_path: Path) -> None:
    """Each layer is as good as its bits; random models of a few layers show them more than others do."""
    source, target = checkpoints / name, tmp_path / "saved"
    found = quantize(SaveRequest(str(source), str(target), mode))
    check_layers(source, target, found["modules"], {"int8": 0.012, "int4": 0.12}[mode])
    exact = losses(source)
    difference = np.sqrt(np.square(np.subtract(losses(target), exact)).mean()) / np.std(exact)
    assert 0 < difference < {"int8": 0.3, "int4": 0.6}[mode]
    assert {path.name for path in tmp_path.iterdir()} == {"saved"}


def test_layers_that_a_mode_leaves_alone_are_saved_quantized(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization, "_LAYER_WEIGHTS", 0)
    found = quantize(SaveRequest(str(checkpoints / "qwen3-tied"), str(tmp_path / "saved"), "int8"))
    layers = sum(name.endswith("o_proj.weight") for name in open_checkpoint(str(checkpoints / "qwen3-tied")).tensors)
    assert found["modules"] == 7 * layers  # q, k, v, o, gate, up, down


@pytest.mark.parametrize(("name", "words"), [("gpt2-tied", "transposed"), ("gpt-oss-window100", "stacked")])
def test_layers_that_the_format_has_not(name: str, words: str, checkpoints: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        quantize(SaveRequest(str(checkpoints / name), str(tmp_path / "saved"), "int8"))
    assert not [*tmp_path.iterdir()]


def check_layers(source: Path, target: Path, count: int, most: float) -> None:
    before, after = open_checkpoint(str(source)), open_checkpoint(str(target))
    scheme = scheme_of(ModelConfig(after.config))
    assert scheme is not None
    packed = [name.removesuffix("_packed") for name in after.tensors if name.endswith(".weight_packed")]
    assert len(packed) == count
    for name in packed:
        weights = before.tensors[name].to_f32()
        read = scheme.read(after, name.removesuffix(".weight"), *weights.shape)
        zeros = np.full(read.scales.shape, 128, np.uint8) if read.zeros is None else read.zeros
        difference = dequantized(Fitted(np.ascontiguousarray(read.values), read.scales, zeros), 32) - weights
        assert np.sqrt(np.square(difference).mean() / np.square(weights).mean()) < most, name
    for name, tensor in after.tensors.items():
        if ".weight_" not in name:
            assert (tensor.data == before.tensors[name].data).all()
    assert {name for name in before.tensors if name not in packed} <= set(after.tensors)


def ignored(tmp_path: Path, names: list[str], architecture: str) -> list[str]:
    """Return what a saved checkpoint of matrices leaves alone, of which the first is quantized."""
    arrays = {name: np.zeros((32, 32), np.float32) for name in names}
    save_file(arrays, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    checkpoint = open_checkpoint(str(tmp_path))
    module = SavedModule(checkpoint.tensors[names[0]], 8)
    found: list[str] = section_of(checkpoint, {names[0]: module})["ignore"]
    return found


def test_layers_that_are_left_alone_have_the_names_that_others_give_them(tmp_path: Path) -> None:
    plain = ["model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate.weight"]
    assert ignored(tmp_path, plain, "X") == ["lm_head", "model.layers.0.mlp.gate"]
    masked = ignored(tmp_path, ["bert.layer.0.dense.weight"], "BertForMaskedLM")
    assert masked == ["lm_head", "re:.*decoder$"]
    parts = [f"language_model.{plain[0]}", "language_model.model.layers.1.mlp.up_proj.weight", "vision_tower.fc.weight"]
    patterns = ignored(tmp_path, parts, "Gemma3ForConditionalGeneration")[1:]
    for name in ("model.language_model.layers.1.mlp.up_proj", "model.vision_tower.fc"):
        assert any(re.match(pattern.removeprefix("re:"), name) for pattern in patterns)
    assert not any(
        re.match(pattern.removeprefix("re:"), "model.language_model.layers.0.mlp.up_proj") for pattern in patterns
    )


def test_modules_of_sentence_transformers_come_along(tmp_path: Path, demo_model: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(demo_model, source)
    (source / "modules.json").write_text('[{"path": ""}, {"path": "pooling"}]')
    (source / "pooling").mkdir()
    (source / "pooling" / "config.json").write_text("{}")
    (source / "other").mkdir()
    quantize(SaveRequest(str(source), str(tmp_path / "saved"), "int8"))
    assert (tmp_path / "saved" / "pooling" / "config.json").read_text() == "{}"
    assert not (tmp_path / "saved" / "other").exists()
