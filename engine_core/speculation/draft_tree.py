"""Trees of drafts: a main path, and branches that leave it where another token is probable too."""

from __future__ import annotations

from dataclasses import dataclass, field

_LEVELS = 10  # of the probability that a head gives a token
_LEARN = 1 / 64  # weight of a draft
_REVIVE = 1 / 512  # towards the head's probability, with each draft that is not tried


class Confidence:
    """Acceptance rates of drafts, by the probability that the head gives them.

    Where that is low, a draft may still be the likeliest token, which is what a greedy request samples.
    """

    def __init__(self, least: float) -> None:
        """Begin with as many as the head's probabilities say, but `least`."""
        self._first = [max((level + 0.5) / _LEVELS, least) for level in range(_LEVELS)]
        self._rates = [*self._first]

    def __call__(self, probability: float) -> float:
        """Return the acceptance probability of a draft to which the head gives this probability."""
        return self._rates[_level(probability)]

    def learn(self, probability: float, *, is_accepted: bool) -> None:
        """Note what has become of such a draft."""
        level = _level(probability)
        self._rates[level] += _LEARN * (is_accepted - self._rates[level])

    def revive(self, probability: float) -> None:
        """Note that such a draft has not been tried: one day it is."""
        level = _level(probability)
        self._rates[level] += _REVIVE * (self._first[level] - self._rates[level])


def _level(probability: float) -> int:
    return min(int(probability * _LEVELS), _LEVELS - 1)


@dataclass(frozen=True)
class TreeConfidence:
    """Confidence in the drafts of trees: in those that are sampled, and in the others that begin branches."""

    sampled: Confidence = field(default_factory=lambda: Confidence(0.5))
    others: Confidence = field(default_factory=lambda: Confidence(0.0))


@dataclass(slots=True)
class DraftPath:
    """Tokens from the root of a tree on, in the head's sequence `slot`, the last one in a step's number `row`.

    `given[i]` is what the head gives token i; `probability` that all are accepted. Those from number `first` on are on
    no other path, and `gain` is the sum of their acceptance probabilities.
    """

    slot: int
    row: int = 0
    first: int = 0
    tokens: list[int] = field(default_factory=list)
    given: list[float] = field(default_factory=list)
    probability: float = 1.0
    gain: float = 0.0


class DraftTree:
    """The drafts of a request that grow in one step, from its token number `position` on."""

    def __init__(self, position: int, most: int, least: float, slot: int, confidence: TreeConfidence) -> None:
        """Paths have up to `most` tokens and are accepted with probability `least`; `slot` is the main path's."""
        self._confidence = confidence
        self.position = position
        self.main = DraftPath(slot)
        self.num_drafts = 0
        self.own_slots: list[int] = []  # of branches
        self.most = most
        self._least = least
        self._branches: list[DraftPath] = []

    def add(self, path: DraftPath, token: int, given: float) -> None:
        """Extend a path by a token that the head gives this probability."""
        splits = path is not self.main and len(path.tokens) == path.first
        path.tokens.append(token)
        path.given.append(given)
        path.probability *= (self._confidence.others if splits else self._confidence.sampled)(given)
        path.gain += path.probability

    def split(self, path: DraftPath, other: tuple[int, float]) -> DraftPath:
        """Return a branch that leaves a path with another token than that which the path is about to get."""
        size = len(path.tokens)
        branch = DraftPath(path.slot, first=size, tokens=[*path.tokens], given=[*path.given])
        branch.probability = path.probability
        self.add(branch, *other)
        self._branches.append(branch)
        return branch

    def goes_on(self, path: DraftPath) -> bool:
        """Return True if a path should get one more token; the main path keeps its last one only if that pays."""
        pays = path.probability >= self._least
        if path is self.main and pays:
            self.num_drafts = len(path.tokens)
        return pays and len(path.tokens) < self.most

    def branches(self, least: float) -> list[list[int]]:
        """Return the branches that are worth it: they also compute the tokens that they share with the main path."""
        worthwhile = [path for path in self._branches if path.gain >= least * (1 + len(path.tokens))]
        worthwhile.sort(key=lambda path: -path.gain)
        return [path.tokens[: self.num_drafts] for path in worthwhile if path.first < self.num_drafts]

    def learn(self, sampled: list[int]) -> None:
        """Learn from the tokens that have been sampled here: how far the main path was right, and where it was not."""
        main, confidence = self.main, self._confidence
        for number, (token, given) in enumerate(zip(main.tokens, main.given, strict=True)):
            if number >= len(sampled):
                break
            if number >= self.num_drafts:
                confidence.sampled.revive(given)
                break
            is_accepted = token == sampled[number]
            confidence.sampled.learn(given, is_accepted=is_accepted)
            if not is_accepted:
                for branch in self._branches:
                    if branch.first == number:
                        confidence.others.learn(
                            branch.given[number], is_accepted=branch.tokens[number] == sampled[number]
                        )
                break
