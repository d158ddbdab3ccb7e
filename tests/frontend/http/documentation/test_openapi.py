"""`/openapi.json` documents every endpoint, and the server conforms to it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from http_app import models_of
from http_server import Server, events_of
from starlette.routing import Route, compile_path

from quire.frontend import AsyncLLM
from quire.frontend.http.args import ServerArgs
from quire.frontend.http.documentation.openapi import document
from quire.frontend.http.documentation.operation import Operation
from quire.frontend.http.routes import routes
from quire.frontend.http.transport.auth import OPEN_PATHS
from quire.frontend.text.chat.message_keys import KNOWN_KEYS, REFUSED_KEYS

KEY = "key-of-the-tests"
CONFIG = Path(__file__).parent / "schemathesis.toml"
EXAMPLES = os.environ.get("QUIRE_OPENAPI_EXAMPLES", "10")  # generated for each operation


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    """Start a server with a key, whose short context and small requests make the test quick."""
    with Server.start("--api-key", KEY, "--max-model-len", "64", "--max-prompts", "8") as server:
        yield server


@pytest.fixture(scope="module")
def api(server: Server) -> Any:
    return server.request("/openapi.json").json()


def build(server: Server, args: ServerArgs) -> tuple[list[Route], dict[str, Any]]:
    """Return the routes and the document of a server with these arguments."""

    async def make() -> tuple[list[Route], dict[str, Any]]:
        async with AsyncLLM(engine_address=server.engine_address) as llm:
            models = models_of(llm, args)
            known = routes(models)
            return known, document(models, [route for route in known if isinstance(route, Operation)])

    return asyncio.run(make())


def test_schemathesis_finds_no_undocumented_response(guarded: Server, tmp_path: Path) -> None:
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG)),
            *("run", f"{guarded.url}/openapi.json", "--header", f"Authorization: Bearer {KEY}"),
            *("--max-examples", EXAMPLES, "--no-color"),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,  # it writes reports there
        env={**os.environ, "PYTHONPATH": str(CONFIG.parents[3] / "support")},
    )
    assert ran.returncode == 0, ran.stdout[-20_000:] + ran.stderr[-2000:]
    assert guarded.request("/health").status == 200


def test_it_is_valid_openapi(api: Any) -> None:
    assert api["openapi"] == "3.1.0"
    schemathesis.openapi.from_dict(api).validate()


def test_it_lists_exactly_the_routes(server: Server) -> None:
    known, api = build(server, ServerArgs())
    undocumented = [route.path for route in known if route.include_in_schema and not isinstance(route, Operation)]
    assert not undocumented, "make each an Operation, or give include_in_schema=False to files of a page"
    expected = {
        (compile_path(route.path)[1], method.lower())
        for route in known
        if isinstance(route, Operation)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert {(path, method) for path, methods in api["paths"].items() for method in methods} == expected


def test_every_field_of_a_body_has_a_description(api: Any) -> None:
    bodies = {
        operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        for methods in api["paths"].values()
        for operation in methods.values()
        if "requestBody" in operation
    }
    unexplained = [
        f"{body}.{name}"
        for body in bodies
        for name, schema in api["components"]["schemas"][body]["properties"].items()
        if "description" not in schema
    ]
    assert not unexplained, "describe them in descriptions.py"


def test_its_examples_work(server: Server, api: Any) -> None:
    for path, methods in api["paths"].items():
        for operation in methods.values():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            # The demo model has no tokens or labels for some, is loaded for good, and has one engine and no adapters.
            is_for_others = path.startswith(("/infill", "/models/", "/engines")) or "classify" in path or "lora" in path
            if not content or is_for_others:
                continue
            assert server.request(path, content["example"]).status == 200, path
            if "text/event-stream" in operation["responses"]["200"]["content"]:
                reply = server.request(path, {**content["example"], "stream": True})
                assert reply.headers["content-type"].startswith("text/event-stream"), path
                assert events_of(reply.body), path


def test_documented_ranges_are_enforced(server: Server, api: Any) -> None:
    top_p, *_ = api["components"]["schemas"]["ChatBody"]["properties"]["top_p"]["anyOf"]
    assert top_p == {"type": "number", "minimum": 0.0, "maximum": 1.0}
    body: Any = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    for value, status in ((-0.1, 400), (0, 200), (1e-9, 200), (1.0, 200), (1.1, 400)):
        assert server.request("/v1/chat/completions", {**body, "top_p": value}).status == status


def test_messages_document_every_key_that_is_not_ignored(api: Any) -> None:
    message = api["components"]["schemas"]["ChatBody"]["properties"]["messages"]["items"]
    assert set(message["properties"]) == KNOWN_KEYS
    assert all(key in message["additionalProperties"]["description"] for key in REFUSED_KEYS)


def test_it_gives_the_servers_url_and_its_security(server: Server, api: Any) -> None:
    assert api["servers"] == [{"url": "/"}]
    assert api["security"] == []
    _, guarded = build(server, ServerArgs(root_path="/quire", api_key=(KEY,)))
    assert guarded["servers"] == [{"url": "/quire"}]
    assert guarded["security"] == [{"bearer": []}, {"apiKey": []}, {"basic": []}]
    assert all(guarded["paths"][path]["get"]["security"] == [] for path in OPEN_PATHS)
    assert "security" not in guarded["paths"]["/metrics"]["get"]
    _, scraped = build(server, ServerArgs(api_key=(KEY,), metrics_without_key=True))
    assert scraped["paths"]["/metrics"]["get"]["security"] == []
