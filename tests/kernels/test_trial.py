"""The importance of inputs, measured by a trial run: what it is, its bits, and that every kind of model has one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from quire.kernels._native import MatrixBuffer, SamplingConfig
from quire.kernels.devices.instruction_sets import available_isas
from quire.kernels.emit.embedding import EmbeddingKernel
from quire.kernels.emit.experts import ExpertGemmKernel
from quire.kernels.emit.gemm import GemmKernel
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import Embedding
from quire.kernels.operands import Matrix
from quire.kernels.options import LoadOptions
from quire.kernels.runner import describe, load_model
from quire.kernels.step import StepInput
from quire.kernels.trial import NUM_TOKENS, TrialRun, TrialTokens
from quire.kernels.weights import quantization
from quire.kernels.weights.gguf_checkpoint import open_checkpoint
from quire.kernels.weights.loader import Importance, Loader


def measure(folder: Path, **options: Any) -> Importance:
    return TrialRun(LoadOptions(str(folder), **options), open_checkpoint(str(folder))).run()


def test_importance_is_the_mean_square_of_inputs(demo_model: Path) -> None:
    """The inputs of the first layer are the normed embeddings of the trial's tokens."""
    checkpoint = open_checkpoint(str(demo_model))
    embedding = checkpoint.get("model.embed_tokens.weight", (2048, 256)).to_f32()
    tokens = TrialTokens.arbitrary(2048, NUM_TOKENS)
    rows = np.concatenate([np.arange(first, first + 16) for first in tokens.rows])
    passages = [[1, 2047, 2, 3, 1], [*range(1000, 1300)]]
    for passages_given, token_ids in (
        ((), rows[tokens.places]),
        (passages, np.array(passages[0] + passages[1][:NUM_TOKENS])),
    ):
        hidden = embedding[token_ids].astype(np.float64)
        norm = checkpoint.get("model.layers.0.input_layernorm.weight", (256,)).to_f32()
        inputs = hidden / np.sqrt((hidden**2).mean(axis=1, keepdims=True) + 1e-6) * norm
        found = TrialRun(LoadOptions(str(demo_model)), checkpoint, passages=passages_given).run()
        key = "model.layers.0.self_attn.v_proj.weight", 0
        np.testing.assert_allclose(found[key], (inputs**2).mean(axis=0), rtol=0.01)


def test_passages_do_not_see_each_other(demo_model: Path) -> None:
    """The inputs of later layers are those of each passage alone."""
    checkpoint, passages = open_checkpoint(str(demo_model)), [[*range(100, 150)], [*range(900, 1000)]]

    def inputs(*passages: list[int]) -> list[npt.NDArray[np.float32]]:
        trial = TrialRun(LoadOptions(str(demo_model)), checkpoint, passages=passages)
        return [found.copy() for _, found in trial.inputs()]

    together, first, second = inputs(*passages), inputs(passages[0]), inputs(passages[1])
    for found, *alone in zip(together[:-1], first[:-1], second[:-1], strict=True):
        assert (found == np.concatenate(alone)).all()


def test_tokens_outside_the_vocabulary(demo_model: Path) -> None:
    for token in (-1, 2048):
        with pytest.raises(ModelError, match="outside the model's vocabulary of 2048"):
            TrialRun(LoadOptions(str(demo_model)), open_checkpoint(str(demo_model)), passages=[[5, token]]).run()


@pytest.mark.parametrize("vocab_size", [16, 503, 1024, 1025, 2048, 151936])
def test_tokens_come_from_the_vocabulary(vocab_size: int) -> None:
    tokens = TrialTokens.arbitrary(vocab_size, NUM_TOKENS)
    rows, places = tokens.rows, tokens.places
    assert rows[0] == 0
    assert all(first >= before + 16 or vocab_size < 2048 for before, first in itertools.pairwise(rows))
    assert rows[-1] < vocab_size <= rows[-1] + 16
    assert len({*map(int, places)}) >= min(vocab_size, NUM_TOKENS) // 2
    assert places.min() >= 0
    assert places.max() < min(vocab_size, 1024)


def check_same(found: Importance, expected: Importance) -> None:
    assert found.keys() == expected.keys()
    assert all((values == expected[key]).all() for key, values in found.items())


def test_same_bits_on_all_hosts(demo_model: Path) -> None:
    expected = measure(demo_model, threads=1)
    for isa in available_isas():
        check_same(measure(demo_model, threads=2, isa=isa), expected)


def test_same_bits_of_experts(checkpoints: Path) -> None:
    expected = measure(checkpoints / "qwen2-moe-shared-window", threads=1)
    for isa in available_isas():
        check_same(measure(checkpoints / "qwen2-moe-shared-window", threads=2, isa=isa), expected)


@pytest.mark.parametrize("name", ["qwen2-moe-shared-window", "deepseek3-experts-yarn"])
def test_matrices_in_one_place_do_not_disturb_each_other(
    name: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Widths that are no multiple of a block leave padding, which must not be that of the matrix before."""
    expected = measure(checkpoints / name)
    original = Loader.pack

    def pack(loader: Loader, matrix: Matrix, buffer: MatrixBuffer) -> None:
        loader.addresses[matrix] = loader.device.allocate(matrix.bytes(loader.dtypes))
        original(loader, matrix, buffer)

    monkeypatch.setattr(Loader, "pack", pack)
    check_same(measure(checkpoints / name), expected)


def losses(folder: Path, **options: Any) -> list[float]:
    """Return the log probabilities of a prompt's tokens."""
    model = load_model(LoadOptions(str(folder), dtype="bfloat16", num_pages=8, **options))
    prompt = TrialTokens.arbitrary(1024, 96).places.tolist()
    slot = model.sequences.open(prompt, 96, sampling=SamplingConfig(temperature=0.0, prompt_logprobs=0))
    assert model.sequences.reserve(slot, 97)
    return [entry[1][0] for entry in model.run(StepInput([slot], [0], [96])).prompt_logprobs[0]]


@pytest.mark.parametrize(("mode", "most"), [("int8", 0.2), ("int4", 0.6)])
def test_modes_of_large_models(mode: str, most: float, demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of the demo model too if no model is small: close to bf16, with the same bits on all hosts."""
    exact, small = losses(demo_model), losses(demo_model, quantization=mode)
    monkeypatch.setattr(quantization, "SMALL_WIDTH", 0)
    found = losses(demo_model, quantization=mode)
    assert 0 < np.sqrt(np.square(np.subtract(small, exact)).mean()) < most
    assert 0 < np.sqrt(np.square(np.subtract(found, exact)).mean()) < most
    assert found != small
    for isa in available_isas():
        assert losses(demo_model, quantization=mode, isa=isa, threads=1) == found


def test_formats_by_place_and_shape() -> None:
    int8, int4 = quantization.MODES["int8"], quantization.MODES["int4"]
    places: tuple[quantization.Place, ...] = ("body", "attention_output", "feed_forward_output", "head")

    def formats(mode: quantization.Mode, width: int, vocab_size: int) -> list[tuple[int, int] | None]:
        """Return bits and groups of layers with 4096 inputs, by place."""
        found = [mode.of_shape(Embedding("embedding", vocab_size, width), 10).format_of(4096, at) for at in places]
        return [None if form is None else (form.bits, form.group) for form in found]

    assert formats(int4, 1024, 500000) == [(4, 32), (4, 32), (5, 32), (6, 32)]
    assert formats(int4, 576, 69119) == [(5, 32), (5, 32), (5, 32), (6, 32)]
    assert formats(int4, 576, 69120) == [(6, 32)] * 4
    assert formats(int8, 2048, 500000) == [(8, 128), (8, 128), (8, 128), (8, 32)]
    assert formats(int8, 576, 69119) == [(8, 32)] * 4
    assert formats(int8, 576, 69120) == [(8, 32), None, (8, 32), (8, 32)]
    divided = [int8.format_of(k, "body") for k in (2048, 576, 96, 100)]
    assert [form and form.group for form in divided] == [128, 64, 32, 32]


@pytest.mark.parametrize("name", ["qwen3-tied", "mistral-window77"])
def test_outputs_of_feed_forward_layers_are_finer_in_the_first_half(
    name: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the layers that add to the hidden states, attention's come first."""
    monkeypatch.setattr(quantization, "SMALL_WIDTH", 0)
    plan, _ = describe(LoadOptions(str(checkpoints / name), quantization="int4"))
    bits = [
        launch.kernel.quantized.bits
        for launch in plan.launches
        if isinstance(launch.kernel, GemmKernel) and launch.kernel.quantized and launch.kernel.epilogue == "add"
    ]
    assert bits == [4, 5] * (plan.layers // 2) + [4, 4] * (plan.layers - plan.layers // 2)


def test_outputs_of_experts_are_finer_in_the_first_half(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "SMALL_WIDTH", 0)
    plan, _ = describe(LoadOptions(str(checkpoints / "mixtral-window100"), quantization="int4"))
    experts = [launch.kernel for launch in plan.launches if isinstance(launch.kernel, ExpertGemmKernel)]
    bits = [kernel.quantized.bits for kernel in experts if kernel.quantized]
    assert bits == [4, 5] * (plan.layers // 2) + [4, 4] * (plan.layers - plan.layers // 2)


@pytest.mark.parametrize(("mode", "bits"), [("int8", 8), ("int4", 4)])
def test_untied_embeddings_are_quantized(
    mode: str, bits: int, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization, "SMALL_WIDTH", 0)
    plan, _ = describe(LoadOptions(str(checkpoints / "gpt2-untied"), quantization=mode))
    (form,) = [launch.kernel.quantized for launch in plan.launches if isinstance(launch.kernel, EmbeddingKernel)]
    assert form is not None
    assert form.bits == bits


@pytest.mark.parametrize(
    "name",
    ["gpt2-untied", "gemma3-window100", "qwen2-moe-shared-window", "gpt-oss-window100", "deepseek3-experts-yarn",
     "gemma4-shared-window100", "gemma4-experts", "gemma3n-window100", "gemma3n-two-streams"],
)  # fmt: skip
def test_all_quantized_layers_are_measured(name: str, checkpoints: Path) -> None:
    importance = measure(checkpoints / name)
    plan, _ = describe(LoadOptions(str(checkpoints / name), quantization="int4"))
    products = [launch for launch in plan.launches if isinstance(launch.kernel, GemmKernel | ExpertGemmKernel)]
    matrices = [operand for launch in products for operand in launch.operands if isinstance(operand, Matrix)]
    parts = [part for matrix in matrices if matrix.quantized for part in matrix.parts]
    assert parts
    for part in parts:
        values = importance[part.tensor, part.first_k]
        assert values.shape == (part.k,)
        assert np.isfinite(values).all()
        assert values.max() > 0


def test_int8_leaves_outputs_of_attention_in_the_first_half_as_they_are(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it does in small models whose vocabulary has about as many weights as their layers, or more."""
    monkeypatch.setattr(quantization, "_LAYER_WEIGHTS", 0)
    plan, _ = describe(LoadOptions(str(checkpoints / "qwen3-tied"), quantization="int8"))
    outputs = [
        launch.kernel.quantized is not None
        for launch in plan.launches
        if isinstance(launch.kernel, GemmKernel) and launch.kernel.epilogue == "add"
    ]
    half = plan.layers // 2
    assert outputs == [False, True] * half + [True, True] * (plan.layers - half)
