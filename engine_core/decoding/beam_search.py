"""Beam search: the continuations of one prompt whose tokens are the most probable together.

The rules are those of `transformers`' `generate(num_beams=beam_width, do_sample=False)`. In each step the likeliest
continuations of all live beams are taken: of the `beam_width` best, those that stop are finished; the best that don't
stop are the next beams. A finished one is rated by its log probability over its length to the `length_penalty`, and
the search ends at the full length, or when so many are finished and none that lives can become better than the worst.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quire.engine_core.executor import LogprobsEntry
from quire.kernels.runner import Sequences
from quire.protocol.messages import BeamSequence, FinishReason, SamplingParams, TokenLogprobs


class Link(NamedTuple):
    """The last position of a beam, and those before it: beams share their beginnings."""

    before: Link | None
    entry: TokenLogprobs


@dataclass(slots=True)
class Beam:
    """A continuation that lives. `source` is its slot, or the one that it is still to be forked from."""

    logprob: float
    path: Link | None
    slot: int | None
    source: int

    @property
    def token_id(self) -> int:
        """Its last token; there is one once it has gone on from the prompt."""
        assert self.path is not None
        return self.path.entry.token_ids[0]


class Candidate(NamedTuple):
    """One token more for a beam: the `rank`-th likeliest after it."""

    logprob: float
    beam: Beam
    entry: LogprobsEntry
    rank: int

    @property
    def token_id(self) -> int:
        """The token."""
        return self.entry[0][self.rank]

    def path(self, num_logprobs: int) -> Link:
        """The beam's path with this token, and the `num_logprobs` likeliest at its position."""
        token_ids, logprobs, _ = self.entry
        top = slice(1, 1 + num_logprobs)
        own = TokenLogprobs([self.token_id, *token_ids[top]], [logprobs[self.rank], *logprobs[top]], self.rank)
        return Link(self.beam.path, own)


class Finished(NamedTuple):
    """A continuation that has ended, and how it is rated."""

    score: float
    logprob: float
    path: Link
    stopped: bool


def num_candidates(beam_width: int, num_stop_tokens: int) -> int:
    """Continuations taken in each step: if all others stop, `beam_width` are left."""
    return max(2, 1 + num_stop_tokens) * beam_width


class BeamSearch:
    """One search: its live beams, each a sequence in a slot of its own, and the best that are finished."""

    def __init__(
        self,
        sampling: SamplingParams,
        stop_token_ids: frozenset[int],
        eos_token_ids: frozenset[int],
        max_tokens: int,
    ) -> None:
        """Beams end with `stop_token_ids`; those of `eos_token_ids` are told as no `stop_reason`."""
        self.width = sampling.beam_width
        self.num_candidates = num_candidates(self.width, len(stop_token_ids))
        self._sampling = sampling
        self._stop_token_ids = stop_token_ids
        self._eos_token_ids = eos_token_ids
        self._max_tokens = max_tokens
        self.restart()

    def restart(self) -> None:
        """Back to the prompt. The same steps follow as before, since nothing is drawn."""
        self.live: list[Beam] = []
        self.finished: list[Finished] = []  # the best first
        self.length = 0
        self.done = False

    def begin(self, slot: int) -> None:
        """The prompt is in this slot."""
        self.live = [Beam(0.0, None, slot, slot)]

    @property
    def slots(self) -> list[int]:
        """Of the live beams that have one; each has, once the scheduler has forked them."""
        return [beam.slot for beam in self.live if beam.slot is not None]

    def advance(self, entries: Sequence[LogprobsEntry], sequences: Sequences) -> None:
        """One step for all: `entries` are the `num_candidates` likeliest tokens after each live beam."""
        self.length += 1
        best = heapq.nlargest(self.num_candidates, self._candidates(entries), key=lambda candidate: candidate.logprob)
        at_end = self.length >= self._max_tokens
        stops = [at_end or candidate.token_id in self._stop_token_ids for candidate in best]
        for candidate, stop in zip(best[: self.width], stops, strict=False):
            if stop:
                self._finish(candidate)
        successors = [candidate for candidate, stop in zip(best, stops, strict=True) if not stop][: self.width]
        self.done = at_end or (len(self.finished) == self.width and not self._goes_on(successors[0]))
        if not self.done:
            self._follow(successors, sequences)

    def best(self, count: int) -> list[BeamSequence]:
        """The `count` best of those that are finished."""
        return [self._told(finished) for finished in self.finished[:count]]

    def _candidates(self, entries: Sequence[LogprobsEntry]) -> list[Candidate]:
        return [
            Candidate(beam.logprob + entry[1][rank], beam, entry, rank)
            for beam, entry in zip(self.live, entries, strict=True)
            for rank in range(1, self.num_candidates + 1)
        ]

    def _finish(self, candidate: Candidate) -> None:
        score = candidate.logprob / self.length**self._sampling.length_penalty
        stopped = candidate.token_id in self._stop_token_ids
        path = candidate.path(self._sampling.logprobs or 0)
        self.finished.append(Finished(score, candidate.logprob, path, stopped))
        self.finished.sort(key=lambda finished: -finished.score)
        del self.finished[self.width :]

    def _goes_on(self, best: Candidate) -> bool:
        """Whether to go on with `best` when enough are finished; `transformers` guesses its final length like this."""
        sampling = self._sampling
        if sampling.early_stopping is True:
            return False
        far = sampling.early_stopping == "never" and sampling.length_penalty > 0
        length = self._max_tokens if far else self.length
        return bool(best.logprob / length**sampling.length_penalty > self.finished[-1].score)

    def _follow(self, successors: list[Candidate], sequences: Sequences) -> None:
        """A beam's first successor takes its slot; others are to fork from it; a beam without any is closed."""
        taken: set[int] = set()
        live = []
        for candidate in successors:
            source = candidate.beam.source  # which is the beam's own slot: it has run
            path = candidate.path(self._sampling.logprobs or 0)
            live.append(Beam(candidate.logprob, path, None if source in taken else source, source))
            if source not in taken:
                sequences.truncate(source, sequences.num_tokens(source) - 1)  # its likeliest one, not computed yet
                sequences.append(source, candidate.token_id)
                taken.add(source)
        for slot in self.slots:
            if slot not in taken:
                sequences.close(slot)
        self.live = live

    def _told(self, finished: Finished) -> BeamSequence:
        entries = []
        link: Link | None = finished.path
        while link is not None:
            entries.append(link.entry)
            link = link.before
        entries.reverse()
        token_ids = [entry.token_ids[0] for entry in entries]
        if not finished.stopped:
            return BeamSequence(token_ids, entries, finished.logprob, FinishReason.LENGTH)
        stop_reason = None if token_ids[-1] in self._eos_token_ids else token_ids[-1]
        return BeamSequence(token_ids, entries, finished.logprob, FinishReason.STOP, stop_reason)
