"""Prefix matches: what a request that starts need not compute, and from where it gets it.

KV pages are found by the tokens that they hold, those of running requests included. A request whose next page another
one is computing may wait for it. Members of a shared-prompt group share also the page that the prompt does not fill:
each gets a copy when it forks from a member that has computed it.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.engine_core.request import Request
from quire.engine_core.scheduling.policies import Policy
from quire.kernels.runner import Sequences
from quire.protocol.engine_shape import EngineShape

NextPage = tuple[str, int, tuple[int, ...]]
"""A page that is still to be computed: salt, the page before it or -1, and its tokens."""


class PrefixMatch(NamedTuple):
    """The tokens that a request need not compute."""

    num_tokens: int
    cached_pages: int = 0  # pages among the matching ones that no request holds
    next_page: NextPage | None = None  # page that the request is going to compute first
    source: Request | None = None  # request that has computed the tokens; None: they are in the prefix cache


class PrefixMatcher:
    """Looks up what a request can start with. Changes nothing."""

    def __init__(self, sequences: Sequences, limits: EngineShape, policy: Policy) -> None:
        self._sequences = sequences
        self._limits = limits
        self._policy = policy

    def find(self, request: Request, computing: set[NextPage | None]) -> PrefixMatch | None:
        """Return the match of an open request; None if it should wait for what another one is `computing`."""
        may_wait = self._policy.may_wait(request) and not request.needs_every_token
        found, cached, end = self._sequences.match(request.slot)
        source = request.decoding.source(request)
        if source is not None and request.num_forked_tokens > found:
            if request.can_fork_from(source):
                return PrefixMatch(request.num_forked_tokens, source=source)
            if may_wait:
                return None
        page = self._next_page(request, found, end)
        return None if may_wait and page is not None and page in computing else PrefixMatch(found, cached, page)

    def page_in_progress(self, request: Request) -> NextPage | None:
        """Return the page that a running request is computing; None if its prompt does not fill it."""
        return self._next_page(request, *self._sequences.shared(request.slot))

    def _next_page(self, request: Request, found: int, end: int) -> NextPage | None:
        tokens = request.prompt_token_ids[found : found + self._limits.block_size]
        if request.cache_salt is None or len(tokens) < self._limits.block_size:
            return None
        return request.cache_salt, end, tuple(tokens)
