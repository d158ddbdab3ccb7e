"""Validation of requests. Every error says what was given, what is allowed, and what to do.

Each check returns nothing or raises RejectedError; a request that passes all of them can be served.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from quire.engine_core.decoding.beam_search import num_candidates
from quire.engine_core.grammar.text import grammar_text
from quire.engine_core.request import Request
from quire.engine_core.scheduling.admission import pages_of_sequences
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import (
    LOGIT_BIAS,
    MAX_SALT,
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


class ShuttingDownError(RejectedError):
    """A request to an engine that takes no more of them."""

    kind = ErrorKind.SHUTTING_DOWN


def check_request(request: EngineCoreRequest, limits: EngineShape) -> None:
    """Raise RejectedError for the first thing that is wrong with `request`."""
    for check in _CHECKS if request.pooling is None else _POOLING_CHECKS:
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


def _check_prompt(request: EngineCoreRequest, limits: EngineShape) -> None:
    prompt = request.prompt_token_ids
    if not prompt:
        raise RejectedError("the prompt is empty; give at least one token")
    answer = 1 if request.pooling is None else 0  # tokens that must have room after it
    if len(prompt) + answer > limits.max_model_len:
        words = "leaves no room for an answer" if answer else "is too long"
        raise RejectedError(
            f"a prompt of {len(prompt)} tokens {words}, as this model's maximum context length is "
            f"{limits.max_model_len} tokens; shorten it to {limits.max_model_len - answer} tokens or fewer"
        )
    if len(prompt) + answer > limits.pool_tokens:
        raise RejectedError(
            f"a prompt of {len(prompt)} tokens can never be served: the engine's {limits.num_pages} KV pages hold "
            f"{limits.pool_tokens} tokens; shorten it to {limits.pool_tokens - answer} tokens or fewer, "
            "or start the engine with more KV memory"
        )
    _check_token_ids("prompt_token_ids", prompt, limits)


def _check_pooling(request: EngineCoreRequest, limits: EngineShape) -> None:
    assert request.pooling is not None
    dimensions = request.pooling.dimensions
    if dimensions is not None and not 1 <= dimensions <= limits.hidden_size:
        raise RejectedError(
            f"dimensions={dimensions} is out of range; the model's embeddings have {limits.hidden_size} values, so it "
            f"must be from 1 to {limits.hidden_size}, or None for all"
        )
    if request.sampling_params != SamplingParams():
        raise RejectedError("an embedding generates no tokens; leave sampling_params at their defaults")
    if request.shares_prompt_with is not None:
        raise RejectedError(
            "an embedding has no samples that could share its prompt, which is all it computes; leave out "
            "shares_prompt_with"
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


def _check_policy(request: EngineCoreRequest, _limits: EngineShape) -> None:
    sampling = request.sampling_params
    if sampling.beam_width and not 1 <= sampling.n <= sampling.beam_width:
        raise RejectedError(f"n={sampling.n} with beam_width={sampling.beam_width}; it must be from 1 to beam_width")
    if sampling.n != 1 and not sampling.beam_width:
        raise RejectedError(f"n={sampling.n}: the engine gives one answer a request; send a request for each of them")
    for name, advice in _NOT_OF_ENGINE.items():
        if (value := getattr(sampling, name)) not in (None, []):
            raise RejectedError(f"{name}={value!r}: {advice}")


# Fields without meaning in a beam search, with the values that change nothing.
_NOT_WITH_BEAMS: dict[str, tuple[object, ...]] = {
    "temperature": (0.0, 1.0),
    "top_k": (0, -1),
    "top_p": (1.0,),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "min_tokens": (0,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words_token_ids": (None, []),
    "prompt_logprobs": (None,),
    "structured_outputs": (None,),
}


def _check_beams(request: EngineCoreRequest, limits: EngineShape) -> None:
    sampling = request.sampling_params
    width = sampling.beam_width
    if width == 0:
        if sampling.length_penalty != 1.0 or sampling.early_stopping is not False:
            raise RejectedError(
                "length_penalty and early_stopping belong to a beam search; set beam_width, or omit them"
            )
        return
    for name, allowed in _NOT_WITH_BEAMS.items():
        if (value := getattr(sampling, name)) not in allowed:
            raise RejectedError(f"{name}={value!r} has no meaning in a beam search; leave it out, or set beam_width=0")
    most = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    if not 1 <= width <= most:
        raise RejectedError(
            f"beam_width={width} is out of range; it must be 0, for no beam search, or from 1 to {most}, the sequences "
            "that the engine runs at a time (--max-num-seqs, --max-num-batched-tokens)"
        )
    stop = set(sampling.stop_token_ids or ()).union(() if sampling.ignore_eos else request.eos_token_ids)
    if (needed := num_candidates(width, len(stop))) > limits.vocab_size:
        raise RejectedError(
            f"beam_width={width} with {len(stop)} stop tokens needs {needed} continuations a step, and the "
            f"vocabulary has {limits.vocab_size} tokens; lower beam_width, or give fewer stop_token_ids"
        )
    num_prompt = len(request.prompt_token_ids)
    total = limits.max_model_len if sampling.max_tokens is None else num_prompt + sampling.max_tokens
    if (pages := pages_of_sequences(num_prompt, total - 1, width, limits)) > limits.num_pages:
        raise RejectedError(
            f"beam_width={width} with a prompt of {num_prompt} tokens and max_tokens={total - num_prompt} may need "
            f"{pages} KV pages, and the engine has {limits.num_pages}; lower beam_width or max_tokens, or start the "
            "engine with more KV memory"
        )


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


def _check_service(request: EngineCoreRequest, limits: EngineShape) -> None:
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


def _check_salt(cache_salt: str) -> None:
    if len(cache_salt) > MAX_SALT:
        raise RejectedError(f"cache_salt has {len(cache_salt)} characters; it may have {MAX_SALT}")


def check_queue(request: EngineCoreRequest, num_waiting: int, waiting_tokens: int, limits: EngineShape) -> None:
    """Raise OverloadedError if the waiting queue has no room for the request."""
    tokens = waiting_tokens + len(request.prompt_token_ids)
    if num_waiting >= limits.max_waiting_requests or tokens > limits.max_waiting_tokens:
        raise OverloadedError(
            f"the engine is overloaded: {num_waiting} requests with {waiting_tokens} prompt tokens are waiting, and "
            f"{limits.max_waiting_requests} requests with {limits.max_waiting_tokens} tokens may; try again later"
        )


def check_prefix(token_ids: list[int], cache_salt: str, limits: EngineShape) -> None:
    """Raise RejectedError unless the tokens may begin a prompt."""
    if not limits.enable_prefix_caching:
        raise RejectedError(
            "nothing can be pinned: this engine keeps no prefixes; start it without --no-enable-prefix-caching"
        )
    if not 0 < len(token_ids) <= limits.max_model_len:
        raise RejectedError(
            f"a prefix of {len(token_ids)} tokens cannot be pinned; it may have 1 to {limits.max_model_len}"
        )
    _check_salt(cache_salt)
    _check_token_ids("token_ids", token_ids, limits)


def check_shared_prompt(request: EngineCoreRequest, other: Request) -> None:
    """Raise RejectedError unless the two have one prompt and one salt."""
    same_salt = other.cache_salt in (None, request.cache_salt)  # None: the engine has no prefix cache
    if other.prompt_token_ids != request.prompt_token_ids or not same_salt:
        raise RejectedError(
            f"request {request.request_id!r} names {other.request_id!r} in shares_prompt_with, which has another "
            "prompt or another cache_salt; name a request that has the same, or none"
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


_CHECKS: tuple[Callable[[EngineCoreRequest, EngineShape], None], ...] = (
    _check_lengths,
    _check_policy,
    _check_service,
    _check_prompt,
    _check_length,
    _check_numbers,
    _check_tokens,
    _check_beams,
    _check_structured_outputs,
)
_POOLING_CHECKS: tuple[Callable[[EngineCoreRequest, EngineShape], None], ...] = (
    _check_service,
    _check_prompt,
    _check_pooling,
)
