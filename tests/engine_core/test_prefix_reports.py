"""Reports of the prefix cache to clients that watch it: an outline made of them knows what the engine will find."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import tiny_model
from engine_process import DealerClient, EngineUnderTest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_executor import Engine

from quire.engine_core.prefix_reports import MAX_WATCHERS
from quire.protocol.messages import (
    MAX_WATCHED_SALTS,
    EngineCoreRequest,
    EngineMessage,
    ErrorMessage,
    Goodbye,
    PrefixReport,
    SamplingParams,
    UtilityCall,
    WatchPrefixes,
)
from quire.protocol.routing.prefix_outline import PrefixOutline

PAGE = 32  # tokens, of the real engine
SMALL_PAGE = 4  # of the one without a model
ENGINE = 0  # its number in an outline


def cached(outline: PrefixOutline, salt: str, tokens: list[int]) -> dict[int, int]:
    """Return what an outline knows of a prompt."""
    return outline.match(outline.prefixes(salt, tokens))


class Router(DealerClient):
    """A client that watches salts, and keeps an outline of what is cached under them."""

    def __init__(self, address: str, *salts: str) -> None:
        super().__init__(address)
        self.outline = PrefixOutline()
        self.outline.add(ENGINE, PAGE)
        self.reports: list[PrefixReport] = []
        self.send(WatchPrefixes(list(salts)))

    def receive(self, seconds: float = 0.05) -> EngineMessage | None:
        """Receive as a DealerClient does, and take reports."""
        message = super().receive(seconds)
        if isinstance(message, PrefixReport):
            self.reports.append(message)
            self.outline.report(ENGINE, message)
        return message

    def catch_up(self) -> dict[str, Any]:
        """Return the statistics when all that has changed until now is in the outline, if a report can hold it.

        The first call ends when the last report has left. What it has left out comes before the second answer.
        """
        self.call("stats")
        return self.call("stats")

    def expect_cached(self, salt: str, tokens: list[int]) -> int:
        """Return how many tokens of a prompt the engine will find."""
        return min(cached(self.outline, salt, tokens).get(ENGINE, 0), (len(tokens) - 1) // PAGE * PAGE)


def generate(client: DealerClient, request_id: str, tokens: list[int], salt: str = "") -> int:
    """Generate a token; return how many tokens of the prompt were cached."""
    client.send(EngineCoreRequest(request_id, tokens, SamplingParams(max_tokens=1), cache_salt=salt))
    client.end(request_id)
    return max(output.num_cached_tokens for output in client.outputs(request_id))


def prompts(number: random.Random) -> list[int]:
    """Return a prompt of few different pages, which often begins as another."""
    pages = number.choices(range(10, 13), k=number.randrange(5))
    return [token for page in pages for token in [page] * PAGE] + [5] * number.randrange(1, PAGE)


def test_routers_know_what_the_engine_will_find(demo_model: Path) -> None:
    """Each knows its salt alone, through evictions and a reset, also after a while in which it has not read."""
    number = random.Random(1)
    with EngineUnderTest(demo_model, "--num-pages", "24") as engine:
        routers = {salt: Router(engine.address, salt) for salt in ("", "a")}
        with routers[""], routers["a"], DealerClient(engine.address) as client:
            for turn in range(60):
                salt = "" if turn < 20 else number.choice(["", "a", "a", "unwatched"])
                tokens = prompts(number)
                expected = None
                if salt in routers and turn >= 20:
                    routers[salt].catch_up()
                    expected = routers[salt].expect_cached(salt, tokens)
                assert generate(client, str(turn), tokens, salt) == expected or expected is None
            stats = client.wait_until_at_rest()
            assert stats["evictions"] > 0
            assert stats["prefix_watchers"] == 2
            for salt, router in routers.items():
                router.catch_up()
                assert [each for report in router.reports for _, each in report.roots] == [salt]
                assert any(report.removed for report in router.reports)
                assert len(router.outline) > 0
            client.send(UtilityCall(-1, "reset_cache"))
            assert client.call("stats")["pages_cached"] == 0
            for router in routers.values():
                router.catch_up()
                assert len(router.outline) == 0


def test_an_idle_engine_tells_all_that_it_has(tmp_path: Path) -> None:
    """More than a report can hold, of a second salt as well; a client that has vanished is forgotten."""
    model = tiny_model.write(tmp_path, tiny_model.weights(), tiny_model.CONFIG | {"max_position_embeddings": 4096})
    with EngineUnderTest(model, "--num-pages", "400") as engine, DealerClient(engine.address) as client:
        for place in range(4):
            generate(client, str(place), [10 + place] * 2500, "ab"[place % 2])
        num_pages = client.wait_until_at_rest()["pages_cached"]
        with Router(engine.address, "a") as router:
            router.until(lambda: len(router.outline) == num_pages // 2)
            assert len(router.reports) == 1
            router.send(WatchPrefixes(["a", "b", "c"]))
            router.until(lambda: len(router.outline) == num_pages)
            assert sum(len(keys) for report in router.reports for _, keys, _ in report.stored) == num_pages
            with Router(engine.address, "b", "a") as other:
                other.until(lambda: len(other.outline) == num_pages)
                assert len(other.reports) > 1
                assert all(sum(len(keys) for _, keys, _ in each.stored) <= 8192 // PAGE for each in other.reports)
            assert router.call("stats")["prefix_watchers"] == 2
        places = iter(range(1, 128))

        def is_forgotten() -> bool:
            generate(client, f"more {(place := next(places))}", [100, place] * 20, "a")
            return not client.call("stats")["prefix_watchers"]

        client.until(is_forgotten)  # a report finds that its client has gone


def test_without_prefix_cache_nothing_is_told_and_bad_messages_are_rejected(demo_model: Path) -> None:
    with (
        EngineUnderTest(demo_model, "--no-enable-prefix-caching") as engine,
        DealerClient(engine.address) as client,
        Router(engine.address, "") as router,
    ):
        generate(router, "a", [10] * 100)
        assert router.catch_up()["prefix_watchers"] == 1
        assert router.reports == []
        for salts in (["x" * 1025], ["x"] * (MAX_WATCHED_SALTS + 1)):
            client.messages.clear()
            client.send(WatchPrefixes(salts))
            assert "WatchPrefixes.salts" in client.first(ErrorMessage).message
        assert client.call("stats")["prefix_watchers"] == 1


# Without a model


def reports(engine: Engine, client_id: bytes) -> list[PrefixReport]:
    """Return the reports to a client; other messages to it would be errors."""
    found = [message for message in engine.sent.get(client_id, []) if isinstance(message, PrefixReport)]
    assert len(found) == len(engine.sent.get(client_id, []))
    return found


def outline_of(told: list[PrefixReport]) -> PrefixOutline:
    """Return an outline that has been made of reports."""
    outline = PrefixOutline()
    outline.add(ENGINE, SMALL_PAGE)
    for report in told:
        outline.report(ENGINE, report)
    return outline


def test_the_next_report_waits_until_the_last_has_left() -> None:
    engine = Engine(max_model_len=8192, max_num_batched_tokens=8192, num_pages=2000)
    engine.add("long", list(range(900)) * 5, max_tokens=1)
    engine.finish()
    engine.core.receive(b"router", WatchPrefixes([""]))
    counts: list[int] = []
    for _ in range(3):
        for _ in range(3):
            engine.step()
        (stored,) = [stored for report in reports(engine, b"router")[len(counts) :] for stored in report.stored]
        counts.append(len(stored[1]))
        wakes = engine.num_wakes
        engine.core.report_sent(b"router")
        assert engine.num_wakes == wakes + 1
    engine.step()
    assert counts == [512, 512, 101]
    assert cached(outline_of(reports(engine, b"router")), "", list(range(900)) * 5) == {ENGINE: 4500}


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(["", "a"]), st.lists(st.integers(0, 1), min_size=1, max_size=6))), st.data())
def test_a_slow_client_learns_everything_at_last(requests: list[tuple[str, list[int]]], data: st.DataObject) -> None:
    """Whenever its reports leave, and whatever is evicted meanwhile."""
    engine = Engine(num_pages=16)
    engine.core.receive(b"router", WatchPrefixes(["a"]))
    num_left = 0

    def leave() -> None:
        nonlocal num_left
        if num_left < len(reports(engine, b"router")):
            num_left += 1
            engine.core.report_sent(b"router")

    for index, (salt, pages) in enumerate(requests):
        prompt = [page for page in pages for _ in range(SMALL_PAGE)]
        engine.add(str(index), [*prompt, 2], max_tokens=2, cache_salt=salt)
        engine.finish()
        if data.draw(st.booleans()):
            leave()
        assert len(reports(engine, b"router")) <= num_left + 1
    for _ in range(3):
        leave()
        engine.step()
    outline = outline_of(reports(engine, b"router"))
    tree = engine.executor.sequences.tree
    root = tree.enter("a")
    for salt, pages in requests:
        if salt == "a":
            prompt = [page for page in pages for _ in range(SMALL_PAGE)]
            assert cached(outline, "a", prompt).get(ENGINE, 0) == SMALL_PAGE * len(tree.match(root, prompt))
    tree.leave(root)


def test_a_client_that_has_left_is_told_nothing() -> None:
    engine = Engine()
    engine.core.receive(b"router", WatchPrefixes([""]))
    engine.core.receive(b"router", Goodbye())
    engine.add("a", list(range(20)), max_tokens=1)
    engine.finish()
    assert reports(engine, b"router") == []


def test_too_many_clients_and_too_many_salts_are_rejected() -> None:
    engine = Engine()
    for place in range(MAX_WATCHERS):
        engine.core.receive(bytes([place]), WatchPrefixes(["a"]))
    engine.core.receive(b"late", WatchPrefixes(["a"]))
    (error,) = engine.sent.pop(b"late")
    assert isinstance(error, PrefixReport)
    assert "16 clients watch the prefix cache of this engine" in error.refusal
    engine.core.receive(bytes([3]), Goodbye())
    engine.core.receive(b"late", WatchPrefixes(["a", "a"]))
    engine.core.receive(b"late", WatchPrefixes([str(place) for place in range(MAX_WATCHED_SALTS)]))
    (error,) = engine.sent.pop(b"late")
    assert isinstance(error, PrefixReport)
    assert "watches 1 salts, and with 16384 more they would be above 16384" in error.refusal
    engine.core.receive(b"late", WatchPrefixes(["a", *(str(place) for place in range(MAX_WATCHED_SALTS - 1))]))
    for salt in ("a", "5", str(MAX_WATCHED_SALTS)):
        engine.add(salt, list(range(20)), max_tokens=1, cache_salt=salt)
        engine.finish()
        engine.core.report_sent(b"late")
    assert [salt for report in reports(engine, b"late") for _, salt in report.roots] == ["a", "5"]
