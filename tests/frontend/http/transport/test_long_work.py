"""Work on long bodies: owners in turn, pauses in between, and no more of it than the body is long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest

from quire.frontend.http.errors import ApiError
from quire.frontend.http.openai.completions import CompletionBody, prompts_of
from quire.frontend.http.transport.bodies import Body, decode
from quire.frontend.http.transport.long_work import LONG_BODY, LongWork
from quire.frontend.http.transport.value_counts import MAX_TEXTS


class Call(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: dict[str, Any]


class Entry(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | None = None
    calls: list[Call] = []


class EntriesBody(Body, kw_only=True):
    entries: list[Entry]
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)


def decoded(body: Any, kind: type[Any]) -> Any:
    """Return a body as a server decodes it."""
    return asyncio.run(decode(msgspec.json.encode(body), kind))


def test_owners_take_turns_with_pauses_for_others_and_cancelled_work_is_not_done() -> None:
    done: list[str] = []

    def work(name: str) -> Callable[[], str]:
        def perform() -> str:
            done.append(name)
            return name

        return perform

    async def act() -> None:
        long_work = LongWork()
        runs = {owner: long_work.runner(owner, LONG_BODY + 1) for owner in "ab"}
        names = ["a1", "a2", "a3", "a4", "b1", "b2"]
        tasks = [asyncio.ensure_future(runs[name[0]](work(name))) for name in names]
        await asyncio.sleep(0)
        assert done == ["a1"]  # the others wait for a pause to end
        tasks[2].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [each for each in results if isinstance(each, str)] == ["a1", "a2", "a4", "b1", "b2"]
        assert done == ["a1", "a2", "b1", "b2", "a4"]

    asyncio.run(act())


def test_an_error_is_raised_where_the_result_is_awaited_and_others_go_on() -> None:
    async def act() -> None:
        run = LongWork().runner("a", LONG_BODY + 1)
        results = await asyncio.gather(*(run(partial(divmod, 6, each)) for each in (0, 2)), return_exceptions=True)
        assert [type(results[0]), results[1]] == [ZeroDivisionError, (3, 0)]

    asyncio.run(act())


def test_short_bodies_wait_for_nobody() -> None:
    async def act() -> None:
        long_work = LongWork()
        waiting = [asyncio.ensure_future(long_work.runner("a", LONG_BODY + 1)(lambda: 0)) for _ in range(2)]
        await asyncio.sleep(0)
        assert await long_work.runner("a", LONG_BODY)(lambda: 1) == 1
        assert not waiting[1].done()
        await asyncio.gather(*waiting)

    asyncio.run(act())


def test_every_piece_of_decoding_runs_in_turn() -> None:
    pieces: list[object] = []

    async def run(work: Callable[[], Any]) -> Any:
        pieces.append(work)
        return work()

    body = msgspec.json.encode({"prompt": "a", "unknown": None})
    assert asyncio.run(decode(body, CompletionBody, run)).prompt == "a"
    assert len(pieces) == 4  # counting, decoding into the type, decoding, converting


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The arguments of each conversion."""
    calls: list[object] = []
    convert: Callable[..., Any] = msgspec.convert

    def counting(*given: Any, **options: Any) -> Any:
        calls.append(given)
        return convert(*given, **options)

    monkeypatch.setattr(msgspec, "convert", counting)
    return calls


def test_unknown_nulls_in_many_entries_cost_no_more_conversions_than_in_one(conversions: list[object]) -> None:
    call = {"name": "a", "arguments": {"kept": None}}
    entries = [
        {"role": "user", "content": None, f"no{index}": None, "calls": [{**call, f"not{index}": None}]}
        for index in range(100)
    ]
    body = decoded({"model": "m", "entries": entries, "tools": [{"default": None}]}, EntriesBody)
    assert len(conversions) <= 4
    assert body.entries[99].calls[0].arguments == {"kept": None}
    assert body.tools == [{"default": None}]


def test_integers_with_a_fraction_in_many_places_cost_no_more_conversions_than_in_one(
    conversions: list[object],
) -> None:
    prompts = [[1.0, 2, 3.0]] * 100
    body = decoded({"prompt": prompts, "seed": 1.0, "n": 2.0, "top_k": 3.0, "top_p": 1.0}, CompletionBody)
    assert len(conversions) <= 4
    assert (body.prompt, body.seed, body.n) == (((1, 2, 3),) * 100, 1, 2)


def test_an_unknown_field_among_nulls_is_an_error_that_names_it() -> None:
    entries = [{"role": "user", "content": "a", "no": None}, {"role": "user", "no": 1}]
    with pytest.raises(ApiError, match=r"entries\[1\].no is not a known field"):
        decoded({"model": "m", "entries": entries}, EntriesBody)


def test_more_texts_than_are_decoded_in_a_moment_are_too_many() -> None:
    with pytest.raises(ApiError, match=f"{MAX_TEXTS} texts"):
        decoded({"prompt": ["a"] * MAX_TEXTS}, CompletionBody)
    quotes = decoded({"prompt": '"' * (2 * MAX_TEXTS + 1)}, CompletionBody)
    assert len(quotes.prompt) == 2 * MAX_TEXTS + 1


@pytest.mark.parametrize(
    ("prompt", "index"), [([1, "a"], 1), (["a", "b", 1], 2), ([[1], 1], 1), ([1, 2, [1]], 2), (["a", [1]], 1)]
)
def test_the_first_prompt_of_another_type_is_named(prompt: Any, index: int) -> None:
    with pytest.raises(ApiError, match=rf"prompt\[{index}\] is of another type"):
        asyncio.run(prompts_of(prompt, "prompt"))
