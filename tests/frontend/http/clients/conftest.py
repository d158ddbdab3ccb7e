"""Servers for the tests of client libraries. Those that are not installed, by the extra `clients`, are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chat_templates import QWEN
from demo_copies import model_with_template
from http_server import Server


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve a model whose chat template writes tools, calls and results."""
    with Server.start(str(model_with_template(tmp_path_factory.mktemp("hermes") / "model", QWEN))) as server:
        yield server
