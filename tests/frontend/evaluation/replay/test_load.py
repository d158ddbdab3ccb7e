"""Share of a run that is over."""

from __future__ import annotations

import pytest

from quire.frontend.evaluation.replay.load import Extent


@pytest.mark.parametrize(
    ("extent", "ended", "elapsed", "share"),
    [
        (Extent(), 3, 4.0, None),
        (Extent(requests=10), 3, 4.0, 0.3),
        (Extent(seconds=16.0), 3, 4.0, 0.25),
        (Extent(10, 16.0), 3, 4.0, 0.25),
        (Extent(10, 16.0), 3, 99.0, 0.3),
        (Extent(10, 16.0), 3, None, 0.3),
        (Extent(seconds=16.0), 3, None, None),
        (Extent(seconds=16.0), 3, 99.0, 1.0),
        (Extent(10, 0.0), 3, 4.0, 0.3),
    ],
)
def test_the_share_is_of_requests_and_of_the_time_whichever_is_less(
    extent: Extent, ended: int, elapsed: float | None, share: float | None
) -> None:
    assert extent.share(ended, elapsed) == share
