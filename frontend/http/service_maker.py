"""Services of a model, one each time that it is loaded."""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence
from typing import Any

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.http.server_state import ServerState
from quire.frontend.http.service import ModelService
from quire.frontend.metrics.otlp import request_spans
from quire.frontend.metrics.server import ServerMetrics


class ServiceMaker:
    """Makes the services of a model; its metrics and spans go on from one to the next."""

    def __init__(self, server: ServerState, names: Sequence[str]) -> None:
        """`names`: those that clients may use, the one that responses use first."""
        self.names = names
        self.metrics = ServerMetrics(model_name=names[0], prefix=server.args.metrics_prefix)
        self._server = server
        self._spans = request_spans(server.args.otlp_traces_endpoint, names[0])
        if self._spans is not None:
            atexit.register(self._spans.close)

    def make(self, llm: AsyncLLM, defaults: Mapping[str, Any]) -> ModelService:
        """Return the service of the loaded model. `defaults`: sampling values of requests that omit them."""
        if self._spans is not None:
            llm.add_observer(self._spans)
        return ModelService(
            llm=llm,
            server=self._server,
            names=self.names,
            metrics=self.metrics,
            defaults=defaults,
            has_chat_template=llm.chat_template != "",
        )
