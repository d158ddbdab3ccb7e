"""The features of an engine, in the order in which the step asks them."""

from __future__ import annotations

import time
from collections.abc import Callable

from quire.engine_core.crash_journal import CrashJournal
from quire.engine_core.feature import Feature
from quire.engine_core.kv_events import KvEvents
from quire.engine_core.kv_tiers.page_server import PageServer
from quire.engine_core.outputs import Send
from quire.engine_core.scheduling.served_prefixes import ServedPrefixes
from quire.engine_core.scheduling.trials import Trials
from quire.engine_core.speculation.speculation import Speculation
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
    speculation: Speculation | None = None,
    page_server: PageServer | None = None,
    kv_events: KvEvents | None = None,
) -> list[Feature]:
    """Return all features of an engine whose messages go to `send`.

    `journal` has what the engines before this one died of; `page_server` serves pages to other engines, and
    `kv_events` publishes what the prefix cache gains and loses. Trials come
    after what may kill the engine when a step has been computed, so that it is blamed on the step's requests.
    """
    drafting = [] if speculation is None else [speculation]
    served = ServedPrefixes(sequences, limits, send, page_server, clock)
    publishing = [] if kv_events is None else [kv_events]
    return [*drafting, Trials(journal or CrashJournal(), clock), served, *publishing, Tracer(send, clock)]
