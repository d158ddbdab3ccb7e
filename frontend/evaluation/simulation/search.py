"""The fewest engines that meet the goodput limits."""

from __future__ import annotations

from collections.abc import Callable

from quire.frontend.evaluation.simulation.plan import Simulated

Try = Callable[[int], Simulated]


def attainment_of(simulated: Simulated) -> float:
    """The share of requests that met every limit."""
    return simulated.run.met["all"] / max(simulated.run.requests, 1)


def find_engines(attempt: Try, attainment: float, most: int) -> tuple[int, Simulated]:
    """The fewest engines, at most `most`, with which the share of requests that meet the limits is `attainment`.

    More engines are taken to be never worse: the number is doubled until it is enough, and then bisected. Raises
    ValueError when `most` are not enough, or as many as there are requests.
    """
    few, many = 0, 1
    while attainment_of(found := attempt(many)) < attainment:
        if many >= most or many >= found.run.requests:
            raise ValueError(
                f"{many} engines are not enough: {attainment_of(found):.2%} of the requests meet the limits, and "
                f"{attainment:.2%} should; loosen the limits of --goodput, lower --attainment, or raise --max-engines"
            )
        few, many = many, min(2 * many, most)
    while many - few > 1:
        middle = (few + many) // 2
        if attainment_of(tried := attempt(middle)) >= attainment:
            many, found = middle, tried
        else:
            few = middle
    return many, found
