"""Learned costs and gains of drafts: how probable they must be to pay, and whether they do."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from quire.engine_core.averages import blend
from quire.engine_core.speculation.progress import DraftGain

_FIRST_PLAIN = 3  # steps without drafts that are measured before the first with some
_PLAIN_EVERY = 64  # steps with drafts, after which one without measures what these cost
_PLAIN_EARLIER = 2  # of such steps for each without that has been measured, as long as these are few
_BARE_EVERY = 1024  # steps that keep features for a head, after which one without measures what that costs
_ROWS_AT_NO_COST = 16  # before anything is measured: rows that take as long as one, about
_FORGET = 1 / 256  # of what drafts seem to cost, with each step without: bad measurements do not last

_TOLERANCE = 0.01  # part of the time without drafts that may be lost on them
_TRIAL = 4.0  # steps without drafts: their time may be lost before drafts pause, once an engine has run for a while
_LOOK = 0.5  # such steps: their time may be lost on finding no drafts
_RESERVE = 32.0  # such steps, whose time has been gained before, and may be lost too; but no more than were measured
_LEAST_INSTALMENT, _INSTALMENTS = 1 / 16, 64  # of such a step; of what is owed, in which a step pays it
_MOST_OWED = 16.0  # such steps
_CHEAP = 0.002  # part of a step: what takes less is done while drafts pause, too
_LONGEST_REST = 32  # steps


@dataclass(slots=True)
class _StepTime:
    """Seconds of a kind of step."""

    num_measured: int = 0
    seconds: float = 0.0

    def learn(self, seconds: float) -> None:
        """Learn from a step."""
        if self.num_measured < _FIRST_PLAIN:  # the first ones of an engine take longer
            self.seconds = min(seconds, self.seconds or seconds)
        else:
            self.seconds = blend(self.seconds, seconds)
        self.num_measured += 1


@dataclass(slots=True)
class _Steps:
    """Steps of about the same number of decoding sequences: plain ones have no drafts, bare ones no features either."""

    bare: _StepTime = field(default_factory=_StepTime)
    keeping: _StepTime = field(default_factory=_StepTime)  # plain steps that keep features for a head
    since_bare: int = 0  # steps since the last bare one
    draft_seconds: float = 0.0  # seconds that a draft adds to a step
    token_rate: float = 0.0  # tokens a second, accepted drafts included
    since_plain: int = 0  # steps with drafts since the last one without
    balance: float = 0.0  # seconds that drafts have gained, with an allowance for trials, up to the reserve
    owed: float = 0.0  # seconds that drafting has taken, which later steps are to pay
    is_paused: bool = False

    @property
    def num_plain(self) -> int:
        """Number of plain steps that have been measured."""
        return self.bare.num_measured + self.keeping.num_measured

    @property
    def plain_seconds(self) -> float:
        """Time of a step if there were no drafting."""
        return self.bare.seconds

    @property
    def keeping_seconds(self) -> float:
        """Time that a step takes longer where it keeps features for a head."""
        return max(self.keeping.seconds - self.bare.seconds, 0.0) if self.keeping.num_measured else 0.0

    @property
    def needs_bare(self) -> bool:
        """True if the next step should keep no features, to measure it."""
        return self.bare.num_measured < _FIRST_PLAIN or self.since_bare >= _BARE_EVERY

    def needs_plain(self, *, keeps: bool) -> bool:
        """Return True if the next step should have no drafts, to measure it; `keeps`: there is a head."""
        if self.needs_bare or (keeps and self.keeping.num_measured < _FIRST_PLAIN):
            return True
        return self.since_plain >= min(_PLAIN_EVERY, _PLAIN_EARLIER * self.num_plain)

    def saved(self, gain: DraftGain, num_decodes: int) -> float:
        """Return the seconds of later steps that drafts have saved."""
        share = self.plain_seconds / num_decodes
        row = min(self.draft_seconds, share)
        ahead = gain.num_accepted - num_decodes * gain.num_steps
        return self.plain_seconds * gain.num_steps + (row + gain.refilled * (share - row)) * ahead

    def rest(self) -> int:
        """Return how many steps the pause lasts at least, and let their time count from now."""
        allowance = _TOLERANCE * self.plain_seconds
        if not self.is_paused or not allowance:
            return 0
        num_steps = min(int(-self.balance / allowance), _LONGEST_REST)
        self.balance += num_steps * allowance
        return num_steps

    def gain(self, seconds: float, trial: float) -> None:
        """Enter what a step has gained, or lost; drafts pause when `trial` seconds are lost."""
        unit = self.plain_seconds
        self.owe(-seconds - unit)
        instalment = min(self.owed, max(_LEAST_INSTALMENT * unit, self.owed / _INSTALMENTS))
        self.owed -= instalment
        self._enter(max(seconds, -unit) - instalment, trial)

    def gain_beside_prompts(self, seconds: float, own_seconds: float, trial: float) -> None:
        """Enter what a step with prompts has gained, or lost, and what it has taken for later drafts."""
        most = _MOST_OWED * self.plain_seconds
        self._enter(max(seconds, -self.plain_seconds) - min(self.owe(own_seconds), most), trial)

    def owe(self, seconds: float) -> float:
        """Enter what later steps are to pay; return what is too much for them."""
        owed = self.owed + max(seconds, 0.0)
        self.owed = min(owed, _MOST_OWED * self.plain_seconds)
        return owed - self.owed

    def _enter(self, seconds: float, trial: float) -> None:
        unit = self.plain_seconds
        reserve = min(_RESERVE, self.num_plain) * unit
        self.balance = min(self.balance + seconds + _TOLERANCE * unit, reserve)
        self.is_paused = self.balance < -(0.0 if self.is_paused else trial)


class DraftCosts:
    """Learns how long steps with and without drafts take, by the number of sequences that decode.

    A draft that is accepted with probability p adds p tokens and takes some seconds. It pays if these tokens a second
    are more than the step gives without it.

    Whether drafts pay together, with all that is done for them, an account tells: each step with drafts enters the
    seconds of steps without that it has saved (`Progress`), less those that it took. When too much is lost, drafts
    pause, until the hundredth part of the time since then makes up for it. So they cost no more than that. Beside
    prompts, where steps cannot be compared, a draft costs what a token of a prompt does.
    """

    def __init__(self, *, keeps: bool = False) -> None:
        """Know nothing yet; `keeps`: steps may keep features for a head."""
        self._keeps = keeps
        self._seconds = 0.0  # of all steps
        self._steps: dict[int, _Steps] = {}  # by `_key`
        self._by_number: dict[int, _Steps] = {}  # the same, by the number of sequences

    def least_probability(self, num_decodes: int, seconds: float = 0.0) -> float:
        """Return the probability at which a draft pays that takes `seconds` before it is computed; inf for none."""
        steps = self._of(num_decodes)
        if steps.is_paused or steps.needs_plain(keeps=self._keeps):
            return math.inf
        return (steps.draft_seconds + seconds) * steps.token_rate

    def least_beside_prompts(self, num_decodes: int, seconds: float) -> float:
        """Return the probability at which a draft pays that takes `seconds` in a step with prompts; inf for none.

        It saves part of a later step without.
        """
        steps = self._of(num_decodes)
        if steps.is_paused or steps.bare.num_measured < _FIRST_PLAIN or not seconds:
            return math.inf
        return seconds * num_decodes / steps.plain_seconds

    def allows(self, num_decodes: int, seconds: float = math.inf) -> bool:
        """Return False while drafts pause, except for what takes only a small part of a step."""
        steps = self._of(num_decodes)
        return not steps.is_paused or seconds < _CHEAP * steps.plain_seconds

    def keeps(self, num_decodes: int, seconds: float) -> bool:
        """Return True if the next step is to keep features for a head, which takes so many `seconds` after it."""
        return self._keeps and not self._of(num_decodes).needs_bare and self.allows(num_decodes, seconds)

    def rest(self, num_decodes: int) -> int:
        """Return for how many steps of as many sequences drafts pause at least, and need nothing to be learned."""
        return self._of(num_decodes).rest()

    def learn(
        self, num_decodes: int, num_drafts: int, gain: DraftGain, seconds: float, own_seconds: float, *,
        keeps: bool = False,
    ) -> None:  # fmt: skip
        """Learn from a step without prompts; of its `seconds`, `own_seconds` were for finding drafts.

        `keeps`: it has kept features for a head.
        """
        steps = self._of(num_decodes)
        if seconds <= 0:
            return
        self._seconds += seconds
        steps.token_rate = blend(steps.token_rate, (num_decodes + gain.num_accepted) / seconds)
        steps.since_bare = steps.since_bare + 1 if keeps else 0
        if num_drafts:
            steps.since_plain += 1
            keeping_seconds = steps.keeping_seconds if keeps else 0.0
            cost = max(seconds - own_seconds - steps.plain_seconds - keeping_seconds, 0.0) / num_drafts
            steps.draft_seconds = blend(steps.draft_seconds, cost)
            steps.gain(steps.plain_seconds + steps.saved(gain, num_decodes) - seconds, self._trial(steps, _TRIAL))
            return
        plain = seconds - own_seconds
        likely = plain / (num_decodes + _ROWS_AT_NO_COST)
        if steps.num_plain:
            steps.draft_seconds += _FORGET * (likely - steps.draft_seconds)
        else:
            steps.draft_seconds = max(likely, self._draft_seconds_near(num_decodes))
        (steps.keeping if keeps else steps.bare).learn(plain)
        steps.since_plain = 0
        lost = own_seconds + (steps.keeping_seconds if keeps else 0.0)
        steps.gain(0.0 if steps.is_paused else -lost, self._trial(steps, _LOOK))

    def learn_beside_prompts(
        self, num_decodes: int, num_drafts: int, gain: DraftGain, draft_seconds: float, own_seconds: float
    ) -> None:
        """Learn from a step with prompts: what a draft took, and what finding drafts and preparing for others took."""
        steps = self._of(num_decodes)
        if steps.plain_seconds:
            saved = steps.saved(gain, num_decodes) if num_decodes else 0.0
            trial = self._trial(steps, _TRIAL)
            steps.gain_beside_prompts(saved - num_drafts * draft_seconds, own_seconds, trial)

    def _of(self, num_decodes: int) -> _Steps:
        steps = self._by_number.get(num_decodes)
        if steps is None:
            steps = self._by_number[num_decodes] = self._steps.setdefault(_key(num_decodes), _Steps())
        return steps

    def _trial(self, steps: _Steps, most: float) -> float:
        """Return the seconds that may be lost before drafts pause: of `most` steps, but no large part of all so far."""
        return min(most * steps.plain_seconds, _TOLERANCE * self._seconds)

    def _draft_seconds_near(self, num_decodes: int) -> float:
        """Return what a draft adds to a step of the most similar number of sequences; 0 if none is known."""
        key = _key(num_decodes)
        known = [other for other, steps in self._steps.items() if steps.num_plain]
        return self._steps[min(known, key=lambda other: abs(other - key))].draft_seconds if known else 0.0


def _key(num_decodes: int) -> int:
    """Return the same number for about the same number of sequences."""
    return round(4 * math.log2(max(num_decodes, 1)))
