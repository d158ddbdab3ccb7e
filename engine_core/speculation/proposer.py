"""The interface of whatever drafts tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from quire.engine_core.request import Request


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

    def begin(self, request: Request) -> None:  # noqa: B027 - most wait for its tokens
        """Take note of a request that has arrived."""

    @abstractmethod
    def propose(self, requests: Sequence[Request], most: list[int], least: float) -> list[int]:
        """Append drafts to the sequences of requests; return how many.

        `most[i]` at most, and as long as those of a request hold with a probability of `least` or more. KV pages are
        reserved for them; where there are none left, there are fewer drafts.
        """

    @abstractmethod
    def learn(self, slots: list[int], accepted: list[int]) -> None:
        """Note how many of the drafts have held that were proposed last for the sequences in these slots."""

    def end(self, request: Request) -> None:  # noqa: B027 - most keep nothing of a request
        """Forget a request that ends; its sequence, if it has one, is about to be closed."""
