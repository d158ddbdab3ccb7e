"""`AsyncLLM`: concurrent streams on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import itertools
import time
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, Self, TypeVar, Unpack, cast

import msgspec

from quire.frontend.adapters import resolved_meanwhile
from quire.frontend.beam_search import BeamSearchOutput, BeamSearchParams, beam_search_output
from quire.frontend.client.engine import AnswerParsing, ConnectedEngine, TemplateOptions
from quire.frontend.client.engine_set import EngineStatus
from quire.frontend.client.observer import Observer, RequestOptions, TraceContext
from quire.frontend.client.request import PoolingParams
from quire.frontend.client.request_table import RequestTable
from quire.frontend.client.streams import DeliveryQueue, RequestStreams
from quire.frontend.engine_args import (
    DRAIN_SECONDS,
    EngineArgs,
    MadeFromEngineArgs,
    reload_arguments,
    takes_engine_args,
)
from quire.frontend.errors import EngineDeadError, make_each
from quire.frontend.lora_request import LoRARequest
from quire.frontend.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    RequestOutputKind,
)
from quire.frontend.pooling_tasks import task_of
from quire.frontend.request_params import output_kind_of
from quire.frontend.sampling import SamplingParams, answer_room, ranks
from quire.frontend.text.chat.answer_format import AnswerFormat
from quire.frontend.text.chat.renderer import MAX_PROCESSES
from quire.frontend.text.chat.tool_grammar import tool_at_fault
from quire.frontend.text.chat.tools import ToolUse, check_tools
from quire.frontend.text.prompts import Message, Prompt, PromptType
from quire.frontend.text.threads import FairThreads, TextThreads
from quire.frontend.text.tokenizer import Tokenizer
from quire.frontend.turns import current_work, doing
from quire.frontend.vllm.fields import takes_vllm_arguments
from quire.protocol.engine_options import SECONDS_OR_ZERO
from quire.protocol.messages import SAMPLING_LENGTHS, EngineSnapshot, PrefixTree, Ready, Role, StepTrace
from quire.protocol.pooling_info import PoolingInfo

T = TypeVar("T")
OutputKind = Literal["cumulative", "delta", "final_only"] | RequestOutputKind

_WATCH_SECONDS = 0.25
_LONGEST_STEP = 30.0  # seconds; no sensible token budget makes a step take longer


class AsyncLLM(AnswerParsing, MadeFromEngineArgs):
    """A model that streams, in an engine process of its own or a running one; its arguments are those of `LLM`.

    It works on one event loop at a time, asyncio's or uvloop's (`uvloop.run(main())`, as the command line does). Use it
    in an `async with` or call `close`; otherwise the engine ends when the object is collected, or with the program.
    The constructor waits until the engine is ready.
    """

    @takes_engine_args(EngineArgs)
    def __init__(self, model: str | None = None, **options: Any) -> None:
        self._deliveries = DeliveryQueue()
        self._engine = self._connected(EngineArgs.from_options(model, options))
        self._finalizer = weakref.finalize(self, self._engine.close)
        is_admin = self._engine.engines.ready.role is Role.ADMIN
        self._table = RequestTable(
            self._engine.send, self._engine.eos_token_ids, routing=self._engine.routing, names_tenants=is_admin
        )
        self._streams = RequestStreams(self._deliveries, self._table)
        self._threads = TextThreads()
        self._request_ids = itertools.count()
        # Of their own, so that a chat template that takes long delays chats only.
        self._chat_threads = FairThreads(MAX_PROCESSES, "quire-chat")

    def _connected(self, args: EngineArgs) -> ConnectedEngine:
        return ConnectedEngine(args, self._deliveries.put)

    @takes_vllm_arguments
    def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        output_kind: OutputKind | None = None,
        truncate_prompt_tokens: int | None = None,
        add_special_tokens: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        timeout: float | None = None,
        trace: TraceContext | None = None,
        tenant: str = "",
        session: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the outputs of one prompt; the last is `finished`.

        An output contains everything so far ("cumulative") or the new part ("delta"), or it is the only one, at the end
        ("final_only"); None: as `sampling_params` say. If the consumer is slower than the engine, its next output
        contains several increments. With `best_of` or a beam search there is one output, at the end. If the consumer
        stops iterating, is cancelled or is collected, the request is aborted. Iterating raises `RequestError` (a
        `ValueError`) for invalid input or a request that fails, and `EngineDeadError` if the engine dies.

        `truncate_prompt_tokens`: keep only the last N tokens of the prompt, -1 for as many as the context can hold
        beside `max_tokens`, or beside a quarter of it if the answer has no limit.
        `add_special_tokens`: put the tokenizer's special tokens around a text.

        `lora_request`: the adapter that computes it, None for the model alone. `priority`: lower runs first, under the
        policy `priority`. `cache_salt`: share KV pages only with requests of
        the same salt. `timeout`: end the request after this many seconds with finish reason "timeout", even if it is
        still waiting. `trace`: context for spans, see `add_observer`. `tenant`: name of the party that the request is
        for. Tenants share the engine fairly; all those of a client that is no administrator are one. `session`: name of
        the conversation that it belongs to, which the router `sticky` keeps on one of several engines.
        """

        async def make(params: SamplingParams) -> tuple[Prompt, SamplingParams]:
            (made,) = await self.prompts(
                [prompt],
                truncate_prompt_tokens=truncate_prompt_tokens,
                add_special_tokens=add_special_tokens,
                room=answer_room(params, self.max_model_len),
            )
            return made, params

        context = trace or TraceContext("text_completion")
        options = RequestOptions(priority, cache_salt, timeout, context, tenant, session, lora_request)
        return self._stream(make, sampling_params, request_id, output_kind, options)

    @takes_vllm_arguments
    async def embed(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        add_special_tokens: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        timeout: float | None = None,  # noqa: ASYNC109 - the engine's timeout
        trace: TraceContext | None = None,
        tenant: str = "",
        session: str | None = None,
    ) -> EmbeddingRequestOutput:
        """Compute the embedding of one prompt, which may be as long as the context.

        A text follows the model's instruction `prompt_name`, None for its default and "" for none. If the call is
        cancelled, the request is aborted. Raises the errors of `generate`; also `RequestError` if the request is
        aborted, and `RequestTimeoutError` if it times out, since a partial embedding is useless.
        """
        work, arrived = current_work(tenant), time.monotonic()
        await work.turn()
        params = self._engine.pooling(pooling_params)
        name = prompt_name if params.task == "embed" else ""
        with doing(work):
            (made,) = await self.pooled_prompts(
                [prompt],
                prompt_name=name,
                truncate_prompt_tokens=truncate_prompt_tokens,
                add_special_tokens=add_special_tokens,
            )
        context, adapter = trace or TraceContext("embeddings"), await resolved_meanwhile(lora_request)
        options = RequestOptions(priority, cache_salt, timeout, context, tenant, session, adapter)
        request = self._engine.embedding(self._name(request_id), made, params, options, arrived)
        stream = self._streams.open(request)
        try:
            while not request.finished:
                await stream.growth()
                await work.turn()
        finally:
            self._streams.close(stream)
        if request.error is not None:
            raise copy.copy(request.error)
        return request.output()

    async def classify(
        self, prompt: PromptType, pooling_params: PoolingParams | None = None, **options: Any
    ) -> ClassificationRequestOutput:
        """Score one prompt by the labels of a classification model; the options are those of `embed`."""
        params = msgspec.structs.replace(pooling_params or PoolingParams(), task="classify")
        output = await self.embed(prompt, params, **options)
        scores = ClassificationOutput(output.outputs.embedding)
        return ClassificationRequestOutput(output.request_id, output.prompt_token_ids, scores, output.metrics)

    @takes_vllm_arguments
    async def encode(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        pooling_task: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Yield the vector of one prompt, the only output; the task is that of `pooling_params` unless it is named.

        The options are those of `embed`. To get the tokens of a text, call `tokenize`.
        """
        given = pooling_params or PoolingParams()
        task = task_of(pooling_task, [given], self._engine.pooling_info)
        output = await self.embed(prompt, msgspec.structs.replace(given, task=task), request_id, **options)
        vector = PoolingOutput(output.outputs.embedding)
        yield PoolingRequestOutput(output.request_id, output.prompt_token_ids, vector)

    @takes_vllm_arguments
    async def beam_search(
        self,
        prompt: PromptType,
        params: BeamSearchParams,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        cache_salt: str = "",
        timeout: float | None = None,  # noqa: ASYNC109 - the engine's timeout
    ) -> BeamSearchOutput:
        """Search for the `beam_width` most likely continuations of one prompt; errors are those of `generate`."""
        stream = self.generate(
            prompt,
            params.sampling_params(),
            request_id,
            lora_request=lora_request,
            priority=priority,
            cache_salt=cache_salt,
            timeout=timeout,
        )
        async with contextlib.aclosing(stream):
            outputs = [output async for output in stream]
        return beam_search_output(outputs[-1], params)

    @takes_vllm_arguments
    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        output_kind: OutputKind | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
        cache_salt: str = "",
        timeout: float | None = None,
        trace: TraceContext | None = None,
        tenant: str = "",
        session: str | None = None,
        **template: Unpack[TemplateOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the answer to a conversation, rendered as a prompt by the chat template; otherwise like `generate`.

        `template`: the fields of `TemplateOptions`.

        `tools`, `tool_choice` and `parallel_tool_calls` are OpenAI's. `structured_outputs` constrains the content,
        after thoughts and unless the model calls a tool. The output is the model's raw text: `parse` splits it into
        thoughts, content and tool calls, and `answer_format.parser` does so while it streams. Raises `ToolError`
        (a `ValueError`) for invalid tools.
        """
        use = check_tools(tools, tool_choice, parallel_tool_calls)
        input_of = functools.partial(
            self._engine.chat_input, messages, tools=use, truncate_prompt_tokens=truncate_prompt_tokens, **template
        )

        async def make(params: SamplingParams) -> tuple[Prompt, SamplingParams]:
            return await self._chat_threads.run(functools.partial(input_of, params))

        context = trace or TraceContext("chat")
        options = RequestOptions(priority, cache_salt, timeout, context, tenant, session, lora_request)
        return self._stream(make, sampling_params, request_id, output_kind, options, use)

    async def abort(self, request_id: str) -> None:
        """Abort a request: its stream ends with finish reason "abort". Ignored if the request has ended."""
        self._streams.abort(request_id)

    def add_observer(self, observer: Observer) -> None:
        """Let `observer` observe all requests of this client from now on; `quire.frontend.metrics` has observers."""
        self._table.add_observer(observer)

    async def stats(self) -> dict[str, Any]:
        """Return the state of the engine: the fields of `SchedulerStats`, and counters of its socket.

        Of several engines they are sums. `deferred` counts waiting requests that lack something other than KV pages or
        slots; `totals` are the fields of `EngineTotals`.
        """
        return await self._engine.engines.stats()

    async def engine_stats(self, timeout: float | None = None) -> dict[int, dict[str, Any]]:  # noqa: ASYNC109
        """Return the same of each engine by its number, of those that answer within `timeout` seconds."""
        return await self._engine.stats_each(timeout)

    async def snapshot(self, engine: int | None = None) -> EngineSnapshot:
        """Return a snapshot of an engine: its last step, waiting requests, KV pages. Much more than `stats`.

        `engine`: the number of one of several; None for the first that is there.
        """
        result = await asyncio.wrap_future(self._engine.call("snapshot", engine=engine))
        return msgspec.convert(result, EngineSnapshot)

    async def prefix_tree(self, shown: Mapping[int, int] | None = None, engine: int | None = None) -> PrefixTree:
        """Return the upper levels of an engine's prefix cache as a tree.

        `shown`: how many branches there are of some of its runs, by their ids. `engine`: as for `snapshot`.
        """
        result = await asyncio.wrap_future(self._engine.call("prefix_tree", shown=shown, engine=engine))
        return msgspec.convert(result, PrefixTree)

    async def start_trace(self, on_step: Callable[[StepTrace], None]) -> None:
        """Call `on_step` with a trace of each step of the engine, for all its clients, until `stop_trace`.

        It is called on the running event loop. Traces that arrive faster than this client reads are dropped, see
        `StepTrace.dropped`.
        """
        loop = asyncio.get_running_loop()

        def deliver(step: StepTrace) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(on_step, step)

        await asyncio.wrap_future(self._engine.engines.start_trace(deliver))

    async def stop_trace(self) -> None:
        """Stop tracing; a trace marked as the `last` follows those in flight."""
        await asyncio.wrap_future(self._engine.engines.stop_trace())

    async def reset_prefix_cache(self) -> bool:
        """Empty the engine's prefix cache."""
        for call in self._engine.engines.call_each("reset_cache").values():
            await asyncio.wrap_future(call)
        return True

    async def pin_prefix(self, prompt: PromptType, *, cache_salt: str = "") -> int:
        """Compute a prompt and pin its KV pages in the cache; return the number of pinned tokens, in full pages.

        Of several engines, one has them. They stay until `unpin_prefix`, `reset_prefix_cache`, or until a running
        request would be preempted for them.
        """
        token_ids = (await self.prompts([prompt]))[0].token_ids
        params = SamplingParams(max_tokens=1)
        engine: int | None = None
        async for output in self.generate({"prompt_token_ids": token_ids}, params, cache_salt=cache_salt):
            engine = output.metrics.engine
        call = self._engine.engines.call("pin_prefix", token_ids, cache_salt, engine=engine)
        return cast("int", await asyncio.wrap_future(call))

    async def unpin_prefix(self, prompt: PromptType, *, cache_salt: str = "") -> bool:
        """Unpin a prompt; return True if it was pinned."""
        token_ids = (await self.prompts([prompt]))[0].token_ids
        calls = self._engine.engines.call_each("unpin_prefix", token_ids, cache_salt).values()
        return any([await asyncio.wrap_future(call) for call in calls])

    async def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        answer_format: AnswerFormat | None = None,
        **template: Unpack[TemplateOptions],
    ) -> Prompt:
        """Return the prompt that `chat` sends for a conversation. Raises `ValueError`.

        `answer_format`: that of the template, where it is known already.
        """
        return await self._chat_threads.run(
            functools.partial(self._engine.chat_prompt, messages, tools=tools, answer_format=answer_format, **template)
        )

    async def prompts(
        self,
        prompts: Sequence[PromptType],
        *,
        truncate_prompt_tokens: int | None = None,
        add_special_tokens: bool = True,
        room: int = 1,
    ) -> list[Prompt]:
        """Tokenize prompts as `generate` and `embed` do, which accept the result unchanged. Raises `RequestError`.

        It names the index of the prompt if there are several. `room`: tokens of the context that are left to an answer
        where `truncate_prompt_tokens` is -1. Prompts that are long in total are tokenized on another
        thread, while streams continue.
        """
        make_one = functools.partial(
            self._engine.prompt,
            truncate_prompt_tokens=truncate_prompt_tokens,
            add_special_tokens=add_special_tokens,
            room=room,
        )
        return await self.run_long(lambda: make_each(make_one, prompts), prompts)

    async def pooled_prompts(
        self,
        prompts: Sequence[PromptType],
        *,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        add_special_tokens: bool = True,
    ) -> list[Prompt]:
        """Tokenize prompts as `embed` does, which accepts the result unchanged. Raises the errors of `prompts`."""
        make_one = functools.partial(
            self._engine.pooled_texts.prompt,
            prompt_name=prompt_name,
            truncate_prompt_tokens=truncate_prompt_tokens,
            add_special_tokens=add_special_tokens,
        )
        return await self.run_long(lambda: make_each(make_one, prompts), prompts)

    async def pair_prompts(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        add_special_tokens: bool = True,
    ) -> list[Prompt]:
        """Tokenize pairs of texts for a model that reads both, for `classify`. Raises the errors of `prompts`."""
        make_one = functools.partial(
            self._engine.pooled_texts.pair,
            instruction=instruction,
            truncate_prompt_tokens=truncate_prompt_tokens,
            add_special_tokens=add_special_tokens,
        )
        return await self.run_long(
            lambda: make_each(lambda pair: make_one(*pair), pairs), [text for pair in pairs for text in pair]
        )

    @property
    def pooling_info(self) -> PoolingInfo:
        """The ways in which the model pools prompts."""
        return self._engine.pooling_info

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, which may be longer than the context. Raises `ValueError`."""
        encode = functools.partial(self._engine.encode, text, add_special_tokens=add_special_tokens)
        return await self.run_long(encode, text)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Raises `ValueError`."""
        decode = functools.partial(self._engine.decode, token_ids, skip_special_tokens=skip_special_tokens)
        return await self.run_long(decode, token_ids)

    async def run_long(self, work: Callable[[], T], *given: object) -> T:
        """Return `work()`, called on another thread if what is `given` is long, while streams continue."""
        return await self._threads.run(work, *given)

    async def run_python(self, work: Callable[[], T], size: int) -> T:
        """Return `work()`, done in Python, in turn with other such work on one thread if `size` says that it is long.

        `size`: of what it goes through, in entries or characters.
        """
        return await self._threads.run_python(work, size)

    async def reload(
        self, model: str | None = None, *, drain: bool = False, drain_timeout: float = DRAIN_SECONDS, **options: Any
    ) -> None:
        """Put a new engine with other weights or settings in the place of this one, while streams go on.

        `model` and `options` are those of the constructor that concern the model, the KV cache, the scheduling and the
        grammars; None stands for the default of an option, and what is not given stays as it is. The new engine loads
        while this one works. Then open requests go on there, with `drain` only those that have not begun, or have not
        ended here within `drain_timeout` seconds. Raises `TypeError` or `ValueError` for the options, `RuntimeError`
        with the reason if there is no new engine, in which case this one works on, and `EngineDeadError`.
        """
        given = options if model is None else {"model": model, **options}

        def reload() -> None:
            self._engine.engines.reload(reload_arguments(given, drain=drain, drain_timeout=drain_timeout))

        await asyncio.to_thread(reload)

    def engines(self) -> list[EngineStatus]:
        """Return the engines that share the requests, and those that compute prompts for them."""
        return self._engine.statuses()

    @property
    def router(self) -> str:
        """The name of the router that chooses among several engines."""
        return self._engine.routing.name

    def num_requests(self) -> Counter[int]:
        """Return how many requests of this client each engine that answers has now."""
        return self._table.counts()

    def num_prefills(self) -> Counter[int]:
        """Return how many prompts of this client each prefill engine is computing."""
        return self._engine.prefill.counts()

    def _count(self, engine: int) -> int:
        return self._table.count(engine) + self.num_prefills()[engine]

    def routed(self) -> dict[tuple[str, str], int]:
        """Return how many requests were sent to each engine for each reason: "turn", "load", "session", "prefix"."""
        return {(str(engine), reason): count for (engine, reason), count in self._engine.routing.counts.items()}

    async def add_engine(self, address: str, *, is_prefill: bool = False) -> int:
        """Let the running engine at `ipc://PATH` or `tcp://HOST:PORT` share the requests from now on.

        `is_prefill`: it computes prompts for the others only. Return its number. Raises `EngineConnectionError`, also
        if it has another model than the engines that are here, and `AddressError`.
        """
        add = self._engine.add_prefill_engine if is_prefill else self._engine.add_engine
        return await asyncio.to_thread(add, address)

    async def drain_engine(self, engine: int) -> None:
        """Send no more requests to an engine; those that it has go on there. Raises `ValueError` for the last one."""
        self._engine.set_draining(engine)

    async def remove_engine(self, engine: int, *, drain_timeout: float = DRAIN_SECONDS) -> None:
        """Leave an engine once its requests have ended; those that have not after `drain_timeout` s go on elsewhere.

        An engine that was started here ends then. Raises `ValueError` for the last one and for unknown ones.
        """
        SECONDS_OR_ZERO.check("drain_timeout", drain_timeout)
        await self.drain_engine(engine)
        end = time.monotonic() + drain_timeout
        try:
            while self._count(engine) and time.monotonic() < end:  # noqa: ASYNC110 - each of many requests may end
                await asyncio.sleep(min(_WATCH_SECONDS, max(0.0, end - time.monotonic())))
            await asyncio.to_thread(self._engine.remove, engine)
        except BaseException:
            self._engine.set_draining(engine, is_draining=False)
            raise

    async def check_health(self) -> None:
        """Raise `EngineDeadError` if the engine is dead or away, or has neither stepped nor been idle for 30 s.

        Of several engines one is enough.
        """
        if (error := self.dead_error) is not None:
            raise EngineDeadError(*error.args)
        if (away := self._engine.engines.away) is not None:
            raise EngineDeadError(f"{away}; it is being started again")
        if (age := self._engine.engines.last_step_age) > _LONGEST_STEP:
            raise EngineDeadError(f"the engine has not stepped for {age:.0f} s", self.engine_address)

    async def wait_dead(self) -> EngineDeadError:
        """Wait until the engine is dead; return the error."""
        while (error := self.dead_error) is None:  # noqa: ASYNC110 - it is set by another thread
            await asyncio.sleep(_WATCH_SECONDS)
        return error

    @property
    def dead_error(self) -> EngineDeadError | None:
        """The error with which the engine died, None while it is alive."""
        return self._engine.engines.dead

    @property
    def is_away(self) -> bool:
        """True while there is no engine, and requests wait for the next one."""
        return self._engine.engines.away is not None

    @property
    def num_engine_losses(self) -> int:
        """Times that the engine, or the connection to it, was lost."""
        return self._engine.engines.num_losses

    @property
    def model(self) -> str:
        """The folder of the model, on the engine's machine."""
        return self._engine.model

    @property
    def max_model_len(self) -> int:
        """The context length: maximum number of tokens of a prompt and its answer."""
        return self._engine.engines.ready.max_model_len

    @property
    def vocab_size(self) -> int:
        """Size of the model's vocabulary; token ids are below it."""
        return self._engine.engines.ready.vocab_size

    @property
    def engine_info(self) -> Ready:
        """The engine's description of itself: model, context length, KV pages."""
        return self._engine.engines.ready

    @property
    def engine_address(self) -> str:
        """The address of the engine, where others can attach."""
        return self._engine.engines.address

    @property
    def chat_template(self) -> str:
        """The source of the chat template, empty without one."""
        return self._engine.chat_template

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if it has one."""
        return self._engine.tokenizer

    async def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer. Raises `ValueError` if there is none."""
        return self._engine.require_tokenizer()

    def close(self) -> None:
        """Disconnect, and stop an engine started here. Open streams end with `EngineDeadError`. Idempotent."""
        if self._finalizer.alive:
            self._deliveries.put(EngineDeadError("the AsyncLLM was closed"))
            self._finalizer()
            self._chat_threads.close()

    def shutdown(self) -> None:
        """Close it: vLLM's name of `close`."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await asyncio.to_thread(self.close)

    def _name(self, request_id: str | None) -> str:
        return f"request-{next(self._request_ids)}" if request_id is None else request_id

    async def _stream(
        self,
        make: Callable[[SamplingParams], Awaitable[tuple[Prompt, SamplingParams]]],
        params: SamplingParams | None,
        request_id: str | None,
        output_kind: OutputKind | None,
        options: RequestOptions,
        tools: ToolUse | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        kind = _output_kind(params, output_kind)
        work, arrived = current_work(options.tenant), time.monotonic()  # before tokenization, which is part of the TTFT
        await work.turn()
        checked = await self.run_long(functools.partial(self._engine.params, params), _lengthy(params))
        is_delta = kind is RequestOutputKind.DELTA
        if is_delta and ranks(checked):
            raise ValueError("best_of and beam search rank at the end, so there are no deltas; use 'cumulative'")
        if (adapter := await resolved_meanwhile(options.lora_request)) is not options.lora_request:
            options = replace(options, lora_request=adapter)
        with doing(work):
            prompt, own = await make(checked)
        make_request = functools.partial(self._engine.request, self._name(request_id), prompt, own, options, arrived)
        request = await self.run_long(make_request, _lengthy(own))
        stream = self._streams.open(request)
        try:
            async for _ in work.in_turns(self._streams.sending(stream)):
                pass
            finished = False
            while not finished:
                await stream.growth()
                async for _ in work.in_turns(request.reading()):
                    pass
                if request.error is not None:
                    at_fault = await asyncio.to_thread(tool_at_fault, request.error, tools) if tools else None
                    raise at_fault or copy.copy(request.error)  # a copy for each request, with its own traceback
                if not request.has_news or (kind is RequestOutputKind.FINAL_ONLY and not request.finished):
                    continue
                output = request.output(is_delta)
                finished = output.finished
                yield output
        finally:
            self._streams.close(stream)


AsyncLLMEngine = AsyncLLM
"""vLLM's earlier name of the class."""


def _output_kind(params: SamplingParams | None, given: OutputKind | None) -> RequestOutputKind:
    """Return the kind of outputs that is given, or else that of the parameters. Raises `ValueError`."""
    try:
        return output_kind_of(params) if given is None else RequestOutputKind(given)
    except ValueError:
        kinds = " or ".join(repr(str(kind)) for kind in RequestOutputKind)
        raise ValueError(f"output_kind={given!r} is not known; it can be {kinds}") from None


def _lengthy(params: SamplingParams | None) -> tuple[object, ...]:
    """Return the parameters that may be long."""
    if not isinstance(params, SamplingParams):
        return ()
    structured = params.structured_outputs
    constraint = msgspec.structs.astuple(structured) if isinstance(structured, msgspec.Struct) else structured
    return (*(getattr(params, name) for name in SAMPLING_LENGTHS), constraint)
