"""Beam search finds the sequences and scores of `transformers`' beam search, in any batch."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from memory_pressure import under_pressure
from patience import PATIENCE
from reference_libraries import import_reference
from tiny_model import weights, write

if TYPE_CHECKING:
    from conftest import EngineFactory

    from quire.frontend import LLM, RequestOutput, SamplingParams

SEARCHER = Path(__file__).parent / "support" / "search_beams.py"
KINDS = [
    {"num_beams": width, "length_penalty": penalty, "early_stopping": early}
    for width in (2, 3, 4, 7)
    for penalty in (-1.0, 0.0, 1.0, 1.7)
    for early in (False, True, "never")
]


def answers_of_transformers(folder: Path, cases: list[dict[str, Any]]) -> list[list[tuple[list[int], float]]]:
    import_reference("transformers")
    command = [sys.executable, "-P", str(SEARCHER), str(folder)]
    done = subprocess.run(
        command, input=json.dumps(cases), capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    answers: list[list[tuple[list[int], float]]] = json.loads(done.stdout)
    return answers


def params_of(case: dict[str, Any]) -> SamplingParams:
    from quire.frontend import SamplingParams

    return SamplingParams(
        n=case["num_beams"],
        beam_width=case["num_beams"],
        length_penalty=case["length_penalty"],
        early_stopping=case["early_stopping"],
        max_tokens=case["max_new_tokens"],
        stop_token_ids=case["eos_token_id"],
        ignore_eos=True,
        logprobs=2,
    )


def check(outputs: list[RequestOutput], cases: list[dict[str, Any]], expected: Any) -> None:
    for output, case, sequences in zip(outputs, cases, expected, strict=True):
        assert [found.index for found in output.outputs] == list(range(case["num_beams"]))
        assert [found.token_ids for found in output.outputs] == [tokens for tokens, _ in sequences], case
        for found, (tokens, score) in zip(output.outputs, sequences, strict=True):
            assert found.cumulative_logprob is not None
            logprob = score * len(tokens) ** case["length_penalty"]
            assert found.cumulative_logprob == pytest.approx(logprob, rel=1e-5, abs=1e-3)
            assert found.logprobs is not None
            chosen = [entry[token].logprob for entry, token in zip(found.logprobs, tokens, strict=True)]
            assert sum(chosen) == pytest.approx(found.cumulative_logprob, abs=1e-4)
            assert (found.finish_reason == "stop") == (tokens[-1] in case["eos_token_id"])


def ask(llm: LLM, cases: list[dict[str, Any]]) -> list[RequestOutput]:
    return llm.generate([case["prompt"] for case in cases], [params_of(case) for case in cases], use_tqdm=False)


def tiny_cases() -> list[dict[str, Any]]:
    rng = random.Random(3)
    return [
        {
            **kind,
            "prompt": [rng.randrange(128) for _ in range(rng.choice([1, 5, 31, 32, 40, 64]))],
            "max_new_tokens": rng.choice([1, 6, 20, 40]),
            "eos_token_id": rng.sample(range(128), rng.choice([0, 1, 3, 6])),
        }
        for kind in KINDS
    ]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose distributions are flat enough for beams to diverge and converge."""
    tensors = weights()
    tensors["lm_head.weight"] *= 0.15
    return write(tmp_path_factory.mktemp("beams") / "tiny", tensors)


def test_a_small_random_model(tiny: Path, engine: EngineFactory) -> None:
    cases = tiny_cases()
    expected = answers_of_transformers(tiny, cases)
    options: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "max_num_seqs": 16}
    together = ask(engine(tiny, **options, max_num_batched_tokens=50), cases)
    check(together, cases, expected)
    few = engine(tiny, **options, num_pages=22, enable_prefix_caching=False)
    again = under_pressure(few, lambda: ask(few, cases))
    assert [output.outputs for output in again] == [output.outputs for output in together]


def test_the_demo_model(demo_model: Path, engine: EngineFactory) -> None:
    llm = engine(demo_model, dtype="float32")
    prompts = ["Once upon a time", "The fox said to the goose", "He opened the door and"]
    stop = [*llm.get_tokenizer().encode("."), *llm.get_tokenizer().encode(",")]
    cases = [
        {**kind, "prompt": llm.get_tokenizer().encode(prompt), "max_new_tokens": 24, "eos_token_id": stop}
        for kind, prompt in zip(KINDS[::3] + KINDS[1::3], prompts * 11, strict=False)
    ]
    check(ask(llm, cases), cases, answers_of_transformers(demo_model, cases))


def test_names_are_vllms(demo_model: Path, engine: EngineFactory) -> None:
    from quire.frontend import AsyncLLM, BeamSearchOutput, BeamSearchParams, SamplingParams

    llm = engine(demo_model)
    prompt = "Once upon a time"
    params = BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True, length_penalty=0.5)
    [found] = llm.beam_search(prompt, params)
    [plain] = llm.generate(
        prompt, SamplingParams(n=3, beam_width=3, max_tokens=12, ignore_eos=True, length_penalty=0.5)
    )
    assert plain.outputs[0].logprobs is None
    for sequence, output in zip(found.sequences, plain.outputs, strict=True):
        assert sequence.tokens == plain.prompt_token_ids + output.token_ids
        assert (sequence.text, sequence.cum_logprob) == (output.text, output.cumulative_logprob)
        assert sequence.finish_reason == "length"
        assert len(sequence.logprobs) == 12
        assert llm.get_tokenizer().decode(sequence.tokens) == prompt + sequence.text
    assert [sequence.cum_logprob for sequence in found.sequences] == sorted(
        (sequence.cum_logprob for sequence in found.sequences), reverse=True
    )

    async def again() -> BeamSearchOutput:
        async with AsyncLLM(engine_address=llm.engine_address) as other:
            with pytest.raises(ValueError, match="there are no deltas"):
                await anext(other.generate(prompt, SamplingParams(beam_width=2), output_kind="delta"))
            return await other.beam_search(prompt, params)

    assert asyncio.run(again()) == found


def test_an_end_of_sequence_token_is_omitted_unless_requested(tiny: Path, engine: EngineFactory) -> None:
    """In this model every token may follow every other, so a wide search reaches its eos token, 0."""
    from quire.frontend import BeamSearchParams

    llm = engine(tiny, skip_tokenizer_init=True)
    params: dict[str, Any] = {"beam_width": 40, "max_tokens": 12, "length_penalty": 0.0}
    [left_out] = llm.beam_search([[5, 6, 7]], BeamSearchParams(**params))
    [included] = llm.beam_search([[5, 6, 7]], BeamSearchParams(**params, include_stop_str_in_output=True))
    stopped = [
        pair for pair in zip(left_out.sequences, included.sequences, strict=True) if pair[0].finish_reason == "stop"
    ]
    assert stopped
    for without, whole in stopped:
        assert whole.tokens == [*without.tokens, 0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 0.5}, r"temperature=0\.5: a beam search does not sample"),
        ({"beam_width": 0}, "beam_width=0; it must be at least 1"),
    ],
)
def test_invalid_parameters_are_rejected(fields: dict[str, Any], message: str) -> None:
    from quire.frontend import BeamSearchParams

    with pytest.raises(ValueError, match=message):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **fields}).sampling_params()
