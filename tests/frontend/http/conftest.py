"""A server for all tests that need no special one, and leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from http_server import Server
from openai import OpenAI


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Serve the demo model."""
    with Server.start() as server:
        yield server


@pytest.fixture(scope="module")
def openai(server: Server) -> Iterator[OpenAI]:
    """Connect OpenAI's client to the server."""
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
