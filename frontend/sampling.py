"""Sampling parameters as users give them: checking, normalising, and the form that the engine reads."""

from __future__ import annotations

import random
import secrets
from typing import Any

import msgspec

from quire.frontend.bad_words import without_bad_words
from quire.frontend.errors import CONTEXT_LENGTH_EXCEEDED, RequestError
from quire.frontend.structured_outputs import check_structured_outputs, plain_structured_outputs
from quire.frontend.text.tokenizer import Tokenizer
from quire.protocol.messages import LOGIT_BIAS, MAX_SEED, SAMPLING_LENGTHS, SAMPLING_RANGES, SamplingParams

__all__ = [
    "SamplingParams",
    "SeedSource",
    "answer_room",
    "check_length",
    "engine_params",
    "fitted",
    "ranks",
    "validate",
]

_UNLIMITED_ANSWER = 4  # the part of the context that is kept free for one: a quarter

_TYPES: dict[str, Any] = {field.name: field.type for field in msgspec.structs.fields(SamplingParams)}


def validate(params: SamplingParams, *, vocab_size: int | None = None) -> SamplingParams:
    """Check `params` and return a copy in the plain form: `stop` a list of strings, `top_k` 0 when off.

    Token ids are checked when `vocab_size` is given. Raises `ValueError` that names the field, what was given and
    what is allowed. `check_length` checks what depends on the prompt.
    """
    if not isinstance(params, SamplingParams):
        raise TypeError(f"sampling_params is a {type(params).__name__}; give a SamplingParams")
    params = _plain(params)
    for name, allowed in SAMPLING_RANGES.items():
        allowed.check(name, getattr(params, name))
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise ValueError(
            f"min_tokens={params.min_tokens} is more than max_tokens={params.max_tokens}; lower it, or raise max_tokens"
        )
    if params.structured_outputs is not None:
        check_structured_outputs(params.structured_outputs)
    _check_several(params)
    _check_texts(params)
    _check_token_ids(params, vocab_size)
    return params


def check_length(
    params: SamplingParams, num_prompt_tokens: int, max_model_len: int, pool_tokens: int | None = None
) -> None:
    """Raise `RequestError` when the prompt and `max_tokens` do not fit the context, or the prompt not the KV memory.

    `pool_tokens`: tokens that the KV pages of the whole engine hold. "This model's maximum context length is" are
    OpenAI's words, by which clients recognize the error.
    """
    context = f"this model's maximum context length is {max_model_len} tokens"
    room = max_model_len - num_prompt_tokens
    if pool_tokens is not None and num_prompt_tokens >= pool_tokens:
        raise RequestError(
            f"a prompt of {num_prompt_tokens} tokens can never be served: the engine's KV pages hold {pool_tokens}; "
            f"shorten it to {pool_tokens - 1} or less, or start the engine with more KV memory",
            code=CONTEXT_LENGTH_EXCEEDED,
        )
    if room < 1:
        raise RequestError(
            f"the prompt has {num_prompt_tokens} tokens, and {context}; "
            f"shorten it to {max_model_len - 1} or less, so that a token can follow",
            code=CONTEXT_LENGTH_EXCEEDED,
        )
    for name in ("max_tokens", "min_tokens"):
        if (value := getattr(params, name) or 0) > room:
            raise RequestError(
                f"{name}={value} with a prompt of {num_prompt_tokens} tokens is too many, as {context}; "
                f"lower {name} to {room} or less",
                code=CONTEXT_LENGTH_EXCEEDED,
            )


def answer_room(params: SamplingParams, max_model_len: int) -> int:
    """Return the tokens of the context that an answer may need: a part of it without a limit that is below it."""
    if params.max_tokens is not None and params.max_tokens < max_model_len:
        return params.max_tokens
    return max(1, min(params.min_tokens, max_model_len - 1), max_model_len // _UNLIMITED_ANSWER)


def fitted(params: SamplingParams, num_prompt_tokens: int, max_model_len: int) -> SamplingParams:
    """Return the parameters without a `max_tokens` beyond the context, which ends an answer there anyway."""
    room = max_model_len - num_prompt_tokens
    if room < 1 or params.max_tokens is None or params.max_tokens <= room:
        return params
    return msgspec.structs.replace(params, max_tokens=None, min_tokens=min(params.min_tokens, room))


class SeedSource:
    """Source of seeds for requests that have none, so that a resubmission samples the same tokens.

    With the same `seed` the n-th such request always gets the same one.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(secrets.randbits(64) if seed is None else seed)

    def next(self) -> int:
        """Return the next seed, in `[0, 2**62)`."""
        return self._random.getrandbits(62)


def engine_params(params: SamplingParams, seed: int, tokenizer: Tokenizer | None) -> list[SamplingParams]:
    """Return the parameters of the engine requests that carry out `params`: completion `i` has the seed `seed + i`.

    There are `best_of` requests, which all report log probabilities, or else `n`; a beam search is a single one. So
    completion `i` of a request with seed `s` has the tokens of a request of its own with seed `s + i`. Parameters of
    text are left out; `bad_words` become a grammar; only completion 0 asks for `prompt_logprobs`. Raises `ValueError`
    for `stop` or `bad_words` without a tokenizer, and for a bad word that has no tokens.
    """
    if params.stop and tokenizer is None:
        raise ValueError(f"stop={params.stop!r} needs a tokenizer; use stop_token_ids")
    first = msgspec.structs.replace(
        without_bad_words(params, tokenizer),
        n=params.n if params.beam_width else 1,
        best_of=None,
        logprobs=0 if params.logprobs is None and ranks(params) else params.logprobs,
        seed=seed,
        stop=None,
        detokenize=True,
        skip_special_tokens=True,
        spaces_between_special_tokens=True,
        include_stop_str_in_output=False,
    )
    count = 1 if params.beam_width else params.best_of or params.n
    others = (
        msgspec.structs.replace(first, seed=(seed + i) % (MAX_SEED + 1), prompt_logprobs=None) for i in range(1, count)
    )
    return [first, *others]


def ranks(params: SamplingParams) -> bool:
    """Return True if the completions to return are known only when all have ended."""
    return params.best_of is not None or params.beam_width > 0


def _plain(params: SamplingParams) -> SamplingParams:
    """Return a copy with every field of its declared type. Raises `ValueError` for one of another type or too long."""
    values: dict[str, Any] = {name: getattr(params, name) for name in _TYPES}
    if isinstance(values["stop"], str):
        values["stop"] = [values["stop"]]
    for name, most in SAMPLING_LENGTHS.items():  # first, since all that follows takes time for each entry
        most.check(name, values[name])
    if values["top_k"] == -1:
        values["top_k"] = 0
    values["structured_outputs"] = plain_structured_outputs(values["structured_outputs"])
    for name, expected in _TYPES.items():
        try:
            values[name] = msgspec.convert(values[name], expected)
        except msgspec.ValidationError as error:
            raise ValueError(f"{name}={values[name]!r} is of the wrong type: {error}") from None
    return SamplingParams(**values)


def _check_several(params: SamplingParams) -> None:
    if params.best_of is not None and params.best_of < params.n:
        raise ValueError(f"best_of={params.best_of} is less than n={params.n}; raise it, or lower n")
    if not params.beam_width:
        return
    if params.n > params.beam_width:
        raise ValueError(f"n={params.n} is more than beam_width={params.beam_width}; lower it, or raise beam_width")
    for name in ("stop", "bad_words", "best_of", "structured_outputs"):
        if (value := getattr(params, name)) not in (None, []):
            raise ValueError(f"{name}={value!r} has no meaning in a beam search; leave it out, or set beam_width=0")


def _check_texts(params: SamplingParams) -> None:
    for name, texts in (("stop", params.stop), ("bad_words", params.bad_words)):
        if any(not text.strip() if name == "bad_words" else not text for text in texts or ()):
            raise ValueError(f"{name}={texts!r} holds an empty string; leave it out")
        if any("\ud800" <= character <= "\udfff" for text in texts or () for character in text):
            raise ValueError(f"{name}={texts!r} holds a lone surrogate, which no text contains; leave it out")
    if params.stop and not params.detokenize:
        raise ValueError(f"stop={params.stop!r} needs text, but detokenize=False; use stop_token_ids, or detokenize")


def _check_token_ids(params: SamplingParams, vocab_size: int | None) -> None:
    for name in ("allowed_token_ids", "bad_words_token_ids", "stop_token_ids", "logit_bias"):
        value = getattr(params, name)
        if value is None:
            continue
        lists = value if name == "bad_words_token_ids" else [value]
        if (name == "allowed_token_ids" and not value) or (name == "bad_words_token_ids" and not all(lists)):
            raise ValueError(f"{name}={value!r} allows nothing; give at least one token id, or None")
        lowest = min((min(tokens) for tokens in lists if tokens), default=0)
        highest = max((max(tokens) for tokens in lists if tokens), default=0)
        if lowest < 0 or (vocab_size is not None and highest >= vocab_size):
            last = "vocab_size - 1" if vocab_size is None else str(vocab_size - 1)
            raise ValueError(f"{name} names token id {lowest if lowest < 0 else highest}; ids go from 0 to {last}")
    for token, bias in (params.logit_bias or {}).items():
        LOGIT_BIAS.check(f"logit_bias[{token}]", bias)
