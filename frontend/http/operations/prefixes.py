"""The prefix cache as a tree, for the page: a part of it, chosen by each viewer, with text in place of token ids."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping

import msgspec

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.http.errors import ApiError, bad_request
from quire.frontend.http.operations.pictures import pause_after
from quire.protocol.messages import MAX_SHOWN_BRANCHES, MAX_SHOWN_RUNS, PrefixRun, PrefixTree

_PATIENCE = 5.0  # seconds
_MAX_TAGS = 64  # answers whose texts are known to have been sent

RunTexts = tuple[str, str]


class RunPicture(msgspec.Struct, array_like=True):
    """A `PrefixRun` without its tokens, in this order of fields."""

    id: int
    parent: int
    is_salted: bool
    hits: int
    users: int
    num_pages: list[int]
    branches: int
    pages_below: int
    is_next_evicted: bool


class TreePicture(msgspec.Struct):
    """A part of the prefix cache.

    `runs` are arrays of `RunPicture`, parents first, the whole cache with the id -1 at their head. `texts`: the first
    tokens of a run's first page and, if that is another one, of its last, by the run's id. If `goes_on`, those that
    were in the answer with the tag `known` are left out. None of salted runs, and without `shows_text` none at all.
    """

    tag: str
    goes_on: bool
    block_size: int
    shows_text: bool
    runs: list[RunPicture]
    texts: dict[int, RunTexts]


class PrefixTrees:
    """Asks the engine for trees, one at a time, and pauses after each, so that they take little of its time."""

    def __init__(self, llm: AsyncLLM, shows_prompts: bool = True, engine: int | None = None) -> None:
        """`shows_prompts`: viewers may read the prompts of all. `engine`: as for `AsyncLLM.snapshot`."""
        self._llm = llm
        self._engine = engine
        self._shows_prompts = shows_prompts
        self._turn = asyncio.Lock()
        self._free_at = 0.0
        self._sent: dict[str, tuple[int, frozenset[int]]] = {}  # by tag: the engine's pid, ids of runs with text

    async def picture(self, shown: Mapping[int, int], known: str = "") -> TreePicture:
        """Return the tree with so many branches of some runs, by their ids. `known`: the tag of an earlier answer.

        Raises `ApiError` if the engine does not answer in time.
        """
        async with self._turn:
            await asyncio.sleep(max(0.0, self._free_at - time.monotonic()))
            try:
                tree = await asyncio.wait_for(self._llm.prefix_tree(shown, self._engine), _PATIENCE)
            except TimeoutError:
                message = f"the engine has been busy with one step for more than {_PATIENCE:g} seconds; ask again"
                raise ApiError(503, message, code="engine_busy") from None
            self._free_at = time.monotonic() + pause_after(tree.seconds)
        return self._picture(tree, known)

    def _picture(self, tree: PrefixTree, known: str) -> TreePicture:
        pid = self._pid  # a new engine begins with the ids again
        sent = self._sent.get(known)
        goes_on = sent is not None and sent[0] == pid
        earlier = sent[1] if sent is not None and goes_on else frozenset[int]()
        readable = [run for run in tree.runs if run.first_token_ids] if self._shows_prompts else []
        texts = {run.id: self._texts(run) for run in readable if run.id not in earlier}
        tag = secrets.token_hex(6)
        self._sent[tag] = pid, earlier | texts.keys()
        if len(self._sent) > _MAX_TAGS:
            del self._sent[next(iter(self._sent))]
        pictures = [msgspec.convert(run, RunPicture, from_attributes=True) for run in tree.runs]
        return TreePicture(tag, goes_on, tree.block_size, self._shows_prompts, pictures, texts)

    @property
    def _pid(self) -> int:
        if self._engine is None:
            return self._llm.engine_info.engine_pid
        pids = {engine.number: engine.ready.engine_pid for engine in self._llm.engines()}
        return pids.get(self._engine, 0)

    def _texts(self, run: PrefixRun) -> RunTexts:
        return self._text(run.first_token_ids), self._text(run.last_token_ids)

    def _text(self, token_ids: list[int]) -> str:
        if self._llm.tokenizer is None:
            return " ".join(map(str, token_ids))
        return self._llm.tokenizer.decode(token_ids, skip_special_tokens=False)


def shown_of(text: str) -> dict[int, int]:
    """Return the branches to show of the query's `shown`, "ID:COUNT,ID:COUNT". Raises `ApiError` for another form."""
    pairs = [pair.split(":") for pair in text.split(",")] if text else []
    if len(pairs) > MAX_SHOWN_RUNS:
        raise bad_request(f"shown names {len(pairs)} runs; at most {MAX_SHOWN_RUNS} are allowed", "shown")
    try:
        shown = {int(run): int(count) for run, count in pairs}
    except ValueError:
        raise bad_request("shown must be ID:COUNT,ID:COUNT,... with whole numbers", "shown") from None
    for run, count in shown.items():
        if not (0 <= count <= MAX_SHOWN_BRANCHES and abs(run) < 1 << 63):
            allowed = f"a count is 0 to {MAX_SHOWN_BRANCHES}, and an id one that an answer had"
            raise bad_request(f"shown has {run}:{count}; {allowed}", "shown")
    return shown
