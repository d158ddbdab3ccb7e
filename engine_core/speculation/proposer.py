"""The interface of whatever drafts tokens."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from quire.engine_core.request import Request
from quire.engine_core.scheduling.batch import Batch

MOST_COPIED = 1 << 17  # tokens of sequences that branches leave, in a step: a branch is a copy, which takes time

_ALL = 1 << 16  # more than a step computes


class Proposer(ABC):
    """Drafts tokens that requests may sample next. A wrong draft costs time and changes nothing else."""

    @property
    def seconds(self) -> float:
        """Time that a draft takes before it is computed; 0 if that is not worth counting."""
        return 0.0

    @property
    def is_idle(self) -> bool:
        """True if there is no request that it would draft for."""
        return False

    @property
    def observes(self) -> bool:
        """True if `observe` is to be called after steps: those after which it is not cost less."""
        return False

    def begin(self, request: Request) -> None:  # noqa: B027 - most wait for its tokens
        """Take note of a request that has arrived."""

    def observe(self, batch: Batch) -> None:  # noqa: B027 - most read tokens only
        """Take note of a step that has been computed, whose requests have moved on."""

    @abstractmethod
    def propose(self, requests: Sequence[Request], most: list[int], least: float) -> list[int]:
        """Append drafts to the sequences of requests; return how many.

        `most[i]` at most, as long as all of a request are accepted with a probability of `least` or more. KV pages are
        reserved for them; where there are none left, there are fewer drafts.
        """

    def branches(self, requests: Sequence[Request], least: float) -> list[tuple[int, list[int]]]:
        """Return other paths than the drafts that were proposed last for these requests, each with the request's index.

        They are as long as the drafts at most; one without tokens is the lookahead token. A branch computes the
        sequence's last token again; it is worth it if its tokens are so many times as probable as `least`.
        """
        return []

    @abstractmethod
    def learn(self, slots: list[int], accepted: list[int]) -> None:
        """Take note of the number of accepted drafts of those proposed last for the sequences in these slots."""

    def end(self, request: Request) -> None:  # noqa: B027 - most keep nothing of a request
        """Forget a request that ends; its sequence, if it has one, is about to be closed."""


class NoDrafts(Proposer):
    """Drafts nothing: in the place of what has failed."""

    @property
    def is_idle(self) -> bool:
        """See Proposer."""
        return True

    def propose(self, requests: Sequence[Request], most: list[int], least: float) -> list[int]:
        """See Proposer."""
        return [0] * len(requests)

    def learn(self, slots: list[int], accepted: list[int]) -> None:
        """See Proposer."""


def drafts_worthwhile(acceptance: float, least: float) -> int:
    """Return the number of drafts that are all accepted with probability `least`, each with `acceptance`."""
    if not 0 < least < 1 or not 0 < acceptance < 1:
        return _ALL if acceptance >= least else 0
    return int(math.log(least) / math.log(acceptance))
