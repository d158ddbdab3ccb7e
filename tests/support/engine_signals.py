"""Signals to engines at the worst moment."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from quire.protocol.messages import EngineCoreOutputs

if TYPE_CHECKING:
    from quire.frontend import LLM
    from quire.frontend.client.engine_client import Delivery


def hit_soon(llm: LLM, number: signal.Signals) -> None:
    """Send a signal to the engine as soon as the next tokens come from it."""
    client = llm._engine.engines
    pid, deliver = client.ready.engine_pid, client._deliver

    def hit(delivery: Delivery) -> None:
        if isinstance(delivery, EngineCoreOutputs) and delivery.outputs:
            client._deliver = deliver
            os.kill(pid, number)
        deliver(delivery)

    client._deliver = hit
