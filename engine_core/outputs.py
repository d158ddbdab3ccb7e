"""Increments on their way to the clients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from quire.protocol.messages import EngineCoreOutput, EngineCoreOutputs, EngineMessage, SchedulerStats

Send = Callable[[bytes, EngineMessage], None]


class Outputs:
    """Collects the outputs of a step by client, so that each client gets one message."""

    def __init__(self, send: Send, clock: Callable[[], float]) -> None:
        self.send = send  # at once, ahead of the outputs
        self.by_client: defaultdict[bytes, list[EngineCoreOutput]] = defaultdict(list)
        self.clock = clock

    def add(self, client_id: bytes, output: EngineCoreOutput) -> None:
        """Add an output to the client's next message."""
        self.by_client[client_id].append(output)

    def flush(self, stats: SchedulerStats | None = None) -> None:
        """Send each client its outputs."""
        if not self.by_client:
            return
        now = self.clock()
        for client_id, outputs in self.by_client.items():
            self.send(client_id, EngineCoreOutputs(outputs, stats, now))
        self.by_client.clear()
