"""The answers of llama.cpp's API, and their events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from quire.frontend.http.dialects.llama_cpp.cutoff import Cutoff
from quire.frontend.http.dialects.llama_cpp.sampling import GenerationSettings
from quire.frontend.http.openai.logprobs import TokenWriter, ranked
from quire.frontend.http.transport.responses import encoded
from quire.frontend.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from quire.frontend.text.offsets import TextOffsets

NO_SLOT = -1
"""The slot of an answer: requests have none."""


class LikelyToken(msgspec.Struct):
    """One of the likeliest tokens at a position. `bytes`: its UTF-8, empty if that is not known."""

    id: int
    token: str
    bytes: list[int]
    logprob: float


class TokenProbability(msgspec.Struct):
    """The token at a position, and the likeliest ones."""

    id: int
    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[LikelyToken]


class Timings(msgspec.Struct, kw_only=True):
    """Tokens and times of an answer: `cache_n` tokens of the prompt came from the cache, `prompt_n` were computed.

    A rate or a time per token is 0 where nothing was measured. Times until the first token are of the prompt.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int | UnsetType = UNSET
    draft_n_accepted: int | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """An answer, or an event of a stream of it; only the last has the fields from `model` on.

    `tokens_evaluated`: tokens of the prompt, of which `tokens_cached` came from the cache. `truncated`: the context was
    full. Only the first completion of a prompt has the `prompt`. With `response_fields` an answer has these only.
    """

    index: int | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tokens: list[int] | UnsetType = UNSET
    stop: bool | UnsetType = UNSET
    id_slot: int | UnsetType = UNSET
    tokens_predicted: int | UnsetType = UNSET
    tokens_evaluated: int | UnsetType = UNSET
    completion_probabilities: list[TokenProbability] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    model: str | UnsetType = UNSET
    generation_settings: GenerationSettings | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    has_new_line: bool | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: Literal["none", "eos", "limit", "word"] | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET


class CompletionWriter:
    """Writes one completion from its increments. `leaves_out`: without any token, since only the prompt is wanted.

    `offsets` are the places of its tokens: a token has its probabilities beside the text that begins with it, and none
    if that text is cut off, as a stop string is.
    """

    def __init__(
        self,
        index: int,
        tokens: TokenWriter,
        cutoff: Cutoff,
        num_probs: int,
        offsets: TextOffsets,
        *,
        leaves_out: bool,
    ) -> None:
        self.has_ended = False
        self._index = index
        self._tokens = tokens
        self._cutoff = cutoff
        self._num_probs = num_probs
        self._offsets = offsets
        self._num_characters = 0
        self._held: list[tuple[int, TokenProbability]] = []  # of tokens without text so far, by their places
        self._leaves_out = leaves_out
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._probabilities: list[TokenProbability] = []
        self._reason: str | None = None
        self._stop_reason: int | str | None = None
        self._drafts = (0, 0)  # accepted, and all

    def take(self, output: RequestOutput, completion: CompletionOutput, *, with_timings: bool) -> Completion | None:
        """Return the event of an increment, None if it adds nothing."""
        text, token_ids, positions = completion.text, completion.token_ids, completion.logprobs
        if self._leaves_out:
            text, token_ids, positions = "", [], None
        text, is_cut = self._cutoff.feed(text)
        self._texts.append(text)
        self._num_characters += len(text)
        self._token_ids += token_ids
        self._drafts = completion.num_accepted_drafts, completion.num_accepted_drafts + completion.num_rejected_drafts
        self._reason = "length" if is_cut else completion.finish_reason
        self._stop_reason = None if is_cut else completion.stop_reason
        self.has_ended = self._reason is not None
        self._hold(positions or [], token_ids)
        added = self._released(everything=self.has_ended and not (is_cut or isinstance(self._stop_reason, str)))
        self._probabilities += added
        if not (text or token_ids or added):
            return None
        return Completion(
            index=self._index,
            content=text,
            tokens=token_ids,
            stop=False,
            id_slot=NO_SLOT,
            tokens_predicted=len(self._token_ids),
            tokens_evaluated=len(output.prompt_token_ids),
            completion_probabilities=added if self._num_probs else UNSET,
            timings=self._timings(output) if with_timings else UNSET,
        )

    def whole(
        self,
        output: RequestOutput,
        prompt: str | None,
        settings: GenerationSettings,
        *,
        is_last_event: bool = False,
        with_tokens: bool = False,
    ) -> Completion:
        """Return the complete answer. `is_last_event`: without what the events before have."""
        text, context = "".join(self._texts), len(output.prompt_token_ids) + len(self._token_ids)
        shows_probabilities = self._num_probs and not is_last_event
        return Completion(
            index=self._index,
            content="" if is_last_event else text,
            tokens=self._token_ids if with_tokens and not is_last_event else [],
            stop=True,
            id_slot=NO_SLOT,
            tokens_predicted=len(self._token_ids),
            tokens_evaluated=len(output.prompt_token_ids),
            completion_probabilities=self._probabilities if shows_probabilities else UNSET,
            timings=self._timings(output),
            model=settings.model,
            generation_settings=settings,
            prompt=UNSET if prompt is None else prompt,
            has_new_line="\n" in text,
            truncated=self._reason == "length" and context >= settings.n_ctx,
            stop_type=self._stop_type,
            stopping_word=self._stop_reason if isinstance(self._stop_reason, str) else "",
            tokens_cached=output.num_cached_tokens,
        )

    @property
    def _stop_type(self) -> Literal["none", "eos", "limit", "word"]:
        if self._leaves_out or self._reason in {"length", "timeout"}:
            return "limit"
        if self._reason != "stop":
            return "none"
        return "word" if isinstance(self._stop_reason, str) else "eos"

    def _hold(self, positions: Sequence[PositionLogprobs], token_ids: Sequence[int]) -> None:
        """Take the probabilities of the next tokens."""
        if not self._num_probs:
            return
        for token_id, position in zip(token_ids, positions, strict=True):
            self._held.append((self._offsets.place(token_id), self._probability(token_id, position)))

    def _released(self, *, everything: bool) -> list[TokenProbability]:
        """Return the probabilities held of tokens whose text has begun, or of all, and hold them no more."""
        count = sum(everything or place < self._num_characters for place, _ in self._held)
        released, self._held = self._held[:count], self._held[count:]
        return [probability for _, probability in released]

    def _probability(self, token_id: int, position: PositionLogprobs) -> TokenProbability:
        likeliest = [self._likely(other, entry.logprob) for other, entry in ranked(position, self._num_probs)]
        own = self._likely(token_id, position[token_id].logprob)
        return encoded(TokenProbability(**msgspec.structs.asdict(own), top_logprobs=likeliest))

    def _likely(self, token_id: int, logprob: float) -> LikelyToken:
        return LikelyToken(token_id, self._tokens.text(token_id), self._tokens.bytes(token_id) or [], logprob)

    def _timings(self, output: RequestOutput) -> Timings:
        metrics, count = output.metrics, len(self._token_ids)
        computed = len(output.prompt_token_ids) - output.num_cached_tokens
        prompt_ms = _milliseconds(metrics.first_scheduled_time, metrics.first_token_time)
        end = metrics.finished_time if metrics.finished_time is not None else time.monotonic()
        predicted_ms = _milliseconds(metrics.first_token_time, end)
        accepted, drafts = self._drafts
        return Timings(
            cache_n=output.num_cached_tokens,
            prompt_n=computed,
            prompt_ms=prompt_ms,
            prompt_per_token_ms=_ratio(prompt_ms, computed),
            prompt_per_second=_ratio(1e3 * computed, prompt_ms),
            predicted_n=count,
            predicted_ms=predicted_ms,
            predicted_per_token_ms=_ratio(predicted_ms, count),
            predicted_per_second=_ratio(1e3 * count, predicted_ms),
            draft_n=drafts or UNSET,
            draft_n_accepted=accepted if drafts else UNSET,
        )


def _milliseconds(begin: float | None, end: float | None) -> float:
    return 0.0 if begin is None or end is None else max(0.0, round(1e3 * (end - begin), 3))


def _ratio(value: float, by: float) -> float:
    return round(value / by, 3) if by else 0.0


def chosen(answer: Completion, fields: Sequence[str] | None) -> Any:
    """Return an answer, or with `fields` an object of those that it has; one such as `timings/prompt_n` is nested."""
    if not fields:
        return answer
    whole, picked = msgspec.json.decode(msgspec.json.encode(answer), type=dict[str, Any]), {}
    for path in fields:
        value: Any = whole
        for key in path.split("/", maxsplit=8):
            value = value.get(key, UNSET) if isinstance(value, dict) else UNSET
        if value is not UNSET:
            picked[path] = value
    return picked
