"""Restarts of an engine: which deaths count, how long the pauses are, and when there is no other start."""

from __future__ import annotations

from quire.frontend.client.restarts import Restarts


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def restarts(most: int) -> tuple[Restarts, Clock]:
    """Those of an engine that has just become ready, after a second."""
    clock = Clock()
    made = Restarts(most, clock)
    clock.now = 1.0
    made.note_ready()
    return made, clock


def test_pauses_grow_with_deaths_in_a_row_until_there_is_no_other_start() -> None:
    made, _ = restarts(most=10)
    pauses = []
    while not made.are_over:
        made.note_death(is_explained=False)
        pauses.append(made.pause)
    assert pauses == [0.0, 0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_deaths_that_a_request_has_caused_delay_nothing() -> None:
    made, _ = restarts(most=3)
    for _ in range(100):
        made.note_death(is_explained=True)
    made.note_death(is_explained=False)
    made.note_death(is_explained=False)
    made.note_death(is_explained=True)
    made.forgive(2)  # as the last one has convicted a request that was in the steps of both
    assert (made.num_deaths, made.pause, made.are_over) == (0, 0.0, False)


def test_an_engine_that_has_lived_long_has_not_died_again() -> None:
    made, clock = restarts(most=1)
    made.note_death(is_explained=False)
    made.note_failure()
    assert made.are_over
    clock.now += 10.0
    made.note_death(is_explained=False)
    assert made.num_deaths == 1


def test_without_restarts_the_first_death_is_the_end_whoever_has_caused_it() -> None:
    made, _ = restarts(most=0)
    made.note_death(is_explained=True)
    assert made.are_over
