"""The upper bounds of the histograms' buckets, in seconds or counts.

Those without FINE in their name are vLLM's, so that its dashboards and alerts work. A small model on a good host
answers in less than the first of them; therefore the finer ones.
"""

from __future__ import annotations

TIME_TO_FIRST_TOKEN: list[float] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
]  # fmt: skip

TIME_PER_TOKEN: list[float] = [
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
]  # fmt: skip

REQUEST_TIME: list[float] = [
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
]  # fmt: skip

NUM_COMPLETIONS: list[float] = [1, 2, 5, 10, 20]

NUM_PREEMPTIONS: list[float] = [1, 2, 3, 4, 5, 10, 20]

HTTP_TIME: list[float] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600,
]  # fmt: skip

_FROM_A_TENTH_OF_A_MILLISECOND: list[float] = [
    0.0001, 0.0002, 0.0003, 0.0005, 0.0007, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.007,
    0.01, 0.015, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1,
]  # fmt: skip


def _finer(bounds: list[float]) -> list[float]:
    """With bounds from a tenth of a millisecond on; those of `bounds` stay, so that one count serves both."""
    return sorted({*_FROM_A_TENTH_OF_A_MILLISECOND, *bounds})


TIME_PER_TOKEN_FINE = _finer(TIME_PER_TOKEN)

REQUEST_TIME_FINE = _finer(REQUEST_TIME)


def one_two_five(most: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, ... as far as `most`."""
    bounds: list[float] = []
    scale = 1
    while True:
        for digit in (1, 2, 5):
            if digit * scale > most:
                return bounds
            bounds.append(digit * scale)
        scale *= 10
