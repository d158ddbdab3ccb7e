"""GGUF files of each architecture give the bits of the folder that they were made of, by llama.cpp's rules.

What the format loses (windows, the scale of attention scores, which layers have no rotary embedding) the folders do not
have either.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pooled_checkpoints
import pytest
from gguf_conversion import CONVERSIONS
from gguf_files import write_gguf
from quantized_checkpoints import Raw, load, save

from quire.frontend import PoolingParams, SamplingParams
from quire.kernels.gguf.architectures import ARCHITECTURES

if TYPE_CHECKING:
    from conftest import EngineFactory

    from quire.frontend import LLM

PROMPTS = [list(range(3, 40)), [5, 6, 7], list(range(300, 90, -1))]
GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=3, prompt_logprobs=1, ignore_eos=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """A checkpoint of `checkpoints.py`, with the fields of config.json and the number of layers that are changed."""

    checkpoint: str
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    layers: int = 0
    only: int | None = None  # the layer that all others repeat
    id: str = ""


def _longrope(frequencies: int) -> dict[str, Any]:
    factors = {
        "short_factor": [1 + i / 32 for i in range(frequencies)],
        "long_factor": [2 + i / 16 for i in range(frequencies)],
    }
    return {"rope_type": "longrope", "rope_theta": 10000.0, **factors}


_FULL = ["full_attention"]
CASES = (
    Case("cohere2-window77"),
    Case("gemma2-window77", {"query_pre_attn_scalar": 128}),
    Case("gemma3-window100", {"query_pre_attn_scalar": 256},
         {"ARCH.attention.sliding_window_pattern": [True, True, False, True]}),
    Case("gemma3-window100", {"query_pre_attn_scalar": 256, "layer_types": None, "sliding_window_pattern": 6}, layers=7,
         id="gemma3-period"),
    Case("glm4-interleaved"),
    Case("gpt2-tied"),
    Case("gpt2-untied"),
    Case("granite-multipliers"),
    Case("llama-biases-linear"),
    Case("llama-gqa8-dynamic", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    Case("mistral-window128", {"sliding_window": None}),
    Case("mistral-window77", metadata={"ARCH.attention.sliding_window": 77}),
    Case("gpt-oss-window100", {"swiglu_limit": 7.0}),
    Case("mixtral-window100", {"sliding_window": None}),
    Case("olmo2-joint-norms"),
    Case("olmoe"),
    Case("phi3-window90-short", {"partial_rotary_factor": 0.75, "rope_parameters": _longrope(24)}),
    Case("phi3-long", {"rope_parameters": _longrope(40), "original_max_position_embeddings": 64}),
    Case("qwen2-tied-window", {"use_sliding_window": False}),
    Case("qwen2-yarn"),
    Case("qwen2-moe-shared-window", {"use_sliding_window": False, "decoder_sparse_step": 1}, only=1),
    Case("qwen3-moe", {"mlp_only_layers": []}, only=0),
    Case("qwen3-biases-window", {"use_sliding_window": False}),
    Case("qwen3-tied"),
    Case("smollm3-window100", {"no_rope_layers": None, "layer_types": None, "use_sliding_window": False}, layers=5),
    Case("starcoder2-window77", {"sliding_window": None}),
)  # fmt: skip


def answers(llm: LLM) -> list[tuple[Any, ...]]:
    """Return tokens and log probabilities of prompts and greedy answers, to the last bit."""
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [(o.prompt_token_ids, o.prompt_logprobs, o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


def changed(source: Path, target: Path, case: Case) -> Path:
    """Write a checkpoint with other fields, and more layers, which repeat those it has."""
    config = json.loads((source / "config.json").read_text()) | case.changes
    tensors = load(source)
    if case.layers:
        had = config["num_hidden_layers"]
        config["num_hidden_layers"] = case.layers
        for name, raw in list(tensors.items()):
            start, dot, rest = name.partition(".layers.")
            number, _, end = rest.partition(".")
            if dot:
                more = range(int(number) + had, case.layers, had)
                tensors |= {f"{start}.layers.{layer}.{end}": Raw(raw.dtype, raw.shape, raw.data) for layer in more}
    if case.only is not None:
        at = f"model.layers.{case.only}."
        layer = {name.removeprefix(at): raw for name, raw in tensors.items() if name.startswith(at)}
        tensors = {name: raw for name, raw in tensors.items() if ".layers." not in name}
        for copy in range(config["num_hidden_layers"]):
            tensors |= {f"model.layers.{copy}.{name}": raw for name, raw in layer.items()}
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


def test_llama3_frequencies_come_from_their_factors(checkpoints: Path, tmp_path: Path, engine: EngineFactory) -> None:
    """They were rounded to f32 on their way, so that a frequency may differ in its last bit."""
    write_gguf(checkpoints / "llama-tied-llama3", tmp_path / "model.gguf")
    given = answers(engine(tmp_path / "model.gguf"))
    expected = answers(engine(checkpoints / "llama-tied-llama3", dtype="float32"))
    assert [answer[2] for answer in given] == [answer[2] for answer in expected]
    for own, other in zip(given, expected, strict=True):
        pairs = zip(own[1][1:], other[1][1:], strict=True)
        for mine, theirs in pairs:
            np.testing.assert_allclose(
                [entry.logprob for entry in mine.values()], [entry.logprob for entry in theirs.values()], atol=1e-3
            )


ENCODERS: dict[str, dict[str, str]] = {"bert": {}, "roberta": {"hidden_act": "gelu"}, "xlm-roberta": {}}
"""Encoders by their names in `pooled_checkpoints.py`, with changed fields: files do not say the activation."""


@pytest.mark.parametrize("name", ENCODERS)
def test_a_float_file_of_an_encoder_gives_the_bits_of_the_folder(
    name: str, tmp_path: Path, engine: EngineFactory
) -> None:
    checkpoint = next(each for each in pooled_checkpoints.ENCODERS if each.name == name)
    folder, file = encoder(checkpoint, tmp_path, **ENCODERS[name]), tmp_path / "model.gguf"
    write_gguf(folder, file, metadata={"ARCH.pooling_type": 2})
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
    for name in ("torch", "transformers"):
        pytest.importorskip(name)
    (target := folder / "folder").mkdir()
    pooled_checkpoints.make(checkpoint, target)
    config = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_every_architecture_is_written_by_a_rule_of_its_own() -> None:
    assert {conversion.architecture for conversion in CONVERSIONS.values()} == set(ARCHITECTURES)
