"""Validation of requests. Every error says what was given, what is allowed, and what to do.

Each check returns nothing or raises RejectedError; a request that passes all of them can be served.
"""

from __future__ import annotations

import math
import os.path
from collections.abc import Iterable

from quire.engine_core.grammar.text import grammar_text
from quire.engine_core.request import Request
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import (
    LOGIT_BIAS,
    MAX_SALT,
    MAX_TENANT,
    PRIORITY,
    SAMPLING_LENGTHS,
    SAMPLING_RANGES,
    STRUCTURED_LENGTHS,
    EngineCoreRequest,
    ErrorKind,
    SamplingParams,
)

MAX_GRAMMAR = 1 << 20
"""Characters of a grammar, of JSON where it is JSON. The frontend allows fewer, of what it makes grammars from."""


class RejectedError(ValueError):
    """A request that cannot be served; the text is for the user."""

    kind = ErrorKind.INVALID


class OverloadedError(RejectedError):
    """The waiting queue is full."""

    kind = ErrorKind.OVERLOADED


class SuspendedTenantError(RejectedError):
    """A request of a tenant whose requests have killed engines again and again."""

    kind = ErrorKind.OVERLOADED


class ShuttingDownError(RejectedError):
    """A request to an engine that takes no more of them."""

    kind = ErrorKind.SHUTTING_DOWN


class PoisonedRequestError(RejectedError):
    """A request that has killed engines."""

    kind = ErrorKind.FAILED


def check_generation(request: EngineCoreRequest, limits: EngineShape) -> None:
    """Raise RejectedError for the first thing that is wrong with a request that generates tokens."""
    if not limits.pooling.generates:
        raise RejectedError(f"this model generates no text; it {limits.pooling.tasks}")
    if request.segment:
        raise RejectedError(f"segment={request.segment} belongs to a pair of texts that is pooled; leave it out")
    _check_lengths(request, limits)
    check_service(request, limits)
    check_prompt(request, limits, room=1)
    for check in (
        _check_prediction,
        _check_engine_fields,
        _check_length,
        _check_generated,
        _check_numbers,
        _check_tokens,
        _check_structured_outputs,
    ):
        check(request, limits)


def _check_lengths(request: EngineCoreRequest, _limits: EngineShape) -> None:
    """Raise RejectedError for a list or text that is too long: first, since other checks take time for each entry."""
    sampling = request.sampling_params
    try:
        for name, most in SAMPLING_LENGTHS.items():
            most.check(name, getattr(sampling, name))
        if (structured := sampling.structured_outputs) is not None:
            for name in ("regex", "choice", "whitespace_pattern"):  # JSON and grammars: see MAX_GRAMMAR
                STRUCTURED_LENGTHS[name].check(f"structured_outputs.{name}", getattr(structured, name))
    except ValueError as error:
        raise RejectedError(str(error)) from None


def check_prompt(request: EngineCoreRequest, limits: EngineShape, *, room: int) -> None:
    """Raise RejectedError unless the prompt, and `room` tokens after it, fit the model and the KV cache."""
    prompt = request.prompt_token_ids
    if not prompt:
        raise RejectedError("the prompt is empty; give at least one token")
    if len(prompt) + room > limits.max_model_len:
        words = "leaves no room for an answer" if room else "is too long"
        raise RejectedError(
            f"a prompt of {len(prompt)} tokens {words}, as this model's maximum context length is "
            f"{limits.max_model_len} tokens; shorten it to {limits.max_model_len - room} tokens or fewer"
        )
    if len(prompt) + room > limits.pool_tokens:
        raise RejectedError(
            f"a prompt of {len(prompt)} tokens can never be served: the engine's {limits.num_pages} KV pages hold "
            f"{limits.pool_tokens} tokens; shorten it to {limits.pool_tokens - room} tokens or fewer, "
            "or start the engine with more KV memory"
        )
    _check_token_ids("prompt_token_ids", prompt, limits)


def check_prompt_only(request: EngineCoreRequest, kind: str) -> None:
    """Raise RejectedError for a request of a kind that takes only a prompt, if it brings other tokens."""
    if request.generated_token_ids:
        raise RejectedError(f"{kind} begins with its prompt, and goes on after no tokens; omit generated_token_ids")
    if request.predicted_token_ids:
        raise RejectedError(f"{kind} is not drafted; omit predicted_token_ids (a prediction)")


def _check_generated(request: EngineCoreRequest, limits: EngineShape) -> None:
    _check_token_ids("generated_token_ids", request.generated_token_ids, limits)
    num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling_params.max_tokens
    most = min(limits.max_model_len, limits.pool_tokens + 1) - num_prompt
    most = most if max_tokens is None else min(most, max_tokens)
    if len(request.generated_token_ids) >= most:
        raise RejectedError(
            f"generated_token_ids has {len(request.generated_token_ids)} tokens, and the request ends with its token "
            f"{most}; there is nothing left to generate"
        )


def _check_length(request: EngineCoreRequest, limits: EngineShape) -> None:
    sampling = request.sampling_params
    num_prompt, max_tokens = len(request.prompt_token_ids), sampling.max_tokens
    if max_tokens is not None:
        if max_tokens < 1:
            raise RejectedError(f"max_tokens={max_tokens} asks for no answer; it must be at least 1")
        if num_prompt + max_tokens > limits.max_model_len:
            raise RejectedError(
                f"max_tokens={max_tokens} with a prompt of {num_prompt} tokens is too many, as this model's maximum "
                f"context length is {limits.max_model_len} tokens; lower max_tokens to "
                f"{limits.max_model_len - num_prompt} or less"
            )
    most = limits.max_model_len - num_prompt if max_tokens is None else max_tokens
    if not 0 <= sampling.min_tokens <= most:
        raise RejectedError(
            f"min_tokens={sampling.min_tokens} is out of range; it must be from 0 to max_tokens, {most}"
        )


def _check_numbers(request: EngineCoreRequest, _limits: EngineShape) -> None:
    try:
        for name, allowed in SAMPLING_RANGES.items():
            allowed.check(name, getattr(request.sampling_params, name))
    except ValueError as error:
        raise RejectedError(str(error)) from None


# Fields that the frontend carries out, and what a client of the engine does instead.
_NOT_OF_ENGINE = {
    "best_of": "the engine gives one answer a request; send a request for each of them, with logprobs, and choose",
    "stop": "the engine sees token ids and no text; look for stop strings in what it answers, or use stop_token_ids",
    "bad_words": "the engine sees token ids and no text; send their token ids as bad_words_token_ids",
}


def _check_engine_fields(request: EngineCoreRequest, _limits: EngineShape) -> None:
    for name, advice in _NOT_OF_ENGINE.items():
        if (value := getattr(request.sampling_params, name)) not in (None, []):
            raise RejectedError(f"{name}={value!r}: {advice}")


def _check_structured_outputs(request: EngineCoreRequest, _limits: EngineShape) -> None:
    structured = request.sampling_params.structured_outputs
    if structured is None:
        return
    if len(structured.kinds) != 1:
        raise RejectedError(
            f"structured_outputs asks for {' and '.join(structured.kinds) or 'nothing'}; give exactly one of json, "
            "regex, choice, grammar or json_object"
        )
    if structured.choice == []:
        raise RejectedError("structured_outputs.choice is empty, so that it allows no text; give some")
    length = len(grammar_text(structured))
    if length > MAX_GRAMMAR:
        raise RejectedError(
            f"structured_outputs.{structured.kinds[0]} has {length} characters; it may have {MAX_GRAMMAR}"
        )


def _check_prediction(request: EngineCoreRequest, limits: EngineShape) -> None:
    predicted = request.predicted_token_ids
    if len(predicted) > limits.max_model_len:
        raise RejectedError(
            f"predicted_token_ids has {len(predicted)} tokens, and an answer at most {limits.max_model_len}; shorten it"
        )
    _check_token_ids("predicted_token_ids", predicted, limits)


def check_service(request: EngineCoreRequest, limits: EngineShape) -> None:
    """Raise RejectedError for a priority, a timeout or a salt that cannot be honoured."""
    if request.priority != 0 and limits.scheduling_policy != "priority":
        raise RejectedError(
            f"priority={request.priority} has no effect under the scheduling policy {limits.scheduling_policy}; leave "
            "it at 0, or start the engine with --scheduling-policy priority"
        )
    if not PRIORITY.holds(request.priority):
        raise RejectedError(f"priority={request.priority} is out of range; it must be {PRIORITY}")
    if request.timeout is not None and not 0 < request.timeout < math.inf:
        raise RejectedError(f"timeout={request.timeout!r} must be a number of seconds above 0, or None")
    _check_salt(request.cache_salt)
    if "\0" in request.cache_salt:
        raise RejectedError(
            f"cache_salt={request.cache_salt!r} has a NUL character, which marks the salts of adapters in the engine; "
            "leave it out"
        )
    if len(request.tenant) > MAX_TENANT:
        raise RejectedError(f"tenant has {len(request.tenant)} characters; it may have {MAX_TENANT}")


def _check_salt(cache_salt: str) -> None:
    if len(cache_salt) > MAX_SALT:
        raise RejectedError(f"cache_salt has {len(cache_salt)} characters; it may have {MAX_SALT}")


def check_prefix(token_ids: list[int], cache_salt: str, limits: EngineShape) -> None:
    """Raise RejectedError unless the tokens may begin a prompt. The salt may be that of an adapter."""
    if not limits.enable_prefix_caching:
        raise RejectedError(
            "nothing can be pinned or fetched: this engine keeps no prefixes; start it without "
            "--no-enable-prefix-caching"
        )
    if not 0 < len(token_ids) <= limits.max_model_len:
        raise RejectedError(
            f"a prefix of {len(token_ids)} tokens is not possible; it may have 1 to {limits.max_model_len}"
        )
    _check_salt(cache_salt)
    _check_token_ids("token_ids", token_ids, limits)


def adapter_path(adapter: str) -> str:
    """Return the one spelling of an adapter's path that stands for all of them; "" for none."""
    path = os.path.normpath(adapter) if adapter else ""
    return path[1:] if path.startswith("//") else path  # normpath keeps two slashes


def check_no_adapter(request: EngineCoreRequest) -> None:
    """Raise RejectedError for a request that names an adapter, which this engine would not compute it by."""
    if request.adapter:
        raise RejectedError(
            f"adapter={request.adapter!r}: this engine was started without adapters; leave it out, or start the engine "
            "with --enable-lora or --lora-modules"
        )


def check_shared_prompt(request: EngineCoreRequest, other: Request) -> None:
    """Raise RejectedError unless the two have one prompt, one salt and one adapter."""
    same_salt = other.cache_salt is None or other.message.cache_salt == request.cache_salt  # None: no prefix cache
    same_adapter = adapter_path(other.message.adapter) == adapter_path(request.adapter)
    if other.prompt_token_ids != request.prompt_token_ids or not same_salt or not same_adapter:
        raise RejectedError(
            f"request {request.request_id!r} names {other.request_id!r} in shares_prompt_with, which has another "
            "prompt, cache_salt or adapter; name a request that has the same, or none"
        )


def _check_tokens(request: EngineCoreRequest, limits: EngineShape) -> None:
    sampling = request.sampling_params
    _check_token_ids("eos_token_ids", request.eos_token_ids, limits)
    _check_token_ids("stop_token_ids", sampling.stop_token_ids or (), limits)
    _check_allowed(request, sampling, limits)
    for word in sampling.bad_words_token_ids or ():
        if not word:
            raise RejectedError("bad_words_token_ids has an empty entry; each entry must have at least one token")
        _check_token_ids("bad_words_token_ids", word, limits)
    bias = sampling.logit_bias or {}
    _check_token_ids("logit_bias", bias, limits)
    for token_id, value in bias.items():
        if not LOGIT_BIAS.holds(value):
            raise RejectedError(f"logit_bias of token {token_id} is {value!r}; it must be {LOGIT_BIAS}")


def _check_allowed(request: EngineCoreRequest, sampling: SamplingParams, limits: EngineShape) -> None:
    """Raise RejectedError if there is no token that could be sampled."""
    allowed = sampling.allowed_token_ids
    if allowed is None:
        return
    if not allowed:
        raise RejectedError(
            "allowed_token_ids is empty, so no token could be sampled; give at least one, or None for all"
        )
    _check_token_ids("allowed_token_ids", allowed, limits)
    left = set(allowed).difference(word[0] for word in sampling.bad_words_token_ids or () if len(word) == 1)
    if sampling.min_tokens > 0:
        left.difference_update(sampling.stop_token_ids or (), () if sampling.ignore_eos else request.eos_token_ids)
    if not left:
        raise RejectedError(
            "every one of allowed_token_ids is banned, by bad words or, until min_tokens is reached, as a stop "
            "token; allow at least one token that is not"
        )


def _check_token_ids(name: str, token_ids: Iterable[int], limits: EngineShape) -> None:
    """Raise RejectedError for a token that is not in the vocabulary.

    `min` and `max` run in C: a prompt of 100,000 tokens is checked in about a millisecond.
    """
    smallest, largest = min(token_ids, default=0), max(token_ids, default=0)
    if smallest < 0 or largest >= limits.vocab_size:
        wrong = smallest if smallest < 0 else largest
        position = next(index for index, token_id in enumerate(token_ids) if token_id == wrong)
        raise RejectedError(
            f"{name} has the token id {wrong} at position {position}; the model's vocabulary allows 0 to "
            f"{limits.vocab_size - 1}; check that the tokenizer belongs to the model"
        )
