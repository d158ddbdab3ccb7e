"""One server for all tests of a file that need no other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from http_server import Server
from openai import OpenAI


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The demo model, served."""
    with Server.start() as server:
        yield server


@pytest.fixture(scope="module")
def openai(server: Server) -> Iterator[OpenAI]:
    """OpenAI's own client of it."""
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
