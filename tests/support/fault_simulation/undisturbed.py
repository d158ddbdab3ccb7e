"""Results of requests without faults."""

from __future__ import annotations

from typing import Any

import msgspec
from paged_executor import Engine, next_token

from fault_simulation.clients import Wish
from quire.frontend.client.request import EmbeddingRequest, GenerationRequest
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, SamplingParams


def undisturbed(wish: Wish, limits: EngineShape, eos_token_ids: list[int]) -> GenerationRequest | EmbeddingRequest:
    """Return the request as it ends without faults and without others."""
    request = wish.make(0.0)
    for index, params in enumerate(request.engine_params):
        if _is_plain(params) and request.pooling is None:
            output = _answer(wish.prompt, params, limits, eos_token_ids)
        else:
            output = _run_alone(wish.prompt, params, request.pooling, limits, eos_token_ids)
        request.append(index, output, 0.0)
    assert request.finished
    assert request.error is None
    return request


def _is_plain(params: SamplingParams) -> bool:
    return not params.beam_width and params.logprobs is None and params.prompt_logprobs is None


def _answer(
    prompt: list[int], params: SamplingParams, limits: EngineShape, eos_token_ids: list[int]
) -> EngineCoreOutput:
    tokens = list(prompt)
    assert params.max_tokens is not None
    assert params.seed is not None
    eos = () if params.ignore_eos else eos_token_ids
    for _ in range(params.max_tokens):
        token = next_token(tokens, params.seed, limits.vocab_size)
        tokens.append(token)
        new = tokens[len(prompt) :]
        if token in eos or token in (params.stop_token_ids or ()):
            return EngineCoreOutput(
                "", new, finish_reason=FinishReason.STOP, stop_reason=None if token in eos else token
            )
    return EngineCoreOutput("", tokens[len(prompt) :], finish_reason=FinishReason.LENGTH)


def _run_alone(
    prompt: list[int], params: SamplingParams, pooling: Any, limits: EngineShape, eos_token_ids: list[int]
) -> EngineCoreOutput:
    engine = Engine(**msgspec.structs.asdict(limits))
    engine.core.receive(b"client", EngineCoreRequest("r", prompt, params, eos_token_ids, pooling=pooling))
    engine.finish()
    outputs = engine.outputs("r")
    whole, last = outputs[0], outputs[-1]
    for each in outputs[1:]:
        whole.new_token_ids = whole.new_token_ids + each.new_token_ids
        if each.new_logprobs is not None:
            whole.new_logprobs = [*(whole.new_logprobs or ()), *each.new_logprobs]
        whole.new_prompt_logprobs = whole.new_prompt_logprobs or each.new_prompt_logprobs
    whole.finish_reason, whole.stop_reason = last.finish_reason, last.stop_reason
    whole.beams, whole.pooled, whole.error = last.beams, last.pooled, last.error
    return whole
