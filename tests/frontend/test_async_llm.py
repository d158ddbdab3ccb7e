"""`AsyncLLM` with a real engine process and the demo model, under asyncio and uvloop."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import uvloop
from patience import PATIENCE

from quire.frontend import (
    LLM,
    AsyncLLM,
    EngineDeadError,
    PoolingParams,
    RequestError,
    RequestOutput,
    RequestTimeoutError,
    SamplingParams,
)

if TYPE_CHECKING:
    from conftest import EngineFactory

PROMPTS = ["Once upon a time", "There was a king who", "The fox said to the goose", "In a forest far away"]

Body = Callable[[AsyncLLM], Awaitable[None]]
Play = Callable[[Body], None]


def greedy(max_tokens: int = 24, **fields: Any) -> SamplingParams:
    """Return parameters for exactly `max_tokens` deterministic tokens."""
    return SamplingParams(temperature=0.0, seed=1, max_tokens=max_tokens, ignore_eos=True, **fields)


@pytest.fixture(scope="module")
def llm(module_engine: EngineFactory, demo_model: Path) -> LLM:
    return module_engine(demo_model)


@pytest.fixture(params=["asyncio", "uvloop"])
def play(llm: LLM, request: pytest.FixtureRequest) -> Play:
    """Run a test's body on an event loop, with an `AsyncLLM` attached to the engine of `llm`."""
    run: Callable[[Coroutine[Any, Any, None]], None] = uvloop.run if request.param == "uvloop" else asyncio.run

    async def main(body: Body) -> None:
        async with AsyncLLM(engine_address=llm.engine_address) as each, asyncio.timeout(PATIENCE):
            await body(each)

    return lambda body: run(main(body))


async def collect(outputs: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    """Return all outputs of a stream."""
    return [output async for output in outputs]


async def idle(llm: AsyncLLM) -> None:
    """Wait until the engine is idle."""
    while (stats := await llm.stats())["running"] + stats["waiting"] + stats["pages_held"]:
        pass  # each call is a round trip to the engine


def test_a_stream_grows_to_what_generate_returns(llm: LLM, play: Play) -> None:
    [expected] = llm.generate(PROMPTS[0], greedy())

    async def body(each: AsyncLLM) -> None:
        outputs = await collect(each.generate(PROMPTS[0], greedy(), request_id="mine"))
        texts = [output.outputs[0].text for output in outputs]
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert {output.request_id for output in outputs} == {"mine"}
        assert outputs[-1].outputs == expected.outputs
        assert outputs[-1].prompt_token_ids == expected.prompt_token_ids

    play(body)


def test_deltas_add_up(llm: LLM, play: Play) -> None:
    [expected] = llm.generate(PROMPTS[0], greedy(logprobs=1, n=2))

    async def body(each: AsyncLLM) -> None:
        stream = each.generate(PROMPTS[0], greedy(logprobs=1, n=2), output_kind="delta")
        outputs = await collect(stream)
        for i, whole in enumerate(expected.outputs):
            parts = [output.outputs[i] for output in outputs]
            assert "".join(part.text for part in parts) == whole.text
            assert [token for part in parts for token in part.token_ids] == whole.token_ids
            assert [entry for part in parts for entry in part.logprobs or []] == whole.logprobs

    play(body)


def test_concurrent_streams_each_get_their_own_tokens(llm: LLM, play: Play) -> None:
    expected = {output.prompt: output.outputs for output in llm.generate(PROMPTS, greedy())}

    async def body(each: AsyncLLM) -> None:
        streams = [collect(each.generate(prompt, greedy())) for prompt in PROMPTS * 16]
        for outputs in await asyncio.gather(*streams):
            assert outputs[-1].outputs == expected[outputs[-1].prompt]

    play(body)


def test_a_slow_consumer_gets_merged_increments(play: Play) -> None:
    async def body(each: AsyncLLM) -> None:
        stream = each.generate(PROMPTS[0], greedy(max_tokens=1500), output_kind="delta")
        first = await anext(stream)
        await idle(each)
        rest = await anext(stream)
        assert rest.finished
        assert len(first.outputs[0].token_ids) + len(rest.outputs[0].token_ids) == 1500
        await stream.aclose()

    play(body)


def test_a_consumer_that_stops_iterating_aborts_its_request(play: Play) -> None:
    async def body(each: AsyncLLM) -> None:
        async for _ in each.generate(PROMPTS[0], greedy(max_tokens=1900)):
            break
        gc.collect()
        await idle(each)
        stream = each.generate(PROMPTS[0], greedy(max_tokens=1900))
        await anext(stream)
        await stream.aclose()
        assert not each._streams._table
        await idle(each)

    play(body)


def test_cancelling_a_task_aborts_its_request(play: Play) -> None:
    async def body(each: AsyncLLM) -> None:
        begun = asyncio.Event()

        async def consume() -> None:
            async for _ in each.generate(PROMPTS[0], greedy(max_tokens=1900)):
                begun.set()

        task = asyncio.create_task(consume())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not each._streams._table
        await idle(each)

    play(body)


def test_abort_ends_the_stream_with_the_output_so_far(play: Play) -> None:
    async def body(each: AsyncLLM) -> None:
        stream = each.generate(PROMPTS[0], greedy(max_tokens=1900), request_id="long")
        await anext(stream)
        await each.abort("long")
        last = (await collect(stream))[-1]
        assert last.finished
        assert last.outputs[0].finish_reason == "abort"
        assert 0 < len(last.outputs[0].token_ids) < 1900
        await each.abort("long")  # has ended already

    play(body)


def test_prompt_logprobs_of_a_cached_prefix(llm: LLM, play: Play) -> None:
    """A prompt whose prefix another request has left in the cache, or is still computing."""
    shared = llm.get_tokenizer().encode(" ".join(PROMPTS) * 8)[:100]
    alone = llm.generate([[*shared, 5]], greedy(2, prompt_logprobs=1), cache_salt="alone")[0]

    async def body(each: AsyncLLM) -> None:
        await collect(each.generate([*shared, 9], greedy(2)))
        going = asyncio.create_task(collect(each.generate([*shared, 7], greedy(200))))
        plain, told = await asyncio.gather(
            collect(each.generate([*shared, 5], greedy(2))),
            collect(each.generate([*shared, 5], greedy(2, prompt_logprobs=1))),
        )
        assert plain[-1].num_cached_tokens == 96
        assert told[-1].prompt_logprobs == alone.prompt_logprobs
        assert len(told[-1].prompt_logprobs or []) == 101
        assert told[-1].outputs == plain[-1].outputs
        await going

    play(body)


def test_embeddings_run_concurrently_with_streams(llm: LLM, play: Play) -> None:
    expected = llm.embed(PROMPTS, PoolingParams(pooling_type="mean"), use_tqdm=False)

    async def body(each: AsyncLLM) -> None:
        stream = asyncio.create_task(collect(each.generate(PROMPTS[0], greedy(200))))
        params = PoolingParams(pooling_type="mean")
        outputs = await asyncio.gather(*(each.embed(prompt, params) for prompt in PROMPTS))
        assert [output.outputs for output in outputs] == [output.outputs for output in expected]
        assert all(output.finished and len(output.prompt_token_ids) > 3 for output in outputs)
        assert [output.prompt for output in outputs] == PROMPTS
        assert all(output.metrics.queued_time is not None for output in outputs)
        assert (await stream)[-1].outputs[0].finish_reason == "length"

    play(body)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_an_embedding_that_fails_ends_at_once(
    run: Callable[..., None], engine: EngineFactory, demo_model: Path
) -> None:
    """Cancelled, aborted, timed out, or rejected: behind running streams, and without leaving anything behind."""
    llm = engine(demo_model, max_num_seqs=1)
    long = [7] * 2000

    async def body(each: AsyncLLM) -> None:
        ahead = [asyncio.create_task(collect(each.generate(PROMPTS[0], greedy(2000)))) for _ in range(4)]
        await asyncio.sleep(0)  # they are sent, and computed one at a time
        cancelled = asyncio.create_task(each.embed(long, cache_salt="a"))
        aborted = asyncio.create_task(each.embed(long, request_id="long", cache_salt="b"))
        await asyncio.sleep(0)  # both are sent, and wait
        with pytest.raises(RequestError, match="in use"):
            await each.embed([1], request_id="long")
        cancelled.cancel()
        await each.abort("long")
        with pytest.raises(RequestError, match="was aborted"):
            await aborted
        with pytest.raises(RequestTimeoutError, match="time of 1e-06 s"):
            await each.embed(long, timeout=1e-6)
        with pytest.raises(
            RequestError,
            match="2049 tokens, and this model's maximum context length is 2048 tokens; shorten it to 2048",
        ):
            await each.embed([7] * 2049)
        with pytest.raises(ValueError, match="dimensions=0 is out of range"):
            await each.embed("a", PoolingParams(dimensions=0))
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert (await ahead[0])[-1].outputs[0].finish_reason == "length"
        for stream in ahead:
            stream.cancel()
        assert (await each.embed([7] * 2048)).outputs.hidden_size > 0  # the whole context
        await idle(each)

    async def main() -> None:
        async with AsyncLLM(engine_address=llm.engine_address) as each, asyncio.timeout(PATIENCE):
            await body(each)

    run(main())


def test_a_stop_string_ends_the_stream_and_the_engine_request(llm: LLM, play: Play) -> None:
    text = llm.generate(PROMPTS[0], greedy())[0].outputs[0].text
    stop = text[8:11]

    async def body(each: AsyncLLM) -> None:
        outputs = await collect(each.generate(PROMPTS[0], greedy(max_tokens=1900, stop=[stop])))
        completion = outputs[-1].outputs[0]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        assert completion.text == text[: text.index(stop)]
        assert all(completion.text.startswith(output.outputs[0].text) for output in outputs)
        await idle(each)

    play(body)


def test_invalid_input_raises_in_its_own_stream_only(play: Play) -> None:
    async def body(each: AsyncLLM) -> None:
        bad: list[tuple[Any, SamplingParams | None, str]] = [
            ("", None, "the prompt is empty"),
            ([999_999], None, "999999"),
            ("a", SamplingParams(top_p=2.0), "top_p=2.0"),
            ("a", SamplingParams(max_tokens=100_000), "max_tokens=100000"),
        ]
        good = asyncio.create_task(collect(each.generate(PROMPTS[0], greedy(max_tokens=300))))
        for prompt, params, message in bad:
            if prompt == "" and (await each.get_tokenizer()).encode(""):
                continue  # this tokenizer begins every text with a token
            with pytest.raises(ValueError, match=message):
                await collect(each.generate(prompt, params))
        assert (await good)[-1].outputs[0].finish_reason == "length"

    play(body)


def test_a_request_id_is_used_once_at_a_time(play: Play) -> None:
    async def body(each: AsyncLLM) -> None:
        first = each.generate("a", greedy(max_tokens=1900), request_id="same")
        await anext(first)
        with pytest.raises(RequestError, match="in use"):
            await anext(each.generate("a", greedy(), request_id="same"))
        await first.aclose()
        assert (await collect(each.generate("a", greedy(), request_id="same")))[-1].finished

    play(body)


def test_a_chat_is_answered(llm: LLM, play: Play) -> None:
    messages = [{"role": "user", "content": "Tell me a tale about a fox"}]
    [expected] = llm.chat(messages, greedy())

    async def body(each: AsyncLLM) -> None:
        outputs = await collect(each.chat(messages, greedy()))
        assert outputs[-1].outputs == expected.outputs
        assert outputs[-1].prompt == expected.prompt

    play(body)


def test_a_prompt_can_be_truncated_and_go_without_special_tokens(llm: LLM, play: Play) -> None:
    ids, bare = (llm.get_tokenizer().encode(PROMPTS[0], special) for special in (True, False))
    messages = [{"role": "user", "content": PROMPTS[0]}]
    [chat] = llm.chat(messages, greedy(max_tokens=1))

    async def body(each: AsyncLLM) -> None:
        params = greedy(max_tokens=1)
        for stream, expected in (
            (each.generate(PROMPTS[0], params, add_special_tokens=False), bare),
            (each.generate(PROMPTS[0], params, truncate_prompt_tokens=2), ids[-2:]),
            (each.chat(messages, params, truncate_prompt_tokens=2), chat.prompt_token_ids[-2:]),
            (each.chat(messages, params, add_special_tokens=True), chat.prompt_token_ids),
        ):
            assert (await collect(stream))[-1].prompt_token_ids == expected
        output = await each.embed(PROMPTS[0], truncate_prompt_tokens=2, add_special_tokens=False)
        assert output.prompt_token_ids == ids[-2:]
        with pytest.raises(RequestError, match="truncate_prompt_tokens=0 leaves no tokens"):
            await collect(each.generate("a", truncate_prompt_tokens=0))

    play(body)


def test_it_moves_to_another_event_loop_when_its_streams_have_ended(llm: LLM) -> None:
    each = AsyncLLM(engine_address=llm.engine_address)
    try:
        for run in (asyncio.run, uvloop.run, asyncio.run):
            assert run(collect(each.generate("a", greedy())))[-1].finished

        async def unfinished() -> None:
            await anext(each.generate("a", greedy(max_tokens=1900)))

        asyncio.run(unfinished())
        assert asyncio.run(collect(each.generate("a", greedy())))[-1].finished
    finally:
        each.close()


def test_closing_ends_open_streams_with_an_error(llm: LLM) -> None:
    async def main() -> None:
        each = AsyncLLM(engine_address=llm.engine_address)
        stream = each.generate("a", greedy(max_tokens=1900))
        await anext(stream)
        each.close()
        with pytest.raises(EngineDeadError, match="closed"):
            await collect(stream)
        with pytest.raises(EngineDeadError):
            await collect(each.generate("a", greedy()))

    asyncio.run(main())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_every_stream_ends_with_an_error_when_the_engine_dies(demo_model: Path, run: Callable[..., None]) -> None:
    async def main() -> None:
        async with AsyncLLM(str(demo_model), num_pages=1024, max_restarts=0) as each:
            streams = [each.generate("a", greedy(max_tokens=1900)) for _ in range(8)]
            for stream in streams:
                await anext(stream)
            os.kill(each._engine.engines.ready.engine_pid, signal.SIGKILL)
            async with asyncio.timeout(PATIENCE):
                results = await asyncio.gather(*map(collect, streams), return_exceptions=True)
            assert [type(result) for result in results] == [EngineDeadError] * 8
            assert all("SIGKILL" in str(result) for result in results)
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await each.check_health()
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await collect(each.generate("a"))

    run(main())
