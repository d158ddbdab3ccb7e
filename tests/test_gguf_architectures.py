"""GGUF files of each architecture give the bits of the folder that they were made of, by llama.cpp's rules.

What the format loses (windows, the scale of attention scores, which layers have no rotary embedding) the folders do not
have either.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pooled_checkpoints
import pytest
from checkpoints import DEEPSEEK_ROPE
from gguf_conversion import CONVERSIONS
from gguf_files import write_gguf
from quantized_checkpoints import Raw, load, raw_floats, save

from quire.frontend import PoolingParams, SamplingParams
from quire.kernels.gguf.architectures import ARCHITECTURES

if TYPE_CHECKING:
    from conftest import EngineFactory

    from quire.frontend import LLM

PROMPTS = [list(range(3, 40)), [5, 6, 7], list(range(300, 90, -1))]
GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=3, prompt_logprobs=1, ignore_eos=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """A checkpoint of `checkpoints.py`, with changed fields of config.json, and those of its layers that it repeats."""

    checkpoint: str
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    layers: tuple[int, ...] = ()
    id: str = ""


def _longrope(frequencies: int) -> dict[str, Any]:
    factors = {
        "short_factor": [1 + i / 32 for i in range(frequencies)],
        "long_factor": [2 + i / 16 for i in range(frequencies)],
    }
    return {"rope_type": "longrope", "rope_theta": 10000.0, **factors}


_FULL = ["full_attention"]
CASES = (
    Case("apertus-xielu", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    Case("cohere2-window77"),
    Case("deepseek2-dense"),
    Case("deepseek2-dense-yarn", {"rope_parameters": {**DEEPSEEK_ROPE, "mscale": 1.1}}),
    Case("deepseek2-experts"),
    Case("deepseek2-groups-yarn", {"rope_parameters": {**DEEPSEEK_ROPE, "mscale": 1.1}}),
    Case("deepseek3-experts-yarn", {"rope_parameters": {**DEEPSEEK_ROPE, "mscale": 1.1}}),
    Case("deepseek3-plain-weights"),
    Case("ernie4-5-biases"),
    Case("ernie4-5-moe-shared", {"moe_norm_min": 1e-12, "moe_layer_end_index": -1}, layers=(0, 1, 2)),
    Case("exaone4-window77"),
    Case("exaone4-window77", {"sliding_window": None}, id="exaone4-full"),
    Case("falcon-h1-norm"),
    Case("gemma2-window77", {"query_pre_attn_scalar": 128}),
    Case("gemma3-window100", {"query_pre_attn_scalar": 256},
         {"ARCH.attention.sliding_window_pattern": [True, True, False, True]}),
    Case("gemma3-window100", {"query_pre_attn_scalar": 256, "layer_types": None, "sliding_window_pattern": 6},
         layers=(0, 1, 2, 3, 0, 1, 2), id="gemma3-period"),
    Case("gemma3n-window100"),
    Case("gemma3n-window100", metadata={"ARCH.attention.shared_kv_layers": 3.0}, id="gemma3n-float-layers"),
    Case("gemma4-shared-window100"),
    Case("gemma4-keys-as-values"),
    Case("gemma4-experts"),
    Case("glm4-interleaved"),
    Case("glm4-moe-groups", {"num_nextn_predict_layers": 0}),
    Case("glm4-moe-lite", {"first_k_dense_replace": 1}),
    Case("gpt2-tied"),
    Case("gpt2-untied"),
    Case("granite-multipliers"),
    Case("granite-multipliers", metadata={
        "ARCH.attention.head_count_kv": [2, 2], "ARCH.expert_shared_feed_forward_length": 352,
        "ARCH.ssm.conv_kernel": 4, "ARCH.ssm.inner_size": 512, "ARCH.expert_used_count": 0,
        "ARCH.rope.scaling.finetuned": True,
    }, id="granite4-without-state"),
    Case("granite4-dense-rope", metadata={"ARCH.rope.scaling.finetuned": True}),
    Case("granite4-experts"),
    Case("lfm2-biases"),
    Case("lfm2-moe", {"routed_scaling_factor": 1.0}),
    Case("lfm2-tied"),
    Case("hunyuan-alpha", {"rope_parameters": {"rope_type": "default", "rope_theta": 3e5}}),
    Case("llama-biases-linear"),
    Case("llama-gqa8-dynamic", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    Case("minimax-m2-partial-rotary"),
    Case("ministral3-growing-queries"),
    Case("mistral-window128", {"sliding_window": None}),
    Case("mistral-window77", metadata={"ARCH.attention.sliding_window": 77}),
    Case("gpt-oss-window100", {"swiglu_limit": 7.0}),
    Case("mixtral-window100", {"sliding_window": None}),
    Case("nemotron-h-experts", {"layers_block_type": ["mamba", "moe", "attention", "moe", "mamba", "moe"]},
         layers=(0, 1, 2, 1, 4, 1)),
    Case("nemotron-h-experts", {"layers_block_type": ["mamba", "mlp", "attention", "mlp"], "n_routed_experts": None,
                                "num_experts_per_tok": None},
         layers=(0, 3, 2, 5), id="nemotron-h-dense"),
    Case("nemotron-h-latent-experts"),
    Case("olmo2-joint-norms"),
    Case("olmo3-window100"),
    Case("olmoe"),
    Case("phi3-window90-short", {"partial_rotary_factor": 0.75, "rope_parameters": _longrope(24)}),
    Case("phi3-long", {"rope_parameters": _longrope(40), "original_max_position_embeddings": 64}),
    Case("qwen2-tied-window", {"use_sliding_window": False}),
    Case("qwen2-yarn"),
    Case("qwen2-moe-shared-window", {"use_sliding_window": False, "decoder_sparse_step": 1}, layers=(1, 1, 1, 1)),
    Case("qwen3-next-experts", {"decoder_sparse_step": 1}, layers=(1, 1, 1, 3)),
    Case("qwen3.5-tied"),
    Case("qwen3-moe", {"mlp_only_layers": []}, layers=(0, 0, 0)),
    Case("qwen3-biases-window", {"use_sliding_window": False}),
    Case("qwen3-tied"),
    Case("seed-oss-biases"),
    Case("smollm3-window100", {"no_rope_layers": None, "layer_types": None, "use_sliding_window": False},
         layers=(0, 1, 2, 0, 1)),
    Case("starcoder2-window77", {"sliding_window": None}),
)  # fmt: skip


def answers(llm: LLM) -> list[tuple[Any, ...]]:
    """Return tokens and log probabilities of prompts and greedy answers, to the last bit."""
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [(o.prompt_token_ids, o.prompt_logprobs, o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


def changed(source: Path, target: Path, case: Case) -> Path:
    """Write a checkpoint with other fields, and with those of its layers that the case names."""
    config = json.loads((source / "config.json").read_text()) | case.changes
    tensors = load(source)
    if case.layers:
        config["num_hidden_layers"] = len(case.layers)
        given, tensors = tensors, {name: raw for name, raw in tensors.items() if ".layers." not in name}
        for layer, of in enumerate(case.layers):
            for name, raw in given.items():
                start, found, end = name.partition(f".layers.{of}.")
                if found:
                    tensors[f"{start}.layers.{layer}.{end}"] = Raw(raw.dtype, raw.shape, raw.data)
    save(target, tensors, config)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).symlink_to(source / name)
    return target


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id or case.checkpoint)
def test_a_float_file_gives_the_bits_of_the_folder(
    case: Case, checkpoints: Path, tmp_path: Path, engine: EngineFactory
) -> None:
    folder, file = changed(checkpoints / case.checkpoint, tmp_path / "folder", case), tmp_path / "model.gguf"
    write_gguf(folder, file, metadata=case.metadata)
    assert answers(engine(file)) == answers(engine(folder, dtype="float32"))


REORDERED = (Case("falcon-h1-multipliers"), Case("qwen3.5-grouped"), Case("qwen3.5-moe"))
"""Models whose sums the conversion reorders, or whose factors."""


@pytest.mark.parametrize("case", REORDERED, ids=lambda case: case.checkpoint)
def test_a_float_file_that_is_summed_in_another_order_gives_the_tokens_of_the_folder(
    case: Case, checkpoints: Path, tmp_path: Path, engine: EngineFactory
) -> None:
    write_gguf(checkpoints / case.checkpoint, tmp_path / "model.gguf")
    expected = answers(engine(checkpoints / case.checkpoint, dtype="float32"))
    check_alike(answers(engine(tmp_path / "model.gguf")), expected, 1e-4)


def test_a_file_with_the_joint_projections_of_key_heads(
    checkpoints: Path, tmp_path: Path, engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first files of Qwen3-Next have them as one tensor, as the model has, and no list of layers with a state."""
    source = changed(
        checkpoints / "qwen3-next-experts", tmp_path / "folder",
        Case("", {"decoder_sparse_step": 1}, layers=(1, 1, 1, 3)),
    )  # fmt: skip
    conversion = CONVERSIONS["Qwen3NextForCausalLM"]

    def joint(config: dict[str, Any], name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        is_joint = name.endswith(".in_proj_qkvz.weight")
        return iter([(name, values)]) if is_joint else conversion.change(config, name, values)

    before = dataclasses.replace(
        conversion, change=joint, keys=lambda config: conversion.keys(config) | {"attention.recurrent_layers": None}
    )
    monkeypatch.setitem(CONVERSIONS, "Qwen3NextForCausalLM", before)
    write_gguf(source, tmp_path / "model.gguf")
    assert answers(engine(tmp_path / "model.gguf")) == answers(engine(source, dtype="float32"))


QUANTIZED = (
    "falcon-h1-norm", "gemma3n-window100", "granite4-experts", "lfm2-moe", "qwen3.5-grouped", "qwen3.5-moe",
)  # fmt: skip


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_files_are_near_their_float_twins(
    name: str, checkpoints: Path, tmp_path: Path, engine: EngineFactory
) -> None:
    """Rates and convolutions are floats in all of them; activations are rounded to 8 bits, which random models feel.

    Of Gemma 3n the converter quantizes also what is small.
    """
    file, twin = tmp_path / "model.gguf", tmp_path / "twin.gguf"
    write_gguf(checkpoints / name, file, "Q8_0")
    write_gguf(checkpoints / name, twin, "Q8_0", dequantized=True)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)

    def logprobs(model: Path) -> np.ndarray:
        output = engine(model, dtype="float32").generate(PROMPTS[:1], params, use_tqdm=False)[0]
        assert output.prompt_logprobs is not None
        return np.array([next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:] if entry])

    expected = logprobs(twin)
    difference = logprobs(file) - expected
    assert 0 < np.sqrt(np.mean(difference**2)) < 0.12 * expected.std(), "int8 of safetensors is as near"


def test_a_layer_for_multi_token_prediction_changes_no_answer(
    checkpoints: Path, tmp_path: Path, engine: EngineFactory
) -> None:
    source, folder, file = checkpoints / "glm4-moe-groups", tmp_path / "folder", tmp_path / "model.gguf"
    tensors, at, hidden = load(source), "model.layers.3", 256
    tensors |= {name.replace("model.layers.2", at): raw for name, raw in tensors.items() if "model.layers.2." in name}
    tensors |= {f"{at}.{name}.weight": raw_floats(np.ones(hidden, np.float32), "F32") for name in ("enorm", "hnorm")}
    tensors[f"{at}.eh_proj.weight"] = raw_floats(np.ones((hidden, 2 * hidden), np.float32), "F32")
    save(folder, tensors, json.loads((source / "config.json").read_text()) | {"num_nextn_predict_layers": 1})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to(source / name)
    assert f"{at}.eh_proj.weight" in write_gguf(folder, file)
    expected = answers(engine(source, dtype="float32"))
    assert answers(engine(folder, dtype="float32")) == expected
    assert answers(engine(file)) == expected


def test_layers_from_latents_are_dequantized(checkpoints: Path, tmp_path: Path, engine: EngineFactory) -> None:
    """Files have their part for keys transposed, with blocks along a head; files from before had one tensor."""
    source, file, twin = checkpoints / "deepseek2-dense", tmp_path / "model.gguf", tmp_path / "twin.gguf"
    keys = set(write_gguf(source, file, lambda name: "Q8_0" if "kv_b_proj" in name else "F32"))
    tensors = {name: raw.to_f32() for name, raw in load(source).items()}
    assert keys == set(tensors)
    for name in (name for name in tensors if "kv_b_proj" in name):
        heads = tensors[name].reshape(4, 64 + 96, 128)
        parts = rounded(heads[:, :64].swapaxes(1, 2)).swapaxes(1, 2), rounded(heads[:, 64:])
        tensors[name] = np.concatenate(parts, axis=1).reshape(tensors[name].shape)
    write_gguf(source, twin, replaced=tensors)
    assert answers(engine(file)) == answers(engine(twin)) != answers(engine(source, dtype="float32"))


def test_a_file_with_the_expanded_heads_of_latents(
    checkpoints: Path, tmp_path: Path, engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files from before April 2025 have one tensor for keys and values, and the sizes of expanded heads."""
    source, file, twin = checkpoints / "deepseek2-dense", tmp_path / "model.gguf", tmp_path / "twin.gguf"
    conversion = CONVERSIONS["DeepseekV2ForCausalLM"]
    before = dataclasses.replace(
        conversion, change=lambda config, name, values: iter([(name, values)]),
        keys=lambda config: conversion.keys(config) | {
            "attention.head_count_kv": 4, "attention.key_length": 96, "attention.value_length": 96,
            "attention.key_length_mla": None, "attention.value_length_mla": None,
        },
    )  # fmt: skip
    monkeypatch.setitem(CONVERSIONS, "DeepseekV2ForCausalLM", before)
    write_gguf(source, file)
    assert answers(engine(file)) == answers(engine(source, dtype="float32"))
    values = write_gguf(source, file, lambda name: "Q5_0" if "kv_b_proj" in name else "F32")
    write_gguf(source, twin, replaced=values)
    assert answers(engine(file)) == answers(engine(twin))


def rounded(values: np.ndarray) -> np.ndarray:
    """Return values after quantization to Q8_0."""
    kind = gguf.GGMLQuantizationType.Q8_0
    result: np.ndarray = gguf.quants.dequantize(gguf.quants.quantize(np.ascontiguousarray(values), kind), kind)
    return result


@pytest.mark.parametrize("name", ["llama-tied-llama3", "apertus-xielu", "hunyuan-alpha"])
def test_frequencies_that_were_rounded_on_their_way(
    name: str, checkpoints: Path, tmp_path: Path, engine: EngineFactory
) -> None:
    """Llama 3's factors, and Hunyuan's base, are f32 in files, so that a frequency may differ in its last bit."""
    write_gguf(checkpoints / name, tmp_path / "model.gguf")
    given = answers(engine(tmp_path / "model.gguf", max_model_len=800))
    expected = answers(engine(checkpoints / name, dtype="float32", max_model_len=800))
    check_alike(given, expected, 1e-3)


def check_alike(given: list[tuple[Any, ...]], expected: list[tuple[Any, ...]], tolerance: float) -> None:
    """Check that answers have the same tokens, and prompts the log probabilities, but for a tolerance."""
    assert [answer[2] for answer in given] == [answer[2] for answer in expected]
    for own, other in zip(given, expected, strict=True):
        pairs = zip(own[1][1:], other[1][1:], strict=True)
        for mine, theirs in pairs:
            np.testing.assert_allclose(
                [entry.logprob for entry in mine.values()], [entry.logprob for entry in theirs.values()], atol=tolerance
            )


ENCODERS: dict[str, dict[str, str]] = {
    "bert": {},
    "embedding-gemma": {},
    "nomic-bert": {},
    "roberta": {"hidden_act": "gelu"},
    "xlm-roberta": {},
}
"""Encoders by their names in `pooled_checkpoints.py`, with changed fields: files do not say the activation."""

ENCODER_KEYS = {"embedding-gemma": {"ARCH.attention.sliding_window_pattern": [True, False, True]}}


@pytest.mark.parametrize("name", ENCODERS)
def test_a_float_file_of_an_encoder_gives_the_bits_of_the_folder(
    name: str, tmp_path: Path, engine: EngineFactory
) -> None:
    checkpoint = next(each for each in pooled_checkpoints.ENCODERS if each.name == name)
    folder, file = encoder(checkpoint, tmp_path, **ENCODERS[name]), tmp_path / "model.gguf"
    write_gguf(folder, file, metadata={"ARCH.pooling_type": 2, **ENCODER_KEYS.get(name, {})})
    given, prompts = pooled_checkpoints.prompts(), ["A fox and a crow", "naive"]
    own, other = engine(file), engine(folder, dtype="float32")
    assert [own.embed(prompts, use_tqdm=False)[i].outputs for i in range(2)] == [
        output.outputs for output in other.embed(prompts, PoolingParams(pooling_type="cls"), use_tqdm=False)
    ]
    for kind in ("cls", "mean", "last"):
        params = PoolingParams(pooling_type=kind, normalize=False)
        vectors = [[o.outputs.embedding for o in llm.embed(given, params, use_tqdm=False)] for llm in (own, other)]
        assert vectors[0] == vectors[1], kind


def test_a_float_file_of_a_reranker_gives_the_scores_of_the_folder(tmp_path: Path, engine: EngineFactory) -> None:
    checkpoint = next(each for each in pooled_checkpoints.CLASSIFIERS if each.name == "xlm-roberta-pair")
    folder, file = encoder(checkpoint, tmp_path), tmp_path / "model.gguf"
    write_gguf(folder, file, metadata={"ARCH.pooling_type": 4, "tokenizer.ggml.token_type_count": 1})
    texts = ["the fox", "a crow in the wood"]
    scores = [
        [o.outputs.score for o in llm.score("a fox", texts, use_tqdm=False)]
        for llm in (engine(file), engine(folder, dtype="float32"))
    ]
    assert scores[0] == scores[1]


def encoder(checkpoint: pooled_checkpoints.PooledCheckpoint, folder: Path, **changes: Any) -> Path:
    """Write an encoder with other fields in its config.json."""
    target = pooled_checkpoints.make(checkpoint, folder / "folder")
    config = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_every_architecture_is_written_by_a_rule_of_its_own() -> None:
    assert {conversion.architecture for conversion in CONVERSIONS.values()} == set(ARCHITECTURES)
