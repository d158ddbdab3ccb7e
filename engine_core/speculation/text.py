"""Drafts from text: what followed the last tokens where they occurred before, or in what a client has predicted."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine_core.request import NO_SLOT, Request
from quire.engine_core.scheduling.batch import Batch
from quire.engine_core.speculation.proposer import Proposer
from quire.kernels.runner import Sequences, TextProposer, TextProposerConfig
from quire.protocol.speculative_config import SpeculativeConfig

_SHORTEST_SUFFIX = 2
_INDEXED_TOKENS = 1 << 16  # of predictions in a step, about: others wait for it
_PREDICTED = TextProposerConfig(shortest=3, longest=24, own_text=False)


class TextDrafts(Proposer):
    """Methods ngram (a request's own text) and suffix (also the answers of earlier requests of its cache salt).

    Without a configuration there are drafts only for requests that bring a prediction, which every method looks in.
    """

    def __init__(self, sequences: Sequences, config: SpeculativeConfig | None = None) -> None:
        self._least = 0.0
        self._only_predicted = config is None
        self._predicted: dict[Request, bool] = {}  # requests with a prediction, and whether it is indexed
        if config is None:
            chosen = _PREDICTED
        elif config.method == "ngram":
            chosen = TextProposerConfig(shortest=config.prompt_lookup_min, longest=config.prompt_lookup_max)
        else:
            self._least = config.suffix_decoding_min_token_prob
            chosen = TextProposerConfig(
                shortest=_SHORTEST_SUFFIX, longest=config.suffix_decoding_max_tree_depth, majority=True,
                most_answers=config.suffix_decoding_max_cached_requests, factor=config.suffix_decoding_max_spec_factor,
            )  # fmt: skip
        self._native = TextProposer(sequences, chosen)

    @property
    def is_idle(self) -> bool:
        """See Proposer."""
        return self._only_predicted and not self._predicted

    def begin(self, request: Request) -> None:
        """See Proposer."""
        if request.message.predicted_token_ids:
            self._predicted[request] = False

    def propose(self, requests: Sequence[Request], most: list[int], least: float) -> list[int]:
        """See Proposer."""
        budget = _INDEXED_TOKENS
        for request in requests if self._predicted else ():
            if budget > 0 and not self._predicted.get(request, True):
                self._native.predict(request.slot, request.message.predicted_token_ids)
                self._predicted[request] = True
                budget -= len(request.message.predicted_token_ids)
        return self._native.propose([request.slot for request in requests], most, max(least, self._least))

    def learn(self, slots: list[int], accepted: list[int]) -> None:
        """See Proposer."""
        self._native.learn(slots, accepted)

    def end(self, request: Request) -> None:
        """Keep the answer for later requests."""
        self._predicted.pop(request, None)
        if request.slot != NO_SLOT and request.decoding.takes_spans:  # a beam search may have closed it
            self._native.end(request.slot)


class PredictedDrafts(Proposer):
    """Drafts from what clients have predicted, and another proposer's for the other requests."""

    def __init__(self, predicted: Proposer, other: Proposer) -> None:
        self._predicted, self._other = predicted, other

    @property
    def seconds(self) -> float:
        """See Proposer."""
        return self._other.seconds

    @property
    def observes(self) -> bool:
        """See Proposer."""
        return self._other.observes

    def begin(self, request: Request) -> None:
        """See Proposer."""
        self._predicted.begin(request)

    def observe(self, batch: Batch) -> None:
        """See Proposer."""
        self._other.observe(batch)

    def propose(self, requests: Sequence[Request], most: list[int], least: float) -> list[int]:
        """See Proposer."""
        counts, has_prediction = [0] * len(requests), [bool(each.message.predicted_token_ids) for each in requests]
        for proposer, is_predicted in ((self._predicted, True), (self._other, False)):
            rows = [row for row, has_one in enumerate(has_prediction) if has_one is is_predicted]
            if rows:
                proposed = proposer.propose([requests[row] for row in rows], [most[row] for row in rows], least)
                for row, count in zip(rows, proposed, strict=True):
                    counts[row] = count
        return counts

    def branches(self, requests: Sequence[Request], least: float) -> list[tuple[int, list[int]]]:
        """See Proposer."""
        return self._other.branches(requests, least)

    def learn(self, slots: list[int], accepted: list[int]) -> None:
        """See Proposer. Each knows only the slots that it has proposed for."""
        self._predicted.learn(slots, accepted)
        self._other.learn(slots, accepted)

    def end(self, request: Request) -> None:
        """See Proposer."""
        self._predicted.end(request)
        self._other.end(request)
