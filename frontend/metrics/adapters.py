"""The adapters of open requests, in the labels of one gauge: routers send a request to where its adapter is in use."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

from quire.frontend.client.observer import OpenRequest
from quire.frontend.metrics.prometheus import Families
from quire.protocol.messages import AdapterInfo


class AdapterMeter:
    """Keeps the open requests that have an adapter; an `Observer` tells it of them."""

    def __init__(self) -> None:
        self._open: dict[OpenRequest, str] = {}  # and the names of their adapters

    def begin(self, request: OpenRequest) -> None:
        """Take note of a request that is submitted."""
        if (adapter := request.options.lora_request) is not None:
            self._open[request] = adapter.lora_name

    def end(self, request: OpenRequest) -> None:
        """Take note of its end."""
        self._open.pop(request, None)

    def counts(self) -> Counter[str]:
        """Return the number of open requests of each name."""
        return Counter(self._open.values())

    def add_to(self, families: Families, info: AdapterInfo | None) -> None:
        """Add vLLM's gauge; `info`: that of the engine, None without adapters.

        Adapters count as running from the first output of a request on, and as waiting before. The value is a Unix
        time, as with vLLM, since pickers read the latest series.
        """
        running, waiting = dict[str, None](), dict[str, None]()
        for request, name in self._open.items():
            (waiting if request.metrics.first_scheduled_time is None else running)[name] = None
        labels = {
            "max_lora": "0" if info is None else str(info.max_loras),
            "running_lora_adapters": _listed(running),
            "waiting_lora_adapters": _listed(name for name in waiting if name not in running),
        }
        families.gauge("lora_requests_info", "LoRA adapters of open requests, in labels.", time.time(), **labels)


def _listed(names: Iterable[str]) -> str:
    return ",".join(sorted(names))
