"""Keeps Python's garbage collector from stalling a run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLDS = (50_000, 20, 1000)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect seldom, and nothing of what exists already.

    A run makes hardly any cycles, but many objects that live for long; a full collection looks at all of them while
    requests wait to be sent.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
