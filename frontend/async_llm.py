"""`AsyncLLM`: many streams at once on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import itertools
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal, Self, cast

import msgspec

from quire.frontend.beam_search import BeamSearchOutput, BeamSearchParams, beam_search_output
from quire.frontend.client.engine import Engine
from quire.frontend.client.observer import Observer, TraceContext
from quire.frontend.client.request import Service
from quire.frontend.client.request_table import RequestTable
from quire.frontend.client.streams import Mailbox, Streams
from quire.frontend.embedding import PoolingParams
from quire.frontend.engine_args import EngineArgs, takes_engine_args
from quire.frontend.errors import EngineDeadError
from quire.frontend.outputs import EmbeddingRequestOutput, RequestOutput
from quire.frontend.sampling import SamplingParams, ranks
from quire.frontend.text.chat.answer_reader import AnswerReader
from quire.frontend.text.chat.refusal import tool_at_fault
from quire.frontend.text.chat.tools import ToolUse, check_tools
from quire.frontend.text.prompts import Message, Prompt, PromptType
from quire.frontend.text.tokenizer import Tokenizer
from quire.protocol.messages import EngineSnapshot, Ready, StepTrace

OutputKind = Literal["cumulative", "delta"]

_WATCH_SECONDS = 0.25
LONG_TEXT = 20_000  # characters or token ids, that take a while to be read: not on the event loop
_LONGEST_STEP = 30.0  # seconds; a step that has so many prompt tokens that it takes longer is not worth its budget


class AsyncLLM(AnswerReader):
    """A model that streams, in an engine process of its own or in a running one; arguments as of `LLM`.

    It works on one event loop at a time, asyncio's or uvloop's (`uvloop.run(main())`, as the command line has it). Use
    it in an `async with` or call `close`; otherwise the engine ends when the object is collected, or with the program.
    Construction waits until the engine is ready.
    """

    @takes_engine_args(EngineArgs)
    def __init__(self, model: str | None = None, **options: Any) -> None:
        self._mailbox = Mailbox()
        self._engine = Engine(EngineArgs.from_options(model, options), self._mailbox.put)
        self._finalizer = weakref.finalize(self, self._engine.close)
        self._table = RequestTable(self._engine.client.send, self._engine.eos_token_ids)
        self._streams = Streams(self._mailbox, self._table)
        self._request_ids = itertools.count()

    def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        output_kind: OutputKind = "cumulative",
        truncate_prompt_tokens: int | None = None,
        add_special_tokens: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        timeout: float | None = None,
        trace: TraceContext | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the outputs of one prompt; the last is `finished`.

        An output is all so far ("cumulative") or what is new ("delta"). A consumer that is slower than the engine
        finds the increments merged in its next output. With `best_of` and in a beam search there is one output, at the
        end. When it stops iterating, is cancelled or goes away, the
        request is aborted. While iterating, raises `RequestError` (a `ValueError`) for bad input or when the engine
        fails the request, and `EngineDeadError` when the engine dies.

        `truncate_prompt_tokens`: only so many tokens of the prompt count, the last ones; -1 for what the context can
        hold. `add_special_tokens`: whether a text gets those that the tokenizer puts around it.

        `priority`: the lower, the sooner, under the policy of that name. `cache_salt`: KV pages are shared only with
        requests of the same salt. `timeout`: seconds after which the request ends with finish reason "timeout", even
        before it has started. `trace`: for spans, see `add_observer`.
        """

        def make(params: SamplingParams) -> tuple[Prompt, SamplingParams]:
            made = self._engine.prompt(
                prompt, truncate_prompt_tokens=truncate_prompt_tokens, add_special_tokens=add_special_tokens
            )
            return made, params

        service = Service(priority, cache_salt, timeout, trace or TraceContext("text_completion"))
        return self._stream(make, _are_long([prompt]), sampling_params, request_id, output_kind, service)

    async def embed(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        add_special_tokens: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        timeout: float | None = None,  # noqa: ASYNC109 - it is the engine's
        trace: TraceContext | None = None,
    ) -> EmbeddingRequestOutput:
        """Compute the embedding of one prompt, which may be as long as the context.

        When it is cancelled, the request is aborted. Raises as `generate`; also `RequestError` when the request is
        aborted, and `RequestTimeoutError` when its time is up, since half an embedding is none.
        """
        arrived = time.monotonic()
        params = self._engine.pooling(pooling_params)
        (made,) = await self.prompts(
            [prompt], truncate_prompt_tokens=truncate_prompt_tokens, add_special_tokens=add_special_tokens
        )
        service = Service(priority, cache_salt, timeout, trace or TraceContext("embeddings"))
        request = self._engine.embedding(self._name(request_id), made, params, service, arrived)
        stream = self._streams.open(request)
        try:
            while not request.finished:
                await stream.growth()
        finally:
            self._streams.close(stream)
        if request.error is not None:
            raise copy.copy(request.error)
        return request.output()

    async def beam_search(
        self,
        prompt: PromptType,
        params: BeamSearchParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        timeout: float | None = None,  # noqa: ASYNC109 - it is the engine's
    ) -> BeamSearchOutput:
        """Search the `beam_width` likeliest continuations of one prompt; errors as of `generate`."""
        stream = self.generate(
            prompt,
            params.sampling_params(),
            request_id,
            priority=priority,
            cache_salt=cache_salt,
            timeout=timeout,
        )
        async with contextlib.aclosing(stream):
            outputs = [output async for output in stream]
        return beam_search_output(outputs[-1], params)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        output_kind: OutputKind = "cumulative",
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        truncate_prompt_tokens: int | None = None,
        add_special_tokens: bool = False,
        priority: int = 0,
        cache_salt: str = "",
        timeout: float | None = None,
        trace: TraceContext | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the answer to a conversation, written as a prompt by the chat template; else as `generate`.

        The template writes special tokens itself; `add_special_tokens` puts the tokenizer's around them as well.

        `tools`, `tool_choice` and `parallel_tool_calls` are OpenAI's; what `structured_outputs` asks for is asked of
        what the model says, after its thoughts and unless it calls a tool. The text is what the model writes: `parse`
        tells thoughts, words and calls apart, and so does `answer_format.parser` while they arrive. Raises `ToolError`
        (a `ValueError`) for tools that can't be used.
        """
        use = check_tools(tools, tool_choice, parallel_tool_calls)
        make = functools.partial(
            self._engine.chat_question,
            messages,
            tools=use,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
            truncate_prompt_tokens=truncate_prompt_tokens,
            add_special_tokens=add_special_tokens,
        )
        service = Service(priority, cache_salt, timeout, trace or TraceContext("chat"))
        return self._stream(make, _is_long_chat(messages), sampling_params, request_id, output_kind, service, use)

    async def abort(self, request_id: str) -> None:
        """End a request: its stream gives what there is, with finish reason "abort". Nothing if it has ended."""
        self._streams.abort(request_id)

    def add_observer(self, observer: Observer) -> None:
        """From now on `observer` is told of each request of this client: `quire.frontend.metrics` has some."""
        self._table.add_observer(observer)

    async def stats(self) -> dict[str, Any]:
        """The engine as it is now: the fields of `SchedulerStats`, and counters of its socket.

        `deferred` of those that wait do so for something other than room; `totals` are the fields of `EngineTotals`.
        """
        return cast("dict[str, Any]", await asyncio.wrap_future(self._engine.client.call("stats")))

    async def snapshot(self) -> EngineSnapshot:
        """The engine at this moment: its last step, who waits, what its KV pages hold. Much more than `stats`."""
        result = await asyncio.wrap_future(self._engine.client.call("snapshot"))
        return msgspec.convert(result, EngineSnapshot)

    async def start_trace(self, on_step: Callable[[StepTrace], None]) -> None:
        """From now on, `on_step` gets what each step of the engine does, for all its clients, until `stop_trace`.

        It is called on the running event loop. Traces that this client is too slow for are lost, see
        `StepTrace.dropped`.
        """
        loop = asyncio.get_running_loop()

        def deliver(step: StepTrace) -> None:
            with suppress(RuntimeError):  # the loop is closed, and who listened there is gone
                loop.call_soon_threadsafe(on_step, step)

        await asyncio.wrap_future(self._engine.client.start_trace(deliver))

    async def stop_trace(self) -> None:
        """End it: a trace marked as the `last` follows those that are under way."""
        await asyncio.wrap_future(self._engine.client.stop_trace())

    async def reset_prefix_cache(self) -> bool:
        """Empty the engine's prefix cache."""
        await asyncio.wrap_future(self._engine.client.call("reset_cache"))
        return True

    async def pin_prefix(self, prompt: PromptType, *, cache_salt: str = "") -> int:
        """Compute a prompt and keep its KV pages in the cache; returns how many of its tokens are kept, in full pages.

        They stay until `unpin_prefix`, `reset_prefix_cache`, or a running request would have to give way to them.
        """
        token_ids = self._engine.prompt(prompt).token_ids
        params = SamplingParams(max_tokens=1)
        async for _ in self.generate({"prompt_token_ids": token_ids}, params, cache_salt=cache_salt):
            pass
        call = self._engine.client.call("pin_prefix", token_ids, cache_salt)
        return cast("int", await asyncio.wrap_future(call))

    async def unpin_prefix(self, prompt: PromptType, *, cache_salt: str = "") -> bool:
        """Let a pinned prompt be evicted again; returns whether it was pinned."""
        token_ids = self._engine.prompt(prompt).token_ids
        return cast("bool", await asyncio.wrap_future(self._engine.client.call("unpin_prefix", token_ids, cache_salt)))

    async def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
    ) -> Prompt:
        """The prompt that `chat` would send for a conversation. Raises `ValueError`."""
        make = functools.partial(
            self._engine.chat_prompt,
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            add_special_tokens=add_special_tokens,
        )
        return await asyncio.to_thread(make) if _is_long_chat(messages) else make()

    async def prompts(
        self,
        prompts: Sequence[PromptType],
        *,
        truncate_prompt_tokens: int | None = None,
        add_special_tokens: bool = True,
    ) -> list[Prompt]:
        """What `generate` and `embed` would send for these prompts; they take it as it is. Raises `ValueError`.

        Prompts that are short alone may be long together: then they become tokens on another thread, while streams
        go on.
        """
        make_one = functools.partial(
            self._engine.prompt, truncate_prompt_tokens=truncate_prompt_tokens, add_special_tokens=add_special_tokens
        )

        def make() -> list[Prompt]:
            return [make_one(prompt) for prompt in prompts]

        return await asyncio.to_thread(make) if _are_long(prompts) else make()

    async def check_health(self) -> None:
        """Raise `EngineDeadError` if the engine is dead, or has neither stepped nor been idle for half a minute."""
        if (error := self.dead_error) is not None:
            raise EngineDeadError(*error.args)
        if (age := self._engine.client.last_step_age) > _LONGEST_STEP:
            raise EngineDeadError(f"the engine at {self.engine_address} has not stepped for {age:.0f} s")

    async def wait_dead(self) -> EngineDeadError:
        """Wait until the engine is dead; returns how it died."""
        while (error := self.dead_error) is None:  # noqa: ASYNC110 - it is told on another thread
            await asyncio.sleep(_WATCH_SECONDS)
        return error

    @property
    def dead_error(self) -> EngineDeadError | None:
        """How the engine died, None while it lives."""
        return self._engine.client.dead

    @property
    def model(self) -> str:
        """The folder of the model, on the engine's machine."""
        return self._engine.model

    @property
    def max_model_len(self) -> int:
        """The context length: most tokens of a prompt and its answer."""
        return self._engine.client.ready.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids go from 0 to one less."""
        return self._engine.client.ready.vocab_size

    @property
    def engine_info(self) -> Ready:
        """What the engine has said of itself: model, context length, KV pages."""
        return self._engine.client.ready

    @property
    def engine_address(self) -> str:
        """Where the engine listens; others can attach there."""
        return self._engine.client.address

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if it has one."""
        return self._engine.tokenizer

    async def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises `ValueError` when there is none."""
        return self._engine.require_tokenizer()

    def close(self) -> None:
        """Leave the engine, and end it if it was started here. Open streams end with `EngineDeadError`. Idempotent."""
        if self._finalizer.alive:
            self._mailbox.put(EngineDeadError("the AsyncLLM was closed"))
            self._finalizer()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def _name(self, request_id: str | None) -> str:
        return f"request-{next(self._request_ids)}" if request_id is None else request_id

    async def _stream(
        self,
        make: Callable[[SamplingParams], tuple[Prompt, SamplingParams]],
        is_long: bool,
        params: SamplingParams | None,
        request_id: str | None,
        output_kind: OutputKind,
        service: Service,
        tools: ToolUse | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        if output_kind not in ("cumulative", "delta"):
            raise ValueError(f"output_kind={output_kind!r} is not known; it can be 'cumulative' or 'delta'")
        arrived = time.monotonic()  # the time that a long prompt takes to become tokens is part of the TTFT
        checked = self._engine.params(params)
        if output_kind == "delta" and ranks(checked):
            raise ValueError("best_of and beam search choose at the end, so there are no deltas; use 'cumulative'")
        prompt, own = await asyncio.to_thread(make, checked) if is_long else make(checked)
        request = self._engine.request(self._name(request_id), prompt, own, service, arrived)
        stream = self._streams.open(request)
        try:
            finished = False
            while not finished:
                await stream.growth()
                if request.error is not None:
                    at_fault = await asyncio.to_thread(tool_at_fault, request.error, tools) if tools else None
                    raise at_fault or copy.copy(request.error)  # one of its own for each, with its own traceback
                if not request.has_news:
                    continue
                output = request.output(output_kind == "delta")
                finished = output.finished
                yield output
        finally:
            self._streams.close(stream)


def _are_long(prompts: Sequence[PromptType]) -> bool:
    parts = (part for prompt in prompts for part in (prompt.values() if isinstance(prompt, Mapping) else [prompt]))
    return sum(len(part) for part in parts if isinstance(part, (str, list))) > LONG_TEXT


def _is_long_chat(messages: Sequence[Message]) -> bool:
    return sum(len(str(message)) for message in messages) > LONG_TEXT
