"""Samples, grammars, drafts and beams of adapters that change the head too are the same alone and beside others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import compare_speculation
import pytest
from conftest import EngineFactory
from demo_adapters import write_demo_adapter

from quire.frontend import LLM, LoRARequest, SamplingParams, StructuredOutputsParams
from quire.frontend.beam_search import BeamSearchParams

PROMPT = "Once upon a time there was a fox"
REGEX = "[a-z ]{20,30}"
PARAMS = {
    "samples": SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=20, logprobs=1),
    "grammar": SamplingParams(
        temperature=1.0, seed=3, max_tokens=40, structured_outputs=StructuredOutputsParams(regex=REGEX)
    ),
    "prompt": SamplingParams(temperature=0.0, max_tokens=16, logprobs=1, prompt_logprobs=1),
    "penalties": SamplingParams(temperature=0.7, seed=9, max_tokens=24, presence_penalty=0.5, min_p=0.01),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 16},
    "few pages": {"num_pages": 10, "max_model_len": 256},
    "one adapter at a time": {"max_loras": 1},
    "drafts": {"speculative_config": {"method": "draft_model", "quantization": "int4", "adaptive": False}},
    "drafts from text": {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}},
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    folder = tmp_path_factory.mktemp("adapters")
    return [
        LoRARequest(name, number, str(write_demo_adapter(folder / name, number, head=True)))
        for number, name in enumerate(("tales", "songs"), 1)
    ]


@pytest.fixture(scope="module")
def llm(module_engine: EngineFactory, demo_model: Path) -> LLM:
    return module_engine(demo_model, enable_lora=True)


def answers(llm: LLM, params: Any, given: list[LoRARequest | None]) -> list[Any]:
    outputs = llm.generate([PROMPT] * len(given), params, lora_request=given, use_tqdm=False)
    return [compare_speculation.answer(output) for output in outputs]


@pytest.fixture(scope="module")
def alone(llm: LLM, adapters: list[LoRARequest]) -> dict[str, list[Any]]:
    """The answers of the adapters and of the base, one after the other."""
    given = [*adapters, None]
    return {kind: [answers(llm, params, [each])[0] for each in given] for kind, params in PARAMS.items()}


def test_answers_differ_by_adapter(alone: dict[str, list[Any]]) -> None:
    for found in alone.values():
        assert len({repr(samples) for _, _, samples in found}) == len(found)
    assert all(len({tuple(sample[0]) for sample in samples}) == 3 for _, _, samples in alone["samples"])
    assert all(re.fullmatch(REGEX, samples[0][1]) for _, _, samples in alone["grammar"])
    assert len({repr(logprobs) for _, logprobs, _ in alone["prompt"]}) == 3


@pytest.mark.parametrize("options", OPTIONS)
def test_a_mix_equals_each_alone(
    options: str, alone: dict[str, list[Any]], adapters: list[LoRARequest], demo_model: Path, engine: EngineFactory
) -> None:
    given = dict(OPTIONS[options])
    if given.get("speculative_config", {}).get("method") == "draft_model":
        given["speculative_config"] = {**given["speculative_config"], "model": str(demo_model)}
    llm = engine(demo_model, enable_lora=True, **given)
    kinds = [kind for kind in PARAMS for _ in range(3)]
    found = answers(llm, [PARAMS[kind] for kind in kinds], [*adapters, None] * len(PARAMS))
    assert found == [answer for kind in PARAMS for answer in alone[kind]]


def test_beams_are_those_of_the_adapter(llm: LLM, adapters: list[LoRARequest]) -> None:
    def beams(adapter: LoRARequest | None) -> list[list[int]]:
        params = BeamSearchParams(beam_width=3, max_tokens=10)
        return [each.tokens for each in llm.beam_search(PROMPT, params, lora_request=adapter)[0].sequences]

    assert beams(adapters[0]) == beams(adapters[0])
    assert len({str(beams(each)) for each in (*adapters, None)}) == 3
