from __future__ import annotations

from contextlib import ExitStack

import pytest

from quire.frontend.http.errors import ApiError
from quire.frontend.http.transport.arriving_bodies import ArrivingBodies


def test_bodies_of_one_address_may_take_all_and_no_more() -> None:
    bodies = ArrivingBodies(100)
    with bodies.body("one") as grow, bodies.body("one") as grow_other:
        grow(60)
        grow_other(40)
        with pytest.raises(ApiError, match="bodies of 100 bytes are arriving, 100 of them from this address") as caught:
            grow(1)
        assert caught.value.status == 503
        assert caught.value.headers["Retry-After"] == "1"
    with bodies.body("one") as grow:
        grow(100)


def test_an_address_that_takes_all_leaves_others_their_share() -> None:
    bodies = ArrivingBodies(100)
    with bodies.body("greedy") as greedy, bodies.body("other") as other, bodies.body("third") as third:
        greedy(100)
        other(50)
        third(33)
        for grow in (greedy, other, third):
            with pytest.raises(ApiError):
                grow(1)
    with ExitStack() as stack:  # nothing is left of them
        stack.enter_context(bodies.body("greedy"))(100)


def test_a_body_that_is_refused_counts_no_longer() -> None:
    bodies = ArrivingBodies(100)
    with bodies.body("one") as grow:
        grow(70)
        with pytest.raises(ApiError):
            grow(70)
    with bodies.body("one") as grow:
        grow(100)


def test_memory_is_given_back_after_many_bodies() -> None:
    trims: list[int] = []
    bodies = ArrivingBodies(1 << 30, trim=lambda: trims.append(1))
    for _ in range(16):
        with bodies.body("one") as grow:
            grow(8 << 20)
    assert len(trims) == 2
