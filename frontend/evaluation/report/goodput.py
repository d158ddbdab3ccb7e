"""Goodput: the limits that a request has to meet to count."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from quire.frontend.evaluation.replay.record import Outcome, RequestRecord

_NAMES = {"ttft": "ttft", "tpot": "tpot", "e2el": "e2el", "e2e": "e2el"}
_FORM = "write METRIC:MILLISECONDS with ttft, tpot or e2el as the metric, such as ttft:200 tpot:50"


@dataclass(frozen=True)
class GoodputLimits:
    """Upper limits in milliseconds on a request that counts as goodput; None is no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    @classmethod
    def parse(cls, limits: Iterable[str]) -> GoodputLimits:
        """Parse `["ttft:200", "tpot:50", "e2el:2000"]`, or the same in one string with spaces.

        Raises ValueError for an unknown or repeated metric, a limit that is no positive number, or no limit at all.
        """
        found: dict[str, float] = {}
        for limit in (word for words in limits for word in words.split()):
            name, value = _limit(limit)
            if name in found:
                raise ValueError(f"--goodput {limit}: {name} has a limit of {found[name]:g} ms already; give it once")
            found[name] = value
        if not found:
            raise ValueError(f"--goodput names no limit; {_FORM}")
        return cls(**found)

    @property
    def stated(self) -> dict[str, float]:
        """The given limits, in milliseconds."""
        limits = {"ttft": self.ttft, "tpot": self.tpot, "e2el": self.e2el}
        return {name: limit for name, limit in limits.items() if limit is not None}

    def met(self, record: RequestRecord) -> list[str]:
        """Return the limits that the request meets: none unless it is complete.

        An answer of one token has no TPOT and meets any limit on it, as in vLLM.
        """
        if record.outcome is not Outcome.COMPLETED or record.ttft is None or record.e2e is None:
            return []
        seconds = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.e2e}
        return [name for name, limit in self.stated.items() if seconds[name] * 1000 <= limit]


def _limit(text: str) -> tuple[str, float]:
    metric, colon, number = text.partition(":")
    name = _NAMES.get(metric)
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not colon or name is None or not 0 < value < math.inf:
        raise ValueError(f"--goodput {text} is not a limit; {_FORM}")
    return name, value
