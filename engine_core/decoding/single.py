"""A single sequence: one token a step, or more where a grammar forces them."""

from __future__ import annotations

from quire.engine_core.decoding.stopping import end_output
from quire.engine_core.request import Decoding, Request, StepOutcome
from quire.engine_core.validation import RejectedError, check_generation
from quire.kernels.runner import PoolingConfig, SamplingConfig
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import EngineCoreOutput, EngineCoreRequest, EventType, TokenLogprobs

_INT32_MAX = 2**31 - 1
_LEAST_TOP_P = 1e-9  # below it only the likeliest token is left, which has at least its share of the vocabulary


class SingleSequence(Decoding):
    """One sequence, which goes on until a token, its grammar or a length ends it."""

    __slots__ = ("num_accepted_drafts", "num_rejected_drafts")

    takes_spans = True

    def __init__(self, message: EngineCoreRequest, limits: EngineShape) -> None:
        super().__init__(message, limits)
        self.num_accepted_drafts = self.num_rejected_drafts = 0

    @staticmethod
    def check(message: EngineCoreRequest, limits: EngineShape) -> None:
        """Check everything that a sequence is sampled by."""
        sampling = message.sampling_params
        if sampling.n != 1:
            raise RejectedError(
                f"n={sampling.n}: the engine gives one answer a request; send a request for each of them"
            )
        check_generation(message, limits)
        if sampling.length_penalty != 1.0 or sampling.early_stopping is not False:
            raise RejectedError(
                "length_penalty and early_stopping belong to a beam search; set beam_width, or omit them"
            )

    def open(self, request: Request) -> int:
        """Open the sequence with the request's sampling state and token constraint."""
        return open_sequence(request, sampling=sampling_config(request))

    def take(self, request: Request, row: int, outcome: StepOutcome) -> EngineCoreOutput | None:
        """Cut the span at the first token that ends the request. This is the per-token path: keep it short."""
        span = outcome.token_ids[row]
        if not span:  # amid the prompt, or the token mask was late
            return None
        num_tokens, stop, limit = request.num_tokens, request.stop.token_ids, request.stop.token_limit
        is_last = is_cut = False
        for token_id in span:
            num_tokens += 1
            if token_id in stop or num_tokens >= limit:
                is_last, is_cut = True, num_tokens < request.num_tokens + len(span)
                del span[num_tokens - request.num_tokens :]
                break
        if outcome.num_drafts and (num_drafts := outcome.num_drafts[row]):
            outcome.accepted[row] = accepted = min(num_drafts, len(span) - 1)
            self.num_accepted_drafts += accepted
            self.num_rejected_drafts += num_drafts - accepted
        request.num_tokens = num_tokens
        output = EngineCoreOutput(request.request_id, span)
        if request.events or request.prompt_logprobs is not None:
            if request.num_output_tokens == len(span):
                request.record(EventType.FIRST_TOKEN, outcome.now)
            request.attach_to(output)
        sampling = request.message.sampling_params
        if sampling.logprobs is not None and (entries := outcome.logprobs(row)) is not None:
            output.new_logprobs = [TokenLogprobs(*entry) for entry in entries[: len(span)]]
        if is_last or (request.constraint is not None and request.constraint.has_ended):
            end_output(request, output, self._limits, outcome.now, is_cut=is_cut)
            output.num_accepted_drafts = self.num_accepted_drafts
            output.num_rejected_drafts = self.num_rejected_drafts
            outcome.ended.append((request, output))
        return output


def open_sequence(
    request: Request,
    token_ids: list[int] | None = None,
    *,
    sampling: SamplingConfig | None = None,
    pooling: PoolingConfig | None = None,
    segment: int = 0,
) -> int:
    """Open a slot with the prompt, or these tokens, without pages. Raises ValueError if the executor rejects it."""
    slot = request.sequences.open(
        [*request.prompt_token_ids, *request.message.generated_token_ids] if token_ids is None else token_ids,
        request.num_prompt_tokens,
        sampling=sampling,
        cache_salt=request.cache_salt,
        pooling=pooling,
        constraint=request.constraint,
        segment=segment,
    )
    request.sequences.set_adapter(slot, request.adapter)
    return slot


def sampling_config(request: Request) -> SamplingConfig:
    """Return the native sampling configuration; eos tokens are among those that stop."""
    sampling = request.sampling
    is_greedy = sampling.top_p < _LEAST_TOP_P
    return SamplingConfig(
        temperature=0.0 if is_greedy else sampling.temperature,
        top_k=min(sampling.top_k, _INT32_MAX),
        top_p=1.0 if is_greedy else sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=list((sampling.logit_bias or {}).items()),
        allowed_token_ids=sampling.allowed_token_ids or [],
        bad_words_token_ids=sampling.bad_words_token_ids or [],
        stop_token_ids=sorted(request.stop.token_ids),
        min_tokens=sampling.min_tokens,
        seed=request.seed,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
    )
