"""A request that goes on after the tokens of an earlier engine ends as it would have ended there."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_process import DealerClient, EngineUnderTest

from quire.protocol.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    ErrorKind,
    FinishReason,
    PoolingParams,
    SamplingParams,
    StructuredOutputs,
    TokenLogprobs,
)

PROMPT = [40, 50, 60, 70, 41]
TOKENS = 40
DATES = StructuredOutputs(regex=r"[0-9]{4}-(Jan|Feb|December)-[0-9]{2} is the day of [a-z ]{20,60}\.")
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.1, "top_p": 0.95, "logprobs": 3},
    "filtered": {"temperature": 0.9, "top_k": 20, "min_p": 0.01, "logprobs": 0},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.3, "logprobs": 1},
    "edited": {"min_tokens": 25, "stop_token_ids": [261, 262, 263], "bad_words_token_ids": [[300, 301], [302]]},
    "constrained": {"structured_outputs": DATES, "temperature": 0.8},
    "greedy constrained": {"structured_outputs": DATES, "temperature": 0.0, "logprobs": 2},
}


@pytest.fixture(scope="module")
def engine(demo_model: Path) -> Iterator[EngineUnderTest]:
    with EngineUnderTest(demo_model) as started:
        yield started


@pytest.fixture
def client(engine: EngineUnderTest) -> Iterator[DealerClient]:
    with DealerClient(engine.address) as client:
        yield client
        client.wait_until_at_rest()


def ask(client: DealerClient, request_id: str, params: SamplingParams, generated: list[int]) -> list[EngineCoreOutput]:
    client.send(EngineCoreRequest(request_id, PROMPT, params, generated_token_ids=generated))
    client.end(request_id)
    return client.outputs(request_id)


def answer(outputs: list[EngineCoreOutput]) -> tuple[list[int], list[TokenLogprobs]]:
    tokens = [token for output in outputs for token in output.new_token_ids]
    return tokens, [entry for output in outputs for entry in output.new_logprobs or ()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_goes_on_after_the_tokens_it_has(client: DealerClient, kind: str) -> None:
    params = SamplingParams(seed=7, max_tokens=TOKENS, **KINDS[kind])
    whole = ask(client, "whole", params, [])
    tokens, logprobs = answer(whole)
    assert len(tokens) > 5
    spans = [len(output.new_token_ids) for output in whole]
    cuts = [sum(spans[:i]) for i in range(1, len(spans)) if sum(spans[:i]) < len(tokens)]
    for cut in sorted(random.Random(3).sample(cuts, min(8, len(cuts)))):
        rest = ask(client, f"from {cut}", params, tokens[:cut])
        assert answer(rest) == (tokens[cut:], logprobs[cut:])
        last, expected = rest[-1], whole[-1]
        assert (last.finish_reason, last.stop_reason) == (expected.finish_reason, expected.stop_reason)
        assert not any(event.type.name == "FIRST_TOKEN" for output in rest for event in output.events)


@pytest.mark.parametrize(
    ("generated", "params", "words"),
    [
        ([5] * 8, SamplingParams(max_tokens=8), "nothing left to generate"),
        ([1, 10**6], SamplingParams(max_tokens=8), "generated_token_ids has the token id 1000000 at position 1"),
        ([1, 2], SamplingParams(max_tokens=8, beam_width=2), "a beam search begins with its prompt"),
        ([1, 2], SamplingParams(max_tokens=8, structured_outputs=DATES), "the grammar does not allow token 1 at"),
    ],
)
def test_tokens_that_cannot_be_gone_on_after_are_rejected(
    client: DealerClient, generated: list[int], params: SamplingParams, words: str
) -> None:
    (output,) = ask(client, "wrong", params, generated)
    assert output.finish_reason is FinishReason.ERROR
    assert output.error_kind is ErrorKind.INVALID
    assert words in (output.error or "")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"generated_token_ids": [1]}, "an embedding begins with its prompt"),
        ({"predicted_token_ids": [1]}, "an embedding is not drafted; omit predicted_token_ids"),
    ],
)
def test_an_embedding_takes_only_a_prompt(client: DealerClient, given: dict[str, Any], words: str) -> None:
    client.send(EngineCoreRequest("pooled", PROMPT, SamplingParams(), pooling=PoolingParams(), **given))
    assert words in (client.end("pooled").error or "")
