"""Log probabilities of a request: as they arrive from the engine, and as outputs have them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from quire.frontend.outputs import Logprob, PositionLogprobs
from quire.frontend.text.tokenizer import Tokenizer
from quire.protocol.messages import TokenLogprobs


class ArrivedLogprobs:
    """Log probabilities by position, None for one without; they are read step by step, since reading takes long."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._text = (lambda token: None) if tokenizer is None else tokenizer.token_text
        self._unread: deque[TokenLogprobs | None] = deque()
        self._read: list[PositionLogprobs | None] = []

    def add(self, entries: Iterable[TokenLogprobs | None]) -> None:
        """Add those of the positions that follow."""
        self._unread += entries

    def reading(self) -> Iterator[None]:
        """Read all that have arrived, a position at each step."""
        while self._unread:
            entry = self._unread.popleft()
            self._read.append(None if entry is None else self._position(entry))
            yield

    def all(self) -> list[PositionLogprobs | None]:
        """Return the list of all; those that are left are read now."""
        for _ in self.reading():
            pass
        return self._read

    def take(self) -> list[PositionLogprobs | None]:
        """Return all that have not been taken yet, and keep none."""
        taken, self._read = self.all(), []
        return taken

    def _position(self, entry: TokenLogprobs) -> PositionLogprobs:
        """Return the log probabilities of one position by token: the sampled one, then the top N descending."""
        text = self._text
        ranks = [entry.rank, *range(1, len(entry.token_ids))]
        return {
            token: Logprob(logprob, rank, text(token))
            for token, logprob, rank in zip(entry.token_ids, entry.logprobs, ranks, strict=True)
        }
