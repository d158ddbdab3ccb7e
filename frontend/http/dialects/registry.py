"""The table of dialects: a further one is a folder here and a row."""

from __future__ import annotations

import re

from quire.frontend.http.dialects.anthropic.errors import anthropic_error
from quire.frontend.http.dialects.anthropic.routes import anthropic_routes
from quire.frontend.http.dialects.dialect import ApiDialect
from quire.frontend.http.dialects.llama_cpp.routes import llama_cpp_routes
from quire.frontend.http.dialects.ollama.errors import ollama_error
from quire.frontend.http.dialects.ollama.routes import ollama_routes

DIALECTS = (
    ApiDialect(
        name="Anthropic",
        routes=anthropic_routes,
        paths=re.compile(r"/v1/messages(/|\Z)"),
        error_body=anthropic_error,
        id_header="request-id",
        prompt_fields={"/v1/messages": "messages"},
    ),
    ApiDialect(name="Ollama", routes=ollama_routes, paths=re.compile("/api/"), error_body=ollama_error),
    ApiDialect(
        name="llama.cpp",
        routes=llama_cpp_routes,
        prompt_fields={"/embedding": "content", "/embeddings": "content"},
    ),
)
"""In the order of their routes in `/openapi.json`."""


def dialect_at(path: str) -> ApiDialect | None:
    """Return the dialect whose errors a path, without the root path, has; None where they have OpenAI's shape."""
    return next((each for each in DIALECTS if each.paths is not None and each.paths.match(path)), None)
