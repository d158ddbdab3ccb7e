"""The features of an engine, in the order in which the step asks them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from quire.engine_core.crash_journal import CrashJournal
from quire.engine_core.feature import Feature
from quire.engine_core.kv_tiers.page_server import PageSender
from quire.engine_core.outputs import Send
from quire.engine_core.prefix_reports import PrefixReporter
from quire.engine_core.scheduling.served_prefixes import ServedPrefixes
from quire.engine_core.scheduling.trials import Trials
from quire.engine_core.trace import Tracer
from quire.kernels.runner import Sequences
from quire.protocol.engine_shape import EngineShape


def make_features(
    sequences: Sequences,
    limits: EngineShape,
    send: Send,
    clock: Callable[[], float] = time.monotonic,
    *,
    journal: CrashJournal | None = None,
    page_server: PageSender | None = None,
    chosen: Iterable[Feature | None] = (),
) -> list[Feature]:
    """Return all features of an engine whose messages go to `send`.

    `journal` has what the engines before this one died of; `page_server` serves pages to other engines; `chosen` are
    features that the options ask for, None where they don't. Trials come after what may kill the engine when a step has
    been computed, so that it is blamed on the step's requests.
    """
    first = [feature for feature in chosen if feature is not None]
    served = ServedPrefixes(sequences, limits, send, page_server, clock)
    reporter = PrefixReporter(sequences, limits.block_size, send)
    return [*first, Trials(journal or CrashJournal(), clock), served, reporter, Tracer(send, clock)]
