"""The models of an HTTP application in the process of a test."""

from __future__ import annotations

from quire.frontend import AsyncLLM
from quire.frontend.http.args import ServerArgs
from quire.frontend.http.models.served_models import ServedModels
from quire.frontend.http.server_state import ServerState
from quire.frontend.http.service import ModelService
from quire.frontend.metrics.server import ServerMetrics


def models_of(llm: AsyncLLM, args: ServerArgs | None = None) -> ServedModels:
    """The one model "m" of a server."""
    server, metrics = ServerState(args or ServerArgs()), ServerMetrics(model_name="m")
    return ServedModels.of(ModelService(llm=llm, server=server, names=["m"], metrics=metrics))
