"""The prefix cache as a tree, as the server sends it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from http_server import Server
from patience import PATIENCE

from quire.frontend import AsyncLLM
from quire.frontend.http.errors import ApiError
from quire.frontend.http.operations.pictures import MAX_PAUSE, pause_after
from quire.frontend.http.operations.prefixes import PrefixTrees, shown_of
from quire.protocol.messages import PrefixRun, PrefixTree

COMMON = "Once upon a time there was a fox who lived in a deep forest and ate cheese every day. " * 4


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server.start() as server:
        for text, salt in [("The king came.", ""), ("A crow sang.", ""), ("", ""), ("", "mine")]:
            body = {"prompt": COMMON + text * 12, "max_tokens": 1, **({"cache_salt": salt} if salt else {})}
            assert server.request("/v1/completions", body).status == 200
        yield server


def tree_of(server: Server, query: str = "") -> Any:
    reply = server.request(f"/view/prefixes{query}")
    assert reply.status == 200, reply.body
    return reply.json()


def test_a_tree_has_texts_where_branches_begin(server: Server) -> None:
    tree = tree_of(server)
    whole, common, salt, *_ = tree["runs"]
    assert (whole[0], whole[1], whole[6]) == (-1, -1, 2)
    first, last = tree["texts"][str(common[0])]
    assert "Once upon a time" in first
    assert "cheese" in last
    begins = [tree["texts"][str(run[0])][0] for run in tree["runs"] if run[1] == 1]
    assert any("The king came." in text for text in begins)
    assert any("A crow sang." in text for text in begins)
    assert (salt[2], salt[5]) == (True, [0, 0, 0, 0, 0])
    salted = [run[0] for run in tree["runs"] if run[2]]
    assert len(salted) == 2
    assert not {str(run) for run in salted} & tree["texts"].keys()


def test_texts_are_sent_once_to_who_knows_the_tag(server: Server) -> None:
    first = tree_of(server)
    assert (first["goes_on"], len(first["texts"])) == (False, 3)
    common = first["runs"][1][0]
    second = tree_of(server, f"?known={first['tag']}&shown={common}:1")
    assert (second["goes_on"], second["texts"]) == (True, {})
    assert len(second["runs"]) == len(first["runs"]) - 1
    third = tree_of(server, f"?known={second['tag']}")
    assert (third["texts"], third["runs"]) == ({}, first["runs"])
    other = tree_of(server, "?known=nonsense")
    assert (other["goes_on"], other["texts"]) == (False, first["texts"])


@pytest.mark.parametrize(
    ("shown", "problem"),
    [
        ("1", "must be ID:COUNT"),
        ("1:x", "must be ID:COUNT"),
        ("1:2:3", "must be ID:COUNT"),
        ("1:201", "a count is 0 to 200"),
        ("1:-1", "a count is 0 to 200"),
        (f"{1 << 63}:1", "an id one that an answer had"),
        (",".join(f"{run}:1" for run in range(129)), "129 runs; at most 128"),
    ],
)
def test_what_cannot_be_shown_is_an_error(server: Server, shown: str, problem: str) -> None:
    reply = server.request(f"/view/prefixes?shown={shown}")
    assert reply.status == 400
    assert problem in reply.error["message"]
    assert reply.error["param"] == "shown"


def test_shown_is_read_from_the_query() -> None:
    assert shown_of("") == {}
    assert shown_of("-1:200,7:0") == {-1: 200, 7: 0}


class StandIn:
    """In place of an engine: gives the same tree each time, which took `seconds`."""

    tokenizer = None

    def __init__(self, seconds: float = 0.0) -> None:
        self.tree = PrefixTree(
            4,
            [PrefixRun(-1, -1, False, 0, 0, [0] * 5, 1, 1), PrefixRun(5, 0, False, 1, 0, [0, 0, 0, 1, 0], 0, 0)],
            seconds,
        )
        self.tree.runs[1].first_token_ids = [1, 2, 3, 4]
        self.engine_info = self
        self.engine_pid = 1
        self.asked = 0

    async def prefix_tree(self, _shown: object, _engine: object = None) -> PrefixTree:
        self.asked += 1
        return self.tree


def trees_of(stand_in: object, **options: Any) -> PrefixTrees:
    trees: Any = PrefixTrees
    made: PrefixTrees = trees(stand_in, **options)
    return made


def test_a_new_engine_has_other_ids() -> None:
    async def test() -> None:
        engine = StandIn()
        trees = trees_of(engine)
        first = await trees.picture({})
        assert first.texts == {5: ("1 2 3 4", "")}
        assert (await trees.picture({}, first.tag)).texts == {}
        engine.engine_pid = 2
        after = await trees.picture({}, first.tag)
        assert (after.goes_on, after.texts) == (False, first.texts)

    asyncio.run(test())


def test_who_may_not_read_prompts_gets_no_texts() -> None:
    picture = asyncio.run(trees_of(StandIn(), shows_prompts=False).picture({}))
    assert (picture.shows_text, picture.texts, len(picture.runs)) == (False, {}, 2)


def test_a_tree_that_takes_long_is_not_asked_for_again_at_once() -> None:
    async def test() -> None:
        engine = StandIn(seconds=1000.0)
        trees = trees_of(engine)
        await trees.picture({})
        again = asyncio.create_task(trees.picture({}))
        for _ in range(100):
            await asyncio.sleep(0)
        assert (engine.asked, again.done()) == (1, False)
        again.cancel()

    asyncio.run(test())


def test_a_look_that_has_waited_for_a_processor_delays_the_next_ones_by_seconds_only() -> None:
    assert pause_after(0.001) == pytest.approx(0.1)
    assert pause_after(6.0) == MAX_PAUSE


def test_an_engine_that_is_busy_is_an_error() -> None:
    class Busy(StandIn):
        async def prefix_tree(self, _shown: object, _engine: object = None) -> PrefixTree:
            raise TimeoutError

    with pytest.raises(ApiError, match="busy with one step") as error:
        asyncio.run(trees_of(Busy()).picture({}))
    assert error.value.status == 503


def test_an_engine_alone_has_no_branches() -> None:
    async def test() -> None:
        async with AsyncLLM(num_pages=64, start_timeout=PATIENCE) as llm:
            [whole] = (await llm.prefix_tree()).runs
            assert (whole.id, whole.branches, whole.pages_below) == (-1, 0, 0)

    asyncio.run(test())
