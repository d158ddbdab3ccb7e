"""`POST /v1/completions`: continue texts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Annotated, Any, ClassVar, cast

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.client.observer import TraceContext
from quire.frontend.http.errors import bad_request, errors_at, grammar_errors_at
from quire.frontend.http.generation import Outputs, all_of, check_deadline, check_lengths, grown, merged
from quire.frontend.http.openai.answer_route import AnswerRoute, route_of_answer
from quire.frontend.http.openai.fields import (
    REFUSED,
    GenerationFields,
    ResponseFormat,
    StreamOptions,
    known_end,
    sampling_params,
    wanted_format,
)
from quire.frontend.http.openai.logprobs import CompletionLogprobs, TokenWriter, prompt_logprobs
from quire.frontend.http.service import Endpoints, ModelService
from quire.frontend.http.shared_fields import RESPONSE_FORMAT, STRUCTURED_OUTPUTS, only_one
from quire.frontend.http.transport.bodies import NOT_EMPTY, Refusals
from quire.frontend.http.transport.responses import encoded, new_id
from quire.frontend.http.transport.sse import DONE, event
from quire.frontend.http.usage import CompletionUsage, TokenTally, usage_of
from quire.frontend.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from quire.frontend.text.offsets import PromptOffsets, TextOffsets
from quire.frontend.turns import free, in_turns
from quire.protocol.messages import SamplingParams

GivenPrompts = str | Annotated[tuple[str | int | tuple[int, ...], ...], NOT_EMPTY]
"""Prompts of a body; the garbage collector goes through each list again and again, but not through tuples."""

_CHECKED_AT_ONCE = 1 << 14  # prompts or tokens


class CompletionBody(GenerationFields, kw_only=True):
    """The body of a completion, with OpenAI's and vLLM's fields."""

    refused: ClassVar[Refusals] = {
        **REFUSED,
        "prompt_embeds": ((), "give the prompt as text or token ids"),
        "suffix": (("",), "fill-in-the-middle is not available; give the preceding text as prompt"),
    }

    prompt: GivenPrompts
    max_tokens: Annotated[int, Meta(ge=0)] | None = None  # 0 is allowed only with echo
    echo: bool | None = None
    logprobs: int | None = None
    response_format: ResponseFormat | None = None


class TextChoice(msgspec.Struct, kw_only=True):
    """One completion of one prompt, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    route: AnswerRoute | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: list[Any] | msgspec.UnsetType | None = msgspec.UNSET


class TextCompletion(msgspec.Struct, kw_only=True):
    """The completions of all prompts, or one event of a stream of them."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: CompletionUsage | msgspec.UnsetType | None = msgspec.UNSET


class CompletionsEndpoint(Endpoints):
    """Handler of the endpoint."""

    async def create(self, request: Request) -> Response:
        """Continue texts with a `TextCompletion`, or with a stream of them."""
        service = self._service
        body = await service.read(request, CompletionBody)
        task = CompletionTask(service, body, await prompts_of(body.prompt, "prompt"), request)
        return await service.respond(request, task.run, task.chunks() if body.stream else None)


class CompletionTask:
    """Runs the prompts of one body and writes their completions."""

    def __init__(
        self,
        service: ModelService,
        body: CompletionBody,
        prompts: Sequence[str | Sequence[int]],
        request: Request,
    ) -> None:
        self._service = service
        self._body = body
        self._prompts = prompts
        self._terms = service.terms(request, body.cache_salt, body.session)
        self._headers = request.headers
        self._id = new_id("cmpl", given=body.request_id)
        self._created = service.now()
        self._writer = TokenWriter(service.tokenizer, bool(body.return_tokens_as_token_ids))
        self._params = self._sampling_params()
        service.check_count(len(self._prompts), self._params)

    def _sampling_params(self) -> SamplingParams:
        body = self._body
        if body.logprobs is not None and body.logprobs < 0:
            raise bad_request(f"logprobs={body.logprobs} is out of range; it must be from 0 to 20", "logprobs")
        params = sampling_params(
            body, self._service.defaults, 16 if body.max_tokens is None else body.max_tokens, body.logprobs
        )
        params.structured_outputs = only_one(params.structured_outputs, wanted_format(body.response_format))
        if body.echo:
            if body.logprobs is not None and params.prompt_logprobs is None:
                params.prompt_logprobs = body.logprobs
            params.max_tokens = (
                params.max_tokens or 1
            )  # for a prompt's log probabilities alone; the sampled token is left out
        return params

    async def run(self) -> TextCompletion:
        """Return all completions."""
        async with self._blamed():
            outputs = await all_of(await self._streams("final_only"))
        choices = []
        for index, output in enumerate(outputs):
            async for completion in in_turns(output.outputs):
                choices.append(encoded(await self._whole(index, output, completion)))
                await free(completion.logprobs)
            await free(output.prompt_logprobs)
        usage = self._counted(usage_of(outputs))
        return TextCompletion(
            id=self._id, created=self._created, model=self._service.name, choices=choices, usage=usage
        )

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the completions as encoded events."""
        shown = self._body.stream_options or StreamOptions()
        usage = None if shown.include_usage else msgspec.UNSET
        tally, offsets = TokenTally(), dict[int, TextOffsets]()
        chunk = TextCompletion(id=self._id, created=self._created, model=self._service.name, choices=[], usage=usage)
        encode = msgspec.json.Encoder().encode
        seen: set[int] = set()
        ended: defaultdict[int, set[int]] = defaultdict(set)
        held: defaultdict[int, list[CompletionOutput]] = defaultdict(list)
        async with self._blamed():
            async for prompt_index, output in merged(await self._streams("delta")):
                tally.add(prompt_index, output)
                if not seen:
                    check_deadline(output)
                held[prompt_index] += grown(output, ended[prompt_index])
                if self._waits_for_prompt(output):
                    continue
                async for completion in in_turns(held.pop(prompt_index)):
                    index = prompt_index * self._params.n + completion.index
                    if self._body.logprobs is not None and index not in offsets:
                        offsets[index] = self._offsets(output)
                    begun = None if index in seen else output
                    parts = await self._parts(index, completion, offsets.get(index), begun)
                    seen.add(index)
                    if self._body.return_route and completion.finish_reason is not None:
                        parts[-1].route = route_of_answer(self._service.llm, output.metrics)
                    for choice in parts:
                        chunk.choices = [choice]
                        if shown.continuous_usage_stats:
                            chunk.usage = self._counted(tally.usage)
                        yield event(encode(chunk))
        if shown.include_usage:
            chunk.choices, chunk.usage = [], self._counted(tally.usage)
            yield event(encode(chunk))
        yield DONE

    def _blamed(self) -> AbstractAsyncContextManager[None]:
        return grammar_errors_at(STRUCTURED_OUTPUTS if self._body.response_format is None else RESPONSE_FORMAT)

    @property
    def _leaves_out_answer(self) -> bool:
        return bool(self._body.echo) and self._body.max_tokens == 0

    def _waits_for_prompt(self, output: RequestOutput) -> bool:
        """Return whether the echo's log probabilities are missing; another completion may be ahead of the first."""
        echoes = bool(self._body.echo) and self._body.logprobs is not None
        return echoes and output.prompt_logprobs is None and not output.finished

    def _counted(self, usage: CompletionUsage) -> CompletionUsage:
        """Return `usage` without the token that is left out."""
        if self._leaves_out_answer:
            usage.completion_tokens, usage.total_tokens = 0, usage.prompt_tokens
        return usage

    async def _streams(self, kind: Any) -> list[Outputs]:
        body, llm = self._body, self._service.llm
        special = body.add_special_tokens is not False
        with errors_at("prompt"):
            prompts = await self._service.prepared(self._prompts, self._params, body.truncate_prompt_tokens, special)
        check_lengths(prompts, self._params, llm.max_model_len, "prompt")
        return [
            llm.generate(
                prompt,
                self._params,
                output_kind=kind,
                truncate_prompt_tokens=body.truncate_prompt_tokens,
                add_special_tokens=special,
                priority=body.priority or 0,
                **self._terms,
                trace=TraceContext("text_completion", self._headers, self._id),
            )
            async for prompt in in_turns(prompts)
        ]

    async def _whole(self, prompt_index: int, output: RequestOutput, completion: CompletionOutput) -> TextChoice:
        body, index = self._body, prompt_index * self._params.n + completion.index
        text, token_ids = completion.text, completion.token_ids
        positions: Sequence[Any] = completion.logprobs or []
        if self._leaves_out_answer:
            text, token_ids, positions = "", [], []
        if body.echo:
            text = self._service.prompt_text(output) + text
        reason, stop = known_end(completion)
        choice = TextChoice(
            index=index, text=text, finish_reason="length" if self._leaves_out_answer else reason, stop_reason=stop
        )
        if body.logprobs is not None:
            choice.logprobs = await self._writer.completion(positions, token_ids, body.logprobs, self._offsets(output))
            if body.echo:
                choice.logprobs = await self._prompt_logprobs(output, body.logprobs) + choice.logprobs
        if body.prompt_logprobs is not None:
            choice.prompt_logprobs = await prompt_logprobs(output.prompt_logprobs)
        if body.return_token_ids:
            choice.token_ids, choice.prompt_token_ids = token_ids, output.prompt_token_ids
        if body.return_route:
            choice.route = route_of_answer(self._service.llm, output.metrics)
        return choice

    async def _parts(
        self, index: int, completion: CompletionOutput, offsets: TextOffsets | None, begun: RequestOutput | None
    ) -> list[TextChoice]:
        """Return the choices for a delta; `begun` is the output with which the completion begins, for its echo."""
        echo = [] if begun is None or not self._body.echo else [await self._echo(index, begun)]
        parts = [*echo, await self._delta(index, completion, offsets)]
        if begun is not None and self._body.return_token_ids:
            parts[0].prompt_token_ids = begun.prompt_token_ids
        return parts

    async def _echo(self, index: int, output: RequestOutput) -> TextChoice:
        """Return the prompt as the beginning of a streamed completion."""
        choice = TextChoice(index=index, text=self._service.prompt_text(output))
        if self._body.logprobs is not None:
            choice.logprobs = await self._prompt_logprobs(output, self._body.logprobs)
        if self._body.return_token_ids:
            choice.token_ids = []
        return choice

    async def _delta(self, index: int, completion: CompletionOutput, offsets: TextOffsets | None) -> TextChoice:
        if self._leaves_out_answer:
            return TextChoice(index=index, text="", finish_reason=completion.finish_reason and "length")
        reason, stop = known_end(completion)
        choice = TextChoice(index=index, text=completion.text, finish_reason=reason, stop_reason=stop)
        if self._body.logprobs is not None and offsets is not None and completion.logprobs is not None:
            choice.logprobs = await self._writer.completion(
                completion.logprobs, completion.token_ids, self._body.logprobs, offsets
            )
        if self._body.return_token_ids:
            choice.token_ids = completion.token_ids
        return choice

    def _offsets(self, output: RequestOutput) -> TextOffsets:
        """Return the places of an answer's tokens in its text, which follows the prompt's in an echo."""
        return TextOffsets(
            self._service.tokenizer,
            output.prompt_token_ids,
            len(self._service.prompt_text(output)) if self._body.echo else 0,
            skip_special_tokens=self._params.skip_special_tokens,
            spaces_between_special_tokens=self._params.spaces_between_special_tokens,
        )

    async def _prompt_logprobs(self, output: RequestOutput, top: int) -> CompletionLogprobs:
        """Return the log probabilities of a prompt's tokens, all None if time was up before they were computed."""
        token_ids = output.prompt_token_ids
        positions: Sequence[PositionLogprobs | None] = output.prompt_logprobs or [None] * len(token_ids)
        offsets = PromptOffsets(self._service.tokenizer, output.prompt)
        return await self._writer.completion(positions, token_ids, top, offsets)


async def prompts_of(given: GivenPrompts, name: str) -> Sequence[str | Sequence[int]]:
    """Return the prompts in field `name`: a text, token ids, or a list of either."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise bad_request(f"{name} is an empty list; give at least one", name)
    first = type(given[0])
    async for start in in_turns(range(0, len(given), _CHECKED_AT_ONCE)):
        part = given[start : start + _CHECKED_AT_ONCE]
        if set(map(type, part)) != {first}:
            index = start + next(index for index, prompt in enumerate(part) if type(prompt) is not first)
            raise bad_request(
                f"{name}[{index}] is of another type than {name}[0]; give a text, a list of texts, a list of token ids "
                "or a list of lists of token ids",
                name,
            )
    return [cast("Sequence[int]", given)] if first is int else cast("Sequence[str | Sequence[int]]", given)
